"""Runs of several ranks under mpiexec: equal to one rank, stopped, resumed, refused.

What every layout computes is tested with threads as ranks, in tests/technique/; here a few of each
kind show that whole programs are started, told and ended as they should. Training is about a
chapter's own code, Runs about what all chapters share.

  test_ranks.py --bin build/release/bin [--chapter ch02_data_parallel]
  test_ranks.py --binary build/release/bin/ch02_data_parallel   the same of both

Needs the chapters there, and mpiexec on PATH (77: skipped without it). Without
--chapter, the last one that knows of ranks is tested.
"""
import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import trace_format  # noqa: E402
from tests.course import replay_reference  # noqa: E402
from tools import chapters  # noqa: E402
from tools.book import delta  # noqa: E402
from tools.look import trace, why  # noqa: E402
from tools.run import simulation  # noqa: E402

CHAPTERS = chapters.find_chapters()
FIRST = CHAPTERS[0].name  # knows of no ranks
CHAPTER = [chapter.name for chapter in CHAPTERS if chapter.ranks][-1]
BIN = ROOT / "build" / "release" / "bin"
SECONDS = 15  # for a run that goes wrong to end, on a machine with other things to do
TINY = ["--hidden_size", "32", "--num_layers", "2", "--num_heads", "2", "--ffn_hidden_size", "64",
        "--seq_len", "32", "--sample_tokens", "0", "--eval_interval", "0"]
UNTRACED = ["--trace_steps", "0"]


def needs(technique):
    """Skips a test where the chapter that is tested does not have the technique, ROOM/HEADER."""
    if not any((chapter.folder / f"{technique}.h").exists() for chapter in CHAPTERS):
        raise ValueError(f"no chapter has {technique}.h, so its test would never run")

    def decorate(test):
        @functools.wraps(test)
        def run(self):
            if not (ROOT / CHAPTER / f"{technique}.h").exists():
                self.skipTest(f"{CHAPTER} has no {technique}.h")
            test(self)
        return run
    return decorate


def tiny(flags):
    """TINY but for what the flags say themselves; a model that they name has its own sizes."""
    own = set(flags)
    if "--model" in own:
        own |= {"--hidden_size", "--num_layers", "--num_heads", "--ffn_hidden_size"}
    pairs = zip(TINY[::2], TINY[1::2])
    return [word for name, value in pairs if name not in own for word in (name, value)]


def environment(**extra):
    """What ./book run sets for ranks that share a machine."""
    open_mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    return dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", **open_mpi, **extra)


def ranks_alive(run_dir):
    """Pids of processes whose command line names the run directory; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and str(run_dir) in command and state != "Z":
            found.append(int(entry.name))
    return found


def records(run_dir):
    """Each rank's flight record as a list of JSON objects."""
    found = {}
    for path in sorted((Path(run_dir) / "flight").glob("rank_*.txt")):
        lines = [line.strip() for line in path.read_text().splitlines()]
        found[int(path.stem[5:])] = [json.loads(line) for line in lines if line]
    return found


