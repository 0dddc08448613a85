"""Ranks under mpiexec whose tensors lie on emulated GPUs, next to the same on CPUs.

They send by way of the host: the emulated NCCL joins threads, not processes, so it is tested in
tests/cuda. Layouts take turns with the order of the GPU's streams; with USP_TEST_FULL each runs in
every order, on two ranks and on four.

  test_device_ranks.py --bin build/release/bin [--chapter ch02_data_parallel] [unittest arguments]

Needs the chapter there, and the same with the suffix _emulated; and mpiexec on PATH (77: skipped
without it). Without --chapter, the newest is tested in all layouts, and another in what it adds.
"""
import itertools
import json
import os
import re
import subprocess
import sys
from statistics import fmean

import test_ranks
import trace_format
from test_ranks import CHAPTER as NEWEST
from test_ranks import ROOT, RankTest, metrics, tiny
from ch09_gpu_kernels.figures import expected
from tools.gpu import gpu_ranks
from tools.gpu.gpu_part import words_of
from tools.look import trace as traces

# What ./book gpu-check trains on a GPU.
FLAGS = tuple(words_of(gpu_ranks.PLAIN))
ORDERS = ("forward", "reverse", "shuffled")  # of streams, as USP_EMULATED_STREAMS has them
# Rows of a report, and those in which measured memory is that of the formula. How many rows experts
# get is the router's choice, and the formula has the mean.
MEMORY = ("weights", "gradients", "optimizer states", "saved activations")
EXACT = {"expert_parallel": MEMORY[:3]}


def layouts():
    """[(layout, flags)] of the chapter: all of the newest, of another what it adds."""
    found = [(layout, tuple(words_of(flags)))
             for layout, flags in gpu_ranks.layouts_of(ROOT)[test_ranks.CHAPTER].items()]
    return found if test_ranks.CHAPTER == NEWEST else found[-1:]


def memory_rows(run_dir):
    """{what: its row} of the report, of what lies on the device."""
    text = (run_dir / "report.md").read_text()
    return dict(re.findall(r"^\| ([\w ]+?) +\| (.* predicted .*) \|$", text, re.M))


class Devices(RankTest):
    def run_on(self, device, ranks, *flags, steps=3, traced=("--trace_steps", "0"), resume=False,
               order="forward", plain=FLAGS):
        """The run's folder: a new one, unless an earlier run goes on."""
        if not resume:
            self.run_dir = self.folder / f"{device} {len(list(self.folder.iterdir()))}"
        program = test_ranks.CHAPTER + ("_emulated" if device == "cuda" else "")
        flags = (*plain, *flags, "--device", device, "--steps", str(steps))
        code, output = self.finish(
            self.start(ranks, program, *tiny(flags), *traced, *flags,
                       *(["--resume"] if resume else []),
                       env=test_ranks.environment(USP_MATMUL_SECONDS="0",
                                                  USP_EMULATED_STREAMS=order)), 120)
        self.assertEqual(code, 0, output)
        self.output = output
        trace_format.check(self.run_dir / "trace.json")
        return self.run_dir