def metrics(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


class RankTest(unittest.TestCase):
    """Starts things under mpiexec in a directory of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_ranks_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.run_dir = self.folder / "run"

    def start(self, ranks, program, *flags, env=None, **options):
        command = ["mpiexec", "-n", str(ranks), str(BIN / program), *flags,
                   "--run_dir", str(self.run_dir)]
        return subprocess.Popen(command, env=env or environment(), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                errors="replace", **options)

    def finish(self, process, seconds=SECONDS):
        """(exit code, output), within so many seconds and without orphans."""
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            self.fail(f"still running after {seconds} s:\n{output}")
        deadline = time.monotonic() + 5
        while ranks_alive(self.run_dir) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(ranks_alive(self.run_dir), [], "orphans")
        return process.returncode, output

    def in_the_middle(self, ranks, program=None, *flags):
        """A training run that has come past its first steps and would go on for long."""
        process = self.start(ranks, program or CHAPTER, *TINY, *UNTRACED, "--steps", "100000",
                             "--micro_batch_size", "1", *flags)
        path = self.run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 30
        while not (path.exists() and path.read_text().count("\n") > 5):
            self.assertLess(time.monotonic(), deadline, "no step in 30 s")
            time.sleep(0.1)
        return process

    def check_kill_9_is_explained(self, process, rank):
        """Kills the rank; the run ends, and what the ranks were in is known."""
        pid = records(self.run_dir)[rank][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        code, output = self.finish(process)
        self.assertNotEqual(code, 0, output)
        why_text = self.why()
        self.assertRegex(why_text, rf"^rank {rank} \(pid {pid}\)")
        self.assertRegex(why_text, rf"rank [^{rank}]  .*#\d+ of")

    def train(self, ranks, *flags, traced=UNTRACED, seconds=60):
        """The chapter's program, which has to end well; returns what it prints."""
        code, output = self.finish(
            self.start(ranks, CHAPTER, *tiny(flags), *traced, *flags), seconds)
        self.assertEqual(code, 0, output)
        trace_format.check(self.run_dir / "trace.json")
        return output

    def why(self):
        """What ./book why says of the run."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            why.explain(self.run_dir)
        return said.getvalue()


class Training(RankTest):
    """What the chapter's own code computes, sends and refuses."""

    def test_ranks_share_the_batch(self):
        flags = ["--steps", "5", "--dtype", "f64", "--data_order", "shuffled"]
        self.train(1, *flags, "--micro_batch_size", "12")
        expected = metrics(self.run_dir)
        # Every way on every number of ranks is in tests/mpi_parity.cpp.
        for ranks, micro_batch, accumulate, grad_sync in (
                (2, 3, 2, "naive"), (3, 4, 1, "overlapped"), (4, 1, 3, "bucketed")):
            with self.subTest(ranks=ranks, grad_sync=grad_sync):
                self.train(ranks, *flags, "--micro_batch_size", str(micro_batch),
                           "--grad_acc_steps", str(accumulate), "--grad_sync", grad_sync,
                           "--bucket_mb", "0.03", "--overwrite")
                self.check_metrics(expected)

    def test_speed_and_utilisation_are_of_all_ranks_together(self):
        self.train(2, "--steps", "4", "--micro_batch_size", "3", "--grad_acc_steps", "2")
        run = json.loads((self.run_dir / "run.json").read_text())
        f = run["config"]
        report = (self.run_dir / "report.md").read_text()
        speed, ms, tokens = map(float, re.search(
            r"\| speed \| (\d+) tokens/s: ([\d.]+) ms a step of (\d+) tokens", report).groups())
        self.assertEqual(tokens, 2 * 3 * 2 * f["seq_len"])
        self.assertAlmostEqual(speed * ms * 1e-3 / tokens, 1, delta=0.01)
        width = f["hidden_size"] // f["num_heads"] * f["num_kv_heads"]
        weights = f["num_layers"] * f["hidden_size"] * (
            2 * f["hidden_size"] + 2 * width + 3 * f["ffn_hidden_size"]) \
            + f["hidden_size"] * f["vocab_size"]
        channels = f["num_layers"] * f["hidden_size"] * (f["seq_len"] + 1) / 2
        for step in metrics(self.run_dir):
            self.assertAlmostEqual(step["tokens_per_s"] * step["step_ms"] * 1e-3 / tokens, 1,
                                   delta=0.01)
            possible = run["matmul_gflops"] * 1e9 * step["step_ms"] * 1e-3
            for key, operations in (("mfu", 6 * weights + 12 * channels),
                                    ("hfu", 6 * weights + 14 * channels)):
                self.assertAlmostEqual(step[key] * possible / (operations * tokens), 1,
                                       delta=0.01, msg=key)

    def test_the_ledger_is_the_formula_and_that_of_a_step_on_shapes(self):
        flags = ["--micro_batch_size", "2", "--bucket_mb", "0.02", "--node_size", "2"]
        self.train(4, "--steps", "2", *flags)
        run = json.loads((self.run_dir / "run.json").read_text())
        gradients = 4 * run["parameters"]
        for step in metrics(self.run_dir):
            self.assertEqual(step["comm_bytes"]["dp.all_reduce"], gradients)
        entry = json.loads((self.run_dir / "ledger.json").read_text())["dp.all_reduce"]
        self.assertEqual(entry["payload_bytes"], 2 * gradients)
        self.assertAlmostEqual(entry["wire_bytes"] / (2 * 2 * 3 / 4 * gradients), 1, delta=0.01)
        row = re.search(r"\| gradients sent \| (\d+) bytes a step by rank 0",
                        (self.run_dir / "report.md").read_text())
        self.assertEqual(2 * int(row[1]), entry["wire_bytes"])
        path = self.run_dir.with_name("estimate.json")
        text = subprocess.run([str(BIN / CHAPTER), *tiny(flags), *flags, "--dp_size", "4", "--estimate",
                               "--estimate_file", str(path)], capture_output=True, text=True, check=True).stdout
        found = json.loads(path.read_text())["sent"]
        self.assertEqual(found["steps"], 2)
        for what in ("calls", "payload_bytes", "wire_bytes", "net_bytes"):
            self.assertEqual(found["ledger"]["dp.all_reduce"][what], entry[what], what)
        self.assertIn("rank 0 of 4", text)
        links = [2 * int(sent) for sent in re.search(r"^dp +(\d+) +(\d+)$", text, re.M).groups()]
        self.assertEqual(links, [entry["wire_bytes"] - entry["net_bytes"], entry["net_bytes"]], "bytes by link")
        self.assertGreater(min(links), 0)

    @needs("tensor_parallel/linears")
    def test_ranks_share_the_weights(self):
        flags = ["--steps", "2", "--dtype", "f64", "--num_heads", "4", "--num_kv_heads", "2"]
        self.train(1, *flags, "--micro_batch_size", "8", "--eval_interval", "2")
        expected = metrics(self.run_dir)
        for ranks, more in ((2, ["--tp_size", "2", "--tp_overlap", "chunks"]),
                            (2, ["--tp_size", "2", "--tp_overlap", "batch_halves"]),
                            (4, ["--tp_size", "2", "--sequence_parallel", "--zero_stage", "3"])):
            with self.subTest(ranks=ranks, flags=more):
                self.check_training(ranks, [*flags, *more], ranks // int(more[1]), expected,
                                    "activations sent over tp")
                run = json.loads((self.run_dir / "run.json").read_text())
                self.assertEqual(run["parameters"], self.parameters(run["config"]))

    @needs("context_parallel/group")
    def test_ranks_share_the_tokens_of_a_sample(self):
        flags = ["--steps", "2", "--dtype", "f64", "--num_heads", "4", "--num_kv_heads", "2"]
        self.train(1, *flags, "--micro_batch_size", "8", "--eval_interval", "2")
        expected = metrics(self.run_dir)
        for ranks, more in ((2, ["--cp_size", "2", "--cp_method", "ulysses"]),
                            (2, ["--cp_size", "2", "--cp_layout", "contiguous", "--recompute",
                                 "full", "--cp_recompute", "keep"]),
                            (4, ["--cp_size", "2", "--cp_method", "all_gather", "--tp_size", "2",
                                 "--sequence_parallel", "--zero_stage", "3"])):
            with self.subTest(ranks=ranks, flags=more):
                size = int(more[1]) * (2 if "--tp_size" in more else 1)
                self.check_training(ranks, [*flags, *more], ranks // size, expected,
                                    "attention sent over cp")

    @needs("pipeline_parallel/executor")
    def test_ranks_share_the_layers(self):
        flags = ["--steps", "2", "--dtype", "f64", "--num_layers", "4"]
        self.train(1, *flags, "--micro_batch_size", "8", "--eval_interval", "2")
        expected = metrics(self.run_dir)
        for ranks, more in ((2, ["--pp_size", "2", "--pp_schedule", "zb_h1", "--grad_acc_steps",
                                 "4"]),
                            (2, ["--pp_size", "2", "--pp_schedule", "dualpipe", "--grad_acc_steps",
                                 "4"]),
                            (4, ["--pp_size", "2", "--pp_schedule", "interleaved", "--pp_chunks",
                                 "2", "--grad_acc_steps", "2", "--zero_stage", "3"])):
            with self.subTest(ranks=ranks, flags=more):
                of_step = int(more[more.index("--grad_acc_steps") + 1]) * ranks // int(more[1])
                self.train(ranks, *flags, *more, "--micro_batch_size", str(8 // of_step),
                           "--eval_interval", "2", "--overwrite")
                self.check_metrics(expected)
                row = re.search(r"\| activations sent over pp \| (\d+) bytes a step by rank 0, by "
                                r"formula (\d+)", (self.run_dir / "report.md").read_text())
                self.assertEqual(row[1], row[2])

    @needs("expert_parallel/group")
    def test_ranks_share_the_experts(self):
        flags = ["--steps", "2", "--dtype", "f64", "--num_heads", "4", "--num_experts", "8",
                 "--moe_ffn_hidden_size", "16", "--num_shared_experts", "1", "--balance", "batch",
                 "--balance_coef", "1", "--capacity_factor", "1"]
        self.train(1, *flags, "--micro_batch_size", "8", "--eval_interval", "2")
        expected = metrics(self.run_dir)
        self.assertGreater(sum(layer["dropped"] for layer in expected[-1]["experts"]), 0)
        tensor = ["--tp_size", "2", "--sequence_parallel"]
        for ranks, samples, more in (
                (4, 2, ["--ep_size", "4", "--dispatch", "by_node", "--node_size", "2",
                        "--zero_stage", "3"]),
                (2, 8, [*tensor, "--expert_tp", "--recompute", "full"]),
                (4, 4, ["--ep_size", "2", *tensor, "--pp_size", "2", "--grad_acc_steps", "2"]),
                (4, 1, ["--ep_size", "2", "--pp_size", "2", "--grad_acc_steps", "4",
                        "--pp_schedule", "dualpipe", "--overlap_dispatch"])):
            with self.subTest(ranks=ranks, flags=more):
                self.train(ranks, *flags, *more, "--micro_batch_size", str(samples),
                           "--eval_interval", "2", "--overwrite")
                self.check_metrics(expected)
                self.assertEqual("| rows sent over ep |" in (self.run_dir / "report.md").read_text(),
                                 "--ep_size" in more)
                for step, reference in zip(metrics(self.run_dir), expected, strict=True):
                    off = abs(step["expert_loss"] - reference["expert_loss"])
                    self.assertLessEqual(off, 1e-10 * reference["expert_loss"])
                    for found, layer in zip(step["experts"], reference["experts"], strict=True):
                        entropies = found.pop("entropy"), layer["entropy"]
                        self.assertAlmostEqual(*entropies, delta=1e-9)
                        self.assertEqual({**found, "entropy": layer["entropy"]}, layer)

    @needs("proof/compositions")
    def test_layouts_drawn_at_random_train_on_the_ranks_that_are_there(self):
        # One layout a program; with --full forty of them.
        drawn = [(3, 12)]
        if os.environ.get("USP_TEST_FULL") == "1":
            drawn += [(ranks, seed) for ranks in (2, 4, 5, 6) for seed in range(100 * ranks, 100 * ranks + 10)]
        for ranks, seed in drawn:
            with self.subTest(ranks=ranks, seed=seed):
                code, output = self.finish(
                    self.start(ranks, CHAPTER, "--fuzz", "0.0001", "--seed", str(seed)), 60)
                self.assertEqual(code, 0, output)
                self.assertRegex(output, rf"\A1 compositions, numbers {seed} to {seed}, .*\n"
                                         r"all are equal to one process within \S+\n\Z")

    @needs("expert_parallel/group")
    def test_experts_that_cannot_be_shared_out_are_refused_once(self):
        experts = ["--num_experts", "8"]
        tensor = ["--tp_size", "2", "--sequence_parallel"]
        self.check_refused((
            (2, [*experts, "--ep_size", "3"], "ep_size=3 must divide num_experts=8; try 1 or 2"),
            (4, [*experts, "--ep_size", "4", *tensor, "--expert_tp"],
             "ep_size=4 must divide dp_size*cp_size=2; try 1 or 2")))
        # One rank that estimates what several would do has the same rules.
        self.check_refused((
            (1, [*experts, "--ep_size", "8", "--dp_size", "2"],
             "ep_size=8 must divide dp_size*cp_size*tp_size=2; try 1 or 2"),
            (1, [*experts, "--num_experts_per_tok", "9"], "num_experts_per_tok=9"),
            (1, [*experts, "--num_experts_per_tok", "3", "--expert_nodes", "4", "--route_nodes",
                 "1"], "num_experts_per_tok=3; try 2"),
            (1, [*experts, "--capacity_factor", "0"], "capacity_factor=0 must be above 0"),
            (1, ["--ep_size", "2"], "ep_size needs experts; leave it out")),
            "--estimate")

    def check_metrics(self, expected):
        """The run has the losses of `expected`."""
        for step, reference in zip(metrics(self.run_dir), expected, strict=True):
            for key in ("loss", "grad_norm", "val_loss"):
                if key in reference:
                    self.assertLessEqual(abs(step[key] - reference[key]),
                                         1e-10 * abs(reference[key]), key)
            self.assertEqual(step["tokens"], reference["tokens"])

    def check_training(self, ranks, flags, dp, expected, traffic):
        """The run has the losses of `expected`, and its report's row of traffic two equal numbers.
        """
        self.train(ranks, *flags, "--micro_batch_size", str(8 // dp), "--eval_interval", "2",
                   "--overwrite")
        self.check_metrics(expected)
        row = re.search(rf"\| {traffic} \| (\d+) bytes a step by rank 0, by formula (\d+)",
                        (self.run_dir / "report.md").read_text())
        self.assertLessEqual(abs(int(row[1]) / int(row[2]) - 1), 0.01, row[0])

    @staticmethod
    def parameters(config):
        """Of a model of these sizes."""
        hidden, heads = config["hidden_size"], config["num_heads"]
        width = hidden // heads * (config["num_kv_heads"] or heads)
        layer = 2 * hidden * hidden + 2 * hidden * width \
            + 3 * hidden * config["ffn_hidden_size"] + 2 * hidden
        tables = 1 if config["tie_word_embeddings"] else 2
        return tables * config["vocab_size"] * hidden + hidden + config["num_layers"] * layer

    @needs("tensor_parallel/linears")
    def test_a_mesh_that_cannot_be_is_refused_once(self):
        self.check_refused((
            (2, ["--tp_size", "3"], "tp_size=3 must divide num_heads=2; try 1 or 2"),
            (3, ["--tp_size", "2"], "dp_size*tp_size = 1*2 = 2 must equal the 3 ranks")))
        self.check_refused((
            (1, ["--tp_size", "2", "--seq_len", "31", "--sequence_parallel"],
             "tp_size=2 must divide seq_len=31"),
            (1, ["--tp_size", "2", "--gathered_input", "kept"],
             "gathered_input is for sequence_parallel; leave it out"),
            (1, ["--tp_size", "2", "--tp_overlap", "batch_halves", "--micro_batch_size", "3"],
             "tp_overlap=batch_halves needs an even micro_batch_size, not 3; "
             "try --micro_batch_size 4"),
            (1, ["--tp_size", "-1"], "tp_size=-1")), "--estimate")

    @needs("context_parallel/group")
    def test_tokens_that_cannot_be_shared_out_are_refused_once(self):
        self.check_refused((
            (3, ["--cp_size", "2"], "dp_size*cp_size = 1*2 = 2 must equal the 3 ranks"),))
        self.check_refused((
            (1, ["--cp_size", "3"], "seq_len=32 must divide into the 6 pieces"),
            (1, ["--cp_size", "4", "--cp_method", "ulysses"],
             "cp_size=4 must divide the 2 heads of a rank"),
            (1, ["--cp_size", "2", "--ulysses_size", "2"], "ulysses_size is for"),
            (1, ["--cp_size", "2", "--cp_recompute", "keep"], "cp_recompute=keep is for"),
            (1, ["--cp_size", "-1"], "cp_size=-1")), "--estimate")

    def check_refused(self, cases, *common):
        """Every (ranks, flags, words): ends with 2 after one line that has the words."""
        for ranks, flags, words in cases:
            with self.subTest(flags=flags):
                code, output = self.finish(
                    self.start(ranks, CHAPTER, *tiny(flags), *flags, *common))
                self.assertEqual((code, output.count("error: ")), (2, 1), output)
                self.assertIn(words, output)


class Runs(RankTest):
    """How the chapter's program runs, stops and goes on: what all chapters share."""

    def test_every_chapter_on_one_rank_prints_its_parents_losses(self):
        own = {}
        for program in (chapter.name for chapter in CHAPTERS):
            running = {}
            for dtype in ("f32", "bf16", "f64"):  # at once
                run_dir = self.folder / program / dtype
                running[run_dir] = subprocess.Popen(
                    [str(BIN / program), *TINY, *UNTRACED, "--steps", "8", "--dtype", dtype,
                     "--run_dir", str(run_dir)], env=environment(), stdout=subprocess.DEVNULL)
            for run_dir, process in running.items():
                self.assertEqual(process.wait(SECONDS), 0)
                own[program, run_dir.name] = [line.split(', "lr"')[0] for line in
                                              (run_dir / "metrics.jsonl").read_text().splitlines()]
        for (program, dtype), losses in own.items():
            parent = delta.read_manifest(program).parent
            if parent is not None:
                self.assertEqual(losses, own[parent, dtype], f"{program}, {dtype}")

    def test_a_dimension_alone_prints_its_chapters_losses(self):
        alone = {"ch02_data_parallel": ["--dp_size", "2"], "ch03_tensor_sequence": ["--tp_size", "2", "--sequence_parallel"],
                 "ch04_context": ["--cp_size", "2"], "ch05_pipeline": ["--pp_size", "2", "--grad_acc_steps", "4"],
                 "ch06_expert": ["--dp_size", "2", "--num_experts", "4", "--ep_size", "2"]}
        self.assertLessEqual(set(alone), {chapter.name for chapter in CHAPTERS})
        for program, flags in alone.items():
            results = {}
            for name in (program, CHAPTER):
                with self.subTest(program=name, flags=flags):
                    code, output = self.finish(self.start(2, name, *TINY, *UNTRACED, "--steps", "8", "--dtype", "f64",
                                                          "--overwrite", *flags), 60)
                    self.assertEqual(code, 0, output)
                    results[name] = [(step["loss"], step["grad_norm"]) for step in metrics(self.run_dir)]
            self.assertEqual(len(results[program]), 8)
            self.assertEqual(results[program], results[CHAPTER], program)

    def test_a_killed_run_goes_on_bit_for_bit(self):
        flags = ["--steps", "30", "--micro_batch_size", "2", "--bucket_mb", "0.02",
                 "--checkpoint_interval", "5"]
        folder = self.run_dir / "checkpoints"

        def results():
            return [(step["loss"], step["grad_norm"], step["tokens"])
                    for step in metrics(self.run_dir)]

        def state():
            return (folder / "step-00000030" / "state.safetensors").read_bytes()

        self.train(2, *flags)
        expected = results(), state()
        process = self.start(2, CHAPTER, *TINY, *UNTRACED, *flags, "--overwrite")
        deadline = time.monotonic() + 30
        while not (folder / "step-00000010").exists():
            self.assertLess(time.monotonic(), deadline, "no checkpoint in 30 s")
            time.sleep(0.01)
        os.kill(records(self.run_dir)[1][0]["pid"], signal.SIGKILL)
        self.assertNotEqual(self.finish(process)[0], 0)
        output = self.train(2, *flags, "--resume")
        self.assertEqual(output.count("Resumed from"), 1, output)
        self.assertEqual((results(), state()), expected)

    def test_only_rank_0_speaks_and_writes(self):
        output = self.train(4, "--steps", "2", "--micro_batch_size", "1")
        self.assertEqual(output.count("parameters  "), 1, output)
        self.assertEqual(len(metrics(self.run_dir)), 2)
        self.assertEqual(sorted(records(self.run_dir)), [0, 1, 2, 3])
        self.assertEqual({record[1]["state"] for record in records(self.run_dir).values()},
                         {"finished"})

    def test_links_change_times_and_nothing_else(self):
        flags = ["--steps", "2", "--micro_batch_size", "2", "--bucket_mb", "0.05"]
        results = []
        for link in ([], ["--node_size", "2", "--link", "node=15000,0.05",
                          "--link", "net=30000,0.005"]):
            self.train(4, *flags, *link, "--overwrite")
            ledger = json.loads((self.run_dir / "ledger.json").read_text())
            for entry in ledger.values():
                del entry["seconds"], entry["wait_seconds"]
            crossing = sum(entry.pop("net_bytes") for entry in ledger.values())
            self.assertEqual(crossing > 0, "--node_size" in link)  # with several nodes alone
            results.append(([(step["loss"], step["grad_norm"], step["comm_bytes"])
                             for step in metrics(self.run_dir)], ledger))
        self.assertEqual(*results)

    def test_the_trace_of_all_ranks(self):
        self.train(4, "--steps", "10", "--micro_batch_size", "2", "--bucket_mb", "0.02",
                   traced=["--trace_steps", "10"])
        path = self.run_dir / "trace.json"
        self.assertLess(path.stat().st_size, 20e6)
        recorded = trace.load(path)  # refuses negative durations and operations without partners
        self.assertEqual(len(recorded.ranks), 4)
        self.assertEqual(list(trace.steps(recorded)), list(range(1, 11)))
        run = json.loads((self.run_dir / "run.json").read_text())
        for rank in recorded.ranks:
            gradients = sum(item.payload_bytes for item in rank.communications
                            if item.dimension == "dp")
            self.assertEqual(gradients, 10 * 4 * run["parameters"])
            for wait in rank.waits:
                self.assertAlmostEqual(wait.exposed + wait.skew, wait.duration, delta=0.01)

    def check_turns(self, ranks, *flags):
        """A traced run in which two strands of a rank take turns; train() checks its lanes."""
        self.train(ranks, *flags, "--steps", "2", traced=["--trace_steps", "2"])
        recorded = trace.load(self.run_dir / "trace.json")
        for rank in recorded.ranks:
            self.assertEqual({span.turn for span in rank.spans}, {0, 1})
            self.assertEqual({span.lane for span in rank.spans if span.name == trace.STEP}, {0})
        machine = simulation.Machine(ranks, 1, 0, trace.Link(10, 1), trace.Link(10, 1))
        trace.save(simulation.replay(recorded, machine), self.run_dir / "replay.json")
        question = simulation.Simulation(recorded, machine).question
        self.assertLess(replay_reference.difference(question, simulation.ask(question)), 1e-9)
        trace_format.check(self.run_dir / "replay.json")

    @needs("tensor_parallel/batch_halves")
    def test_halves_in_turns_have_lanes_of_their_own(self):
        self.check_turns(2, "--tp_size", "2", "--tp_overlap", "batch_halves",
                         "--micro_batch_size", "2")

    @needs("expert_parallel/moe")
    def test_passes_in_turns_have_lanes_of_their_own(self):
        self.check_turns(2, "--num_experts", "4", "--pp_size", "2", "--pp_schedule", "dualpipe",
                         "--num_layers", "4", "--grad_acc_steps", "4", "--micro_batch_size", "1",
                         "--overlap_dispatch")

    def test_no_trace_is_recorded_unless_asked_for(self):
        self.train(2, "--steps", "2", "--micro_batch_size", "1")
        recorded = json.loads((self.run_dir / "trace.json").read_text())
        self.assertEqual([event for event in recorded["traceEvents"] if event["ph"] != "M"], [])

    def test_kill_9_of_a_rank_in_the_middle_of_training(self):
        self.check_kill_9_is_explained(self.in_the_middle(4), 2)

    def test_a_signal_to_one_rank_stops_all_after_the_same_step(self):
        process = self.in_the_middle(3)
        os.kill(records(self.run_dir)[1][0]["pid"], signal.SIGTERM)
        code, output = self.finish(process)
        self.assertIn("Stopped on request", output)
        # mpiexec may kill the ranks that leave after the first, and mix that into its code.
        self.assertEqual(code & (128 + signal.SIGTERM), 128 + signal.SIGTERM, output)
        self.assertRegex((self.run_dir / "done").read_text(), r"interrupted after step \d+")

    def test_bad_flags_are_refused_once(self):
        for ranks, flags, words in (
                (2, ["--dp_size", "3"], ("dp_size", "2 ranks", "--dp_size 2")),
                (2, ["--node_size", "3"], ("node_size=3", "2 ranks", "1 or 2")),
                (2, ["--link", "node=0.001,1"], ("faster than this machine", "try")),
                (2, ["--data", "nowhere.txt"], ("nowhere.txt", "No such file")),
                (2, ["--resume"], ("holds no run",)),
                (1, ["--bucket_mb", "0"], ("bucket_mb=0", "try 25")),
                (1, ["--grad_sync", "sometimes"], ("grad_sync", "bucketed")),
                (1, ["--comm_timeout", "0"], ("comm_timeout=0",)),
                (1, ["--link", "lan=1,1"], ("link lan=1,1", "node=100,2")),
                (1, ["--plan", "-1"], ("plan=-1",)),
                (1, ["--bucket_mb", "1e13"], ("bucket_mb=10000000000000 ", "try 25")),
                (1, ["--dp_size", "3000000000", "--estimate"],
                 ("dp_size=3000000000", "[1, 65536]")),
                (1, ["--resume", "--overwrite"], ("exclude each other",))):
            with self.subTest(flags=flags):
                code, output = self.finish(self.start(ranks, CHAPTER, *flags))
                self.assertEqual(code, 2, output)
                self.assertEqual(output.count("error: "), 1, output)
                for word in words:
                    self.assertIn(word, output)
                # Only flags that were given, or that the remedy needs.
                self.assertNotIn("pp_size", output)

    def test_a_bad_resume_is_refused_once(self):
        # How one goes on in another layout is in test_sharded_checkpoints.py.
        flags = [*TINY, *UNTRACED, "--micro_batch_size"]

        def refused(words, batch, *more):
            code, output = self.finish(self.start(2, CHAPTER, *flags, batch, *more, "--resume"))
            self.assertEqual((code, len(output.splitlines())), (2, 1), output)
            self.assertIn(words, output)

        self.train(2, "--micro_batch_size", "2", "--steps", "2", "--checkpoint_interval", "2")
        refused("this run has lr=0.5", "2", "--steps", "8", "--lr", "0.5")
        refused("steps=1 must be at least the 2", "2", "--steps", "1")
        refused("global_batch_size=4, and this run has global_batch_size=2", "1", "--steps", "8",
                "--grad_acc_steps", "1")
        path = self.run_dir / "checkpoints" / "step-00000002" / "state.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        refused("state.safetensors: bytes 0 to", "2", "--steps", "8")
        shutil.rmtree(self.run_dir / "checkpoints")
        refused("holds no checkpoint", "2", "--steps", "8")

    def test_a_run_directory_with_a_run_is_refused_once(self):
        self.train(2, "--steps", "1", "--micro_batch_size", "1")
        before = (self.run_dir / "metrics.jsonl").read_bytes()
        code, output = self.finish(self.start(2, CHAPTER, *TINY))
        self.assertEqual((code, len(output.splitlines())), (2, 1), output)
        self.assertIn("holds a run", output)
        self.assertEqual((self.run_dir / "metrics.jsonl").read_bytes(), before)

    def test_a_run_directory_in_use_is_refused_once_and_a_dead_run_s_taken_over(self):
        process = self.in_the_middle(2)
        pid = records(self.run_dir)[0][0]["pid"]
        done = subprocess.run(["mpiexec", "-n", "2", str(BIN / CHAPTER), *TINY, "--overwrite",
                               "--run_dir", str(self.run_dir)], env=environment(), timeout=SECONDS,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual((done.returncode, len(done.stdout.splitlines())), (2, 1), done.stdout)
        self.assertIn(f"in use by process {pid} on {socket.gethostname()}", done.stdout)
        self.assertIsNone(process.poll())
        self.assertEqual(len(records(self.run_dir)), 2)  # the flight records are still there
        os.kill(pid, signal.SIGKILL)
        self.finish(process)
        self.train(2, "--steps", "1", "--micro_batch_size", "1", "--overwrite")
        self.assertFalse((self.run_dir / "lock").exists())

    def test_an_estimate_is_of_the_ranks_that_it_is_asked_for(self):
        large = ["--hidden_size", "4096", "--num_layers", "8", "--num_heads", "32",
                 "--ffn_hidden_size", "8192", "--zero_stage", "3", "--device_memory", "15"]

        def estimate(*flags, code=0):
            flags = [*large, "--estimate", *flags]
            done = subprocess.run([str(BIN / CHAPTER), *tiny(flags), *flags], text=True,
                                  env=environment(), stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, check=False)
            self.assertEqual(done.returncode, code, done.stdout)
            return done.stdout

        def gib(text, name):
            return float(re.search(rf"^{name} .*?([\d.]+)", text, re.M).group(1))

        alone, many = estimate(), estimate("--world_size", "64")
        self.assertIn("\nrank 0 of 1: dp 1\n", alone)
        self.assertIn("\nrank 0 of 64: dp 64\n", many)
        self.assertAlmostEqual(gib(many, "optimizer states") * 64, gib(alone, "optimizer states"),
                               delta=0.1)
        self.assertEqual(many, estimate("--dp_size", "64"))
        share = gib(alone, "peak memory") / 15
        self.assertIn(f"A device of 15 GiB does not hold it: the peak is {share:.2f} times "
                      "that.", alone)
        self.assertRegex(many, r"A device of 15 GiB holds it: the peak takes \d+ %\.")
        self.assertIn("dp_size=4 must equal the 64 ranks of the run",
                      estimate("--world_size", "64", "--dp_size", "4", code=2))
        # A program that trains has the ranks that were started.
        code, output = self.finish(self.start(1, CHAPTER, *TINY, "--world_size", "2"))
        self.assertEqual(code, 2)
        self.assertIn("dp_size=2 must equal the 1 rank of the run", output)

    def test_of_programs_that_know_of_no_ranks_one_alone_gets_the_directory(self):
        processes = [subprocess.Popen([str(BIN / FIRST), *TINY, *UNTRACED, "--steps", "100",
                                       "--run_dir", str(self.run_dir)], env=environment(),
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                     for _ in range(4)]
        errors = [process.communicate(timeout=60)[1] for process in processes]
        self.assertEqual(sorted(process.returncode for process in processes), [0, 2, 2, 2], errors)
        self.assertEqual([step["step"] for step in metrics(self.run_dir)], list(range(1, 101)))

    def test_ranks_that_do_not_fit_together_are_refused_once(self):
        def run(mib, *more):
            env = environment(USP_AVAILABLE_MEMORY=str(int(mib * 2**20)))
            return self.finish(self.start(2, CHAPTER, *TINY, *UNTRACED, "--steps", "1", *more,
                                          env=env))

        code, output = run(0.001)
        self.assertEqual((code, len(output.splitlines())), (2, 1), output)
        need, each = map(float, re.search(r"needs ([\d.]+) MiB .*\(([\d.]+) MiB on each of 2 ranks",
                                          output).groups())
        self.assertGreater(each, 1)
        self.assertAlmostEqual(need, 2 * each, delta=0.2)
        self.assertFalse(self.run_dir.exists())
        self.assertEqual(run(need - 0.1)[0], 2)
        if CHAPTER >= "ch04":  # ranks share each length that is tried
            code, output = run(0.001, "--cp_size", "2")
            self.assertEqual((code, len(output.splitlines())), (2, 1), output)
            self.assertIn("of memory here (", output)
        self.assertEqual(run(need + 0.1)[0], 0)
        self.assertEqual(run(need - 0.1, "--allow_oversize", "--overwrite")[0], 0)


def take_arguments():
    """Those for unittest."""
    global BIN, CHAPTER
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--bin", type=Path, default=BIN)
    parser.add_argument("--chapter", default=CHAPTER)
    parser.add_argument("--binary", type=Path)
    args, rest = parser.parse_known_args()
    BIN, CHAPTER = args.bin.resolve(), args.chapter
    if args.binary is not None:
        BIN, CHAPTER = args.binary.resolve().parent, args.binary.name
    simulation.program = lambda: BIN / simulation.PROGRAM
    return rest


def run_tests(rest):
    """Runs the script's tests; the exit code, 77 where nothing can start ranks."""
    if shutil.which("mpiexec") is None:
        print("no mpiexec on PATH")
        return 77
    return 0 if unittest.main(argv=[sys.argv[0], *rest], exit=False).result.wasSuccessful() else 1


def main():
    return run_tests(take_arguments())


if __name__ == "__main__":
    sys.exit(main())