class Launches(Devices):
    SHAPE = ("--dtype", "bf16", "--hidden_size", "128", "--num_heads", "2", "--num_kv_heads", "1", "--ffn_hidden_size", "128",
             "--seq_len", "16", "--micro_batch_size", "1", "--attention", "blockwise")

    def test_a_step_has_those_that_chapter_9_predicts(self):
        if test_ranks.CHAPTER != NEWEST:
            self.skipTest("of the chapter with fused kernels")
        for kernels, layers, rows in (("reference", 1, 16), ("reference", 4, 16), ("fused", 2, 4), ("fused", 4, 16)):
            with self.subTest(kernels=kernels, layers=layers, rows=rows):
                fused = ("--loss_rows", str(rows)) if kernels == "fused" else ()
                run_dir = self.run_on("cuda", 1, *self.SHAPE, "--kernels", kernels, "--num_layers", str(layers), *fused,
                                      plain=(), steps=2)
                first, second = [record["launches"] for record in metrics(run_dir)]
                self.assertEqual(second - first, expected.launches(kernels, layers, 16 // rows))


class Attention(Devices):
    # For which naive attention is estimated to be faster on a GPU.
    WIDE = ("--hidden_size", "256", "--num_layers", "1", "--num_heads", "4", "--num_kv_heads", "4",
            "--ffn_hidden_size", "32", "--seq_len", "512", "--cp_size", "2")

    def test_the_faster_one_is_not_taken_where_another_flag_asks_for_blockwise(self):
        if not any("--cp_size" in flags for _, flags in layouts()):
            self.skipTest("this chapter adds no flag that asks for an attention")
        for more, attention in (((), "naive"),
                                (("--recompute", "full", "--cp_recompute", "keep"), "blockwise")):
            run_dir = self.run_on("cuda", 2, *self.WIDE, *more, steps=1)
            config = json.loads((run_dir / "run.json").read_text())["config"]
            self.assertEqual(config["attention"], attention, more)

    def test_fused_kernels_are_taken_without_a_word_on_attention(self):
        if not (ROOT / test_ranks.CHAPTER / "fusion").is_dir():
            self.skipTest("this chapter has no fused kernels")
        why = "On this GPU attention=blockwise: this GPU has fused kernels for it"
        for kernels in ("reference", "fused"):
            run_dir = self.run_on("cuda", 1, "--head_dim", "64", "--num_layers", "1", "--kernels",
                                  kernels, steps=1, plain=("--dtype", "bf16"))
            for text, said in (("On this GPU attention=", True), (why, kernels == "fused")):
                self.assertEqual(text in self.output, said, self.output)
            self.assertEqual("Attention ran on tensor cores" in (run_dir / "report.md").read_text(),
                             kernels == "fused")


class Layouts(Devices):
    def test_they_train_alike_send_the_same_and_take_the_memory_of_the_formulas(self):
        full = "USP_TEST_FULL" in os.environ
        for (layout, flags), order in zip(layouts(), itertools.cycle(ORDERS)):
            for ranks in (2, 4) if full else (2,):
                with self.subTest(flags=flags, ranks=ranks):
                    self.check_layout(layout, flags, ranks, ORDERS if full else (order,))

    def check_layout(self, layout, flags, ranks, orders):
        cpu = self.run_on("cpu", ranks, *flags, traced=("--trace_steps", "1"))
        for order in orders:
            cuda = self.run_on("cuda", ranks, *flags, traced=("--trace_steps", "1"), order=order)
            for step, reference in zip(metrics(cuda), metrics(cpu), strict=True):
                for key in ("loss", "grad_norm"):
                    self.assertLessEqual(abs(step[key] - reference[key]),
                                         1e-10 * abs(reference[key]), (key, order))
                self.assertEqual(step["comm_bytes"], reference["comm_bytes"])
            self.compare_ledgers(cuda, cpu)
            self.compare_memory(memory_rows(cuda), memory_rows(cpu), layout)
            self.check_trace(cuda)
        self.check_estimate(ranks, *flags)

    def compare_ledgers(self, cuda, cpu):
        sent, expected = (json.loads((folder / "ledger.json").read_text())
                          for folder in (cuda, cpu))
        self.assertEqual(sorted(sent), sorted(expected))
        for operation, entry in expected.items():
            for what in ("calls", "payload_bytes", "wire_bytes", "header_bytes"):
                self.assertEqual(sent[operation][what], entry[what], (operation, what))

    def check_trace(self, folder):
        """The device's lanes have what the host's have, and the report's times are theirs."""
        trace = traces.load(folder / "trace.json")
        steps = list(traces.steps(trace).values())
        shares = [share for step in steps for share in step]
        row = re.search(r"\| communication not hidden \| ([\d.]+) of a traced step's ([\d.]+) ms; "
                        r"waiting for a late rank: ([\d.]+) ms", (folder / "report.md").read_text())
        expected = (fmean(share.exposed for share in shares),
                    fmean(step[0].end - step[0].begin for step in steps),
                    fmean(share.skew for share in shares))
        for printed, found in zip(row.groups(), expected):
            self.assertLessEqual(abs(float(printed) - found / 1000), 0.0051, row)
        for rank in trace.ranks:
            self.assertCountEqual(*([(span.name, span.step) for span in spans
                                     if span.category == "op"]
                                    for spans in (rank.spans, rank.device)))
            traced = {span.step for span in rank.spans}  # weights may be gathered into the next step
            self.assertEqual(len(rank.device_waits), sum(wait.step in traced for wait in rank.waits))
            self.assertTrue(rank.copies)
        for share in shares:
            self.assertGreater(share.compute, 0)
            self.assertLessEqual(share.compute + share.exposed + share.skew,
                                 share.end - share.begin + 0.1)

    def check_estimate(self, ranks, *flags):
        """Contributions to sums wait in memory of the host, or NCCL's, so no GPU has scratch memory
        for them; and whatever carries messages, an estimate needs neither GPU nor NCCL."""
        outputs = []
        for comm in ("mpi", "nccl"):
            every = (*FLAGS, *flags, "--device", "cuda", "--comm", comm, "--estimate")
            code, output = self.finish(
                self.start(ranks, test_ranks.CHAPTER, *tiny(every), *every))
            self.assertEqual(code, 0, output)
            self.assertIn("optimizer states", output)
            self.assertNotIn("scratch of reductions", output)
            outputs.append(output)
        self.assertEqual(*outputs)

    def compare_memory(self, cuda, cpu, layout):
        """Rows of the reports."""
        self.assertNotIn("scratch of reductions", cuda)
        cpu = {what: row for what, row in cpu.items() if what != "scratch of reductions"}
        self.assertEqual(cuda, cpu)
        for what in EXACT.get(layout, MEMORY):
            self.assertRegex(cuda[what], r"\(1\.0000\)$")


class Failures(Devices):
    """By way of the host. Of NCCL's ranks, which are threads here, none can be killed alone."""

    def test_kill_9_of_a_rank_in_the_middle_of_a_step_on_a_gpu(self):
        for ranks, victim in ((2, 1), (3, 0)):
            with self.subTest(ranks=ranks):
                self.run_dir = self.folder / f"{ranks} ranks"
                process = self.in_the_middle(ranks, f"{test_ranks.CHAPTER}_emulated", "--device",
                                             "cuda", "--zero_stage", "2")
                self.check_kill_9_is_explained(process, victim)


class Checkpoints(Devices):
    def test_a_checkpoint_goes_on_with_other_ranks_on_the_other_device(self):
        flags = ("--zero_stage", "2", "--checkpoint_interval", "2")
        whole = metrics(self.run_on("cpu", 2, *flags, steps=4))
        self.run_on("cuda", 2, *flags, steps=2)
        self.run_on("cpu", 1, "--grad_acc_steps", "2", "--checkpoint_interval", "1", resume=True)
        self.run_on("cuda", 2, *flags, steps=4, resume=True)
        resumed = metrics(self.run_dir)
        for step, reference in zip(resumed, whole, strict=True):
            self.assertLessEqual(abs(step["loss"] - reference["loss"]),
                                 1e-10 * reference["loss"])


class Refusals(Devices):
    """What cannot be is one line of rank 0, and exit code 2 of all ranks."""

    def refused(self, words, *flags, device="cuda", each=({}, {}), **emulated):
        """Starts a rank for each of the environments: what it sees of emulated GPUs."""
        self.run_dir = self.folder / "refused"
        program = str(test_ranks.BIN / f"{test_ranks.CHAPTER}_emulated")
        flags = ["--micro_batch_size", "2", "--device", device, *flags,
                 "--run_dir", str(self.run_dir)]
        command = []
        for own in each:
            command += [":"] * bool(command) + ["-n", "1", "env", *(
                f"USP_EMULATED_{name}={value}" for name, value in {**emulated, **own}.items()),
                program, *tiny(flags), *flags]
        code, output = self.finish(subprocess.Popen(
            ["mpiexec", *command], env=test_ranks.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"))
        self.assertEqual(code, 2, output)
        self.assertRegex(output, rf"\Aerror: {words}[^\n]*\n\Z")
        self.assertFalse(self.run_dir.exists())

    def test_more_ranks_of_nccl_s_than_gpus(self):
        for gpus, words in ((1, "ranks 0 and 1"), (2, "ranks 0 and 2")):
            with self.subTest(gpus=gpus):
                self.refused(f"comm=nccl: {words} share a GPU, .*--comm mpi", "--comm", "nccl",
                             each=3 * ({},), GPUS=gpus)

    def test_ranks_that_see_different_gpus(self):
        self.refused("rank 1: device=cuda: the driver shows no GPU; .*--device cpu",
                     each=({"GPUS": 2}, {"GPUS": 0}))
        self.refused("comm=nccl: ranks 0 and 1 share a GPU", "--comm", "nccl",
                     each=({"GPUS": 2}, {"GPUS": 1}))

    def test_a_rank_whose_driver_is_too_old(self):
        self.refused(r"rank 1: device=cuda: the driver knows CUDA up to 12\.4, .*--device cpu",
                     each=({}, {"DRIVER": 12040}))

    def test_an_nccl_older_than_its_header(self):
        self.refused("comm=nccl: the NCCL here is 2.19.3, and .* with 2.28.9; .*--comm mpi",
                     "--comm", "nccl", GPUS=2, NCCL=21903)
        self.refused("rank 1: comm=nccl: the NCCL here is 2.19.3", "--comm", "nccl", GPUS=2,
                     each=({}, {"NCCL": 21903}))

    def test_nccl_without_gpus_or_with_slow_links(self):
        self.refused("comm=nccl is for tensors on GPUs, .*--comm mpi", "--comm", "nccl",
                     device="cpu")
        self.refused("link=.* slows messages .*--comm mpi", "--comm", "nccl", "--link",
                     "node=9000,0.01")

    def test_what_every_rank_refuses(self):
        self.refused(".*dp_size=3", "--dp_size", "3")


def main():
    return test_ranks.run_tests(test_ranks.take_arguments())


if __name__ == "__main__":
    sys.exit(main())
