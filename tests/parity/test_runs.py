"""Whole runs of the chapter's program: what must repeat, how it stops, what it refuses, its files.

  test_runs.py --binary build/release/bin/ch01_single_gpu [unittest arguments]

Only the standard library is needed. What the numbers should be is test_reference.py's business.
"""

import collections
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import binary
import trace_format
from tools import chapters
from tools.run import program_help

BINARY = None  # set by main()
FOLDER = None  # of the token files, set by setUpModule()

RUN_FILES = {"run.json", "metrics.jsonl", "trace.json", "memory.json", "start.json", "report.md",
             "done"}
CATEGORIES = ["weights", "gradients", "optimizer", "activations", "communication", "workspace"]
GROUPS = ["Model", "Optimizer", "Checkpoints", "Sampling", "Training", "Data", "Execution",
          "Output"]

# A step takes a few milliseconds; every kind of parameter and two heads per kv head are there.
SMALL = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48,
    "seq_len": 32, "micro_batch_size": 4, "steps": 4, "lr": 0.003, "warmup_steps": 2,
    "eval_interval": 2, "eval_samples": 4, "sample_tokens": 0, "data": "text.txt",
}

Finished = collections.namedtuple("Finished", "code out err run_dir")


def setUpModule():
    global FOLDER
    folder = tempfile.TemporaryDirectory(prefix="test_runs_")
    unittest.addModuleCleanup(folder.cleanup)
    FOLDER = folder.name
    rng = random.Random(3)
    words = "the ring sends what the rank before it had, caf\u00e9 or not \n".split(" ")
    text = " ".join(rng.choice(words) for _ in range(4000)).encode()[:12000]
    tokens = list(text)
    write_file("text.txt", text)
    write_tokens("text.uint16.bin", "H", tokens)
    write_tokens("text.uint32.bin", "I", tokens)
    write_file("empty.txt", b"")
    write_file("short.txt", text[:30])
    write_file("digits.txt", b"0123456789" * 50)
    write_file("one.txt", b"a")
    write_file("two.txt", b"ab")
    write_file("odd.bin", struct.pack("<100H", *tokens[:100]) + b"\0")
    write_tokens("vocab61.uint16.bin", "H", [i % 61 for i in range(137)] + [61] + [0] * 200)
    write_tokens("vocab70000.uint32.bin", "I", [i % 61 for i in range(138)] + [2**31 + 5] * 200)


def write_file(name, content):
    with open(os.path.join(FOLDER, name), "wb") as f:
        f.write(content)


def write_tokens(name, code, tokens):
    write_file(name, struct.pack("<%d%s" % (len(tokens), code), *tokens))


def main_thread_seconds(pid):
    """The CPU time that a process's first thread has used."""
    with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(flags):
    """The command line; a flag whose value is True stands alone, None leaves it out."""
    result = [BINARY]
    for name, value in flags.items():
        if value is not None and value is not False:
            result += ["--" + name] if value is True else ["--" + name, str(value)]
    return result


def environment(threads=2):
    # No GPU is shown, so that every machine refuses --device cuda.
    return dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive",
                CUDA_VISIBLE_DEVICES="")


def read(run_dir, name):
    with open(os.path.join(run_dir, name), encoding="utf-8", newline="") as f:
        return f.read()


def refuse_constant(text):
    raise AssertionError(f"{text} is no JSON")


def read_json(run_dir, name):
    return json.loads(read(run_dir, name), parse_constant=refuse_constant)


def read_metrics(run_dir, **options):
    return [json.loads(line, parse_constant=refuse_constant, **options)
            for line in read(run_dir, "metrics.jsonl").splitlines()]


def results(run_dir):
    """Losses and norms of every step, as the text that stands in the file."""
    return [{key: record[key] for key in ("step", "loss", "grad_norm", "val_loss") if key in record}
            for record in read_metrics(run_dir, parse_float=str)]


class Runs(unittest.TestCase):
    """A test whose runs have directories of their own; paths are relative to the token files'."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=FOLDER)
        self.addCleanup(folder.cleanup)
        self.scratch = folder.name
        self.count = 0

    def new_run_dir(self):
        self.count += 1
        return os.path.join(self.scratch, f"run{self.count}")

    def run_chapter(self, changes=(), threads=2, base=SMALL, timeout=120, **options):
        """Runs it to its end; `changes` to `base` are flags."""
        flags = dict(base, run_dir=self.new_run_dir())
        flags.update(changes)
        done = subprocess.run(command(flags), cwd=FOLDER, env=environment(threads),
                              timeout=timeout, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        out, err = os.fsdecode(done.stdout), os.fsdecode(done.stderr)  # they may name any path
        return Finished(done.returncode, out, err, flags["run_dir"])

    def succeed(self, changes=(), **options):
        """Runs it, demands success, returns the run directory."""
        done = self.run_chapter(changes, **options)
        self.assertEqual((done.code, done.err), (0, ""), done.out[-2000:])
        trace = Path(FOLDER, done.run_dir, "trace.json")
        if trace.exists():
            trace_format.check(trace)
        return done.run_dir

    def wait_until(self, condition, process):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertIsNone(process.poll(), "the program ended by itself")
            self.assertLess(time.monotonic(), deadline, "waited for a minute")
            time.sleep(0.002)

    def assert_one_error(self, done, codes):
        """The program ended by one line that says what is wrong, and by nothing worse."""
        self.assertIn(done.code, codes, done.err)
        self.assertRegex(done.err, r"\Aerror: [^\n]+\n\Z")


class Help(unittest.TestCase):
    def test_sources_say_what_the_program_does(self):
        """`./book run chNN -- --help` reads them where the program is not built."""
        chapter = chapters.resolve(Path(BINARY).name)
        said = subprocess.run([BINARY, "--help"], stdout=subprocess.PIPE, text=True, check=True,
                              env=environment(1)).stdout
        self.assertEqual(program_help.help_text(chapter, BINARY), said)


class Teams(Runs):
    """Where OpenMP starts fewer threads than it was asked for."""

    def test_fewer_threads_compute_what_they_would_by_themselves(self):
        for dtype in ("f32", "bf16"):
            alone = results(self.succeed({"dtype": dtype}, threads=1))
            for variable in ("OMP_THREAD_LIMIT=1", "OMP_MAX_ACTIVE_LEVELS=0", "OMP_DYNAMIC=true"):
                with self.subTest(f"{dtype} {variable}"):
                    with mock.patch.dict(os.environ, [variable.split("=")]):
                        done = self.run_chapter({"dtype": dtype})
                    self.assertEqual(done.code, 0, done.err)
                    if "LIMIT" in variable:
                        self.assertIn("OpenMP starts 1 of 2 threads (OMP_THREAD_LIMIT=1)", done.err)
                        self.assertIn("1 rank x 1 thread;", done.out)
                        self.assertEqual(results(done.run_dir), alone)

    def test_wrong_products_end_the_run_before_its_first_step(self):
        wrong = {"OMP_THREAD_LIMIT": "1", "USP_THREADS_AS_ASKED": "1"}
        for dtype in ("f32", "bf16"):
            with self.subTest(dtype), mock.patch.dict(os.environ, wrong):
                done = self.run_chapter({"dtype": dtype})
                self.assertEqual(done.code, 2, done.out[-2000:])
                self.assertIn("matrix products are wrong here: with 2 threads", done.err)
                self.assertEqual(done.err.count("\n"), 1, done.err)
                self.assertFalse(os.path.exists(done.run_dir))


class Repeatability(Runs):
    def test_same_seed_same_bits(self):
        for dtype in ("f32", "bf16", "f64"):
            with self.subTest(dtype=dtype):
                flags = {"dtype": dtype, "steps": 12, "sample_tokens": 20}
                first, second = self.succeed(flags), self.succeed(flags)
                self.assertEqual(results(first), results(second))
                self.assertEqual(read(first, "report.md").split("## A sample")[1],
                                 read(second, "report.md").split("## A sample")[1])

    def test_another_seed_gives_other_bits(self):
        losses = {results(self.succeed({"seed": seed}))[0]["loss"] for seed in (1, 2, 2**40)}
        self.assertEqual(len(losses), 3)

    def test_float64_is_the_same_for_any_number_of_threads(self):
        for attention in ("blockwise", "naive"):
            with self.subTest(attention=attention):
                flags = {"dtype": "f64", "attention": attention, "steps": 6, "seq_len": 70}
                runs = [self.succeed(flags, threads=threads) for threads in (1, 2, 4)]
                self.assertEqual([read_json(run, "run.json")["machine"]["threads"] for run in runs],
                                 [1, 2, 4])
                self.assertEqual(results(runs[0]), results(runs[1]))
                self.assertEqual(results(runs[0]), results(runs[2]))

    def test_result_does_not_depend_on_the_number_of_micro_batches(self):
        # The sums of a gradient are taken in another order, which moves the last bits only.
        for tied in (False, True):
            runs = [self.succeed({"dtype": "f64", "steps": 8, "micro_batch_size": 6 // split,
                                  "grad_acc_steps": split, "tie_word_embeddings": tied})
                    for split in (1, 2, 3, 6)]
            want = read_metrics(runs[0])
            for split, run in zip((2, 3, 6), runs[1:]):
                for a, b in zip(want, read_metrics(run)):
                    for key in ("loss", "grad_norm", "val_loss"):
                        with self.subTest(tied=tied, split=split, step=a["step"], key=key):
                            self.assertEqual(key in a, key in b)
                            if key in a:
                                self.assertLessEqual(abs(b[key] - a[key]), 1e-12 * abs(a[key]))

    def test_bfloat16_follows_float32(self):
        # bf16 keeps 8 bits, so a single loss is rounded by a few 1e-3, and the differences of 200
        # updates add up. Measured over seeds 1 to 8 while the loss falls from 5.55 to 3.2: at most
        # 0.016 nats at one step, at most 0.0013 in the mean of the last 50. Updating the rounded
        # weights instead of float32 masters makes it 0.11 at one step.
        flags = {"hidden_size": 64, "ffn_hidden_size": 96, "seq_len": 64, "steps": 200, "lr": 0.001,
                 "warmup_steps": 10, "eval_interval": 0, "data": None}
        runs = [read_metrics(self.succeed(dict(flags, dtype=dtype))) for dtype in ("f32", "bf16")]
        differences = [b["loss"] - a["loss"] for a, b in zip(*runs)]
        self.assertEqual(len(differences), 200)
        self.assertLess(runs[0][-1]["loss"], runs[0][0]["loss"] - 2)
        self.assertGreater(max(map(abs, differences)), 0, "bf16 and f32 are the same")
        self.assertLess(max(map(abs, differences)), 0.03)
        self.assertLess(abs(sum(differences[-50:]) / 50), 0.004)


class Stopping(Runs):
    def start(self, changes):
        flags = dict(SMALL, steps=10**6, run_dir=self.new_run_dir())
        flags.update(changes)
        process = subprocess.Popen(command(flags), cwd=FOLDER, env=environment(),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, flags["run_dir"]

    def lines(self, run_dir):
        path = os.path.join(run_dir, "metrics.jsonl")
        return read(run_dir, "metrics.jsonl").count("\n") if os.path.exists(path) else 0

    def check_stopped(self, process, run_dir, signals=(signal.SIGINT,)):
        """It ended on request, and says so: a whole number of steps, and every file complete."""
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (128 + signals[-1], b""), out[-2000:])
        self.assertEqual(set(os.listdir(run_dir)), RUN_FILES)
        metrics = read(run_dir, "metrics.jsonl")
        self.assertTrue(metrics == "" or metrics.endswith("}\n"), metrics[-200:])
        steps = [record["step"] for record in read_metrics(run_dir)]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertEqual(read(run_dir, "done"), f"interrupted after step {len(steps)}\n")
        tokens = len(steps) * SMALL["micro_batch_size"] * SMALL["seq_len"]
        self.assertIn(f"{len(steps)} steps, {tokens} tokens", read(run_dir, "report.md"))
        traced = {event["args"]["step"] for event in read_json(run_dir, "trace.json")["traceEvents"]
                  if event["ph"] == "X"}
        self.assertEqual(traced, set(steps[:3]))
        read_json(run_dir, "memory.json")
        read_json(run_dir, "run.json")
        return len(steps)

    def test_data_that_become_shorter_meanwhile_end_the_run_with_a_message(self):
        path = os.path.join(self.scratch, "shorter.txt")
        with open(path, "w", encoding="ascii") as file:
            file.write("a text of some pages\n" * 50000)
        process, run_dir = self.start({"data": path})
        self.wait_until(lambda: self.lines(run_dir) >= 1, process)
        os.truncate(path, 0)
        _, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err.decode()), (
            1, f"error: {path} cannot be read any more: it has become shorter, or its disk fails; start again "
            "when it is whole\n"))

    def test_a_signal_ends_the_run_after_the_step(self):
        for signals in ([signal.SIGINT], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGUSR1],
                        [signal.SIGUSR2], [signal.SIGXCPU]):
            with self.subTest(signals=signals):
                process, run_dir = self.start({})
                self.wait_until(lambda: self.lines(run_dir) >= 3, process)
                for stop_signal in signals:
                    process.send_signal(stop_signal)
                self.assertGreaterEqual(self.check_stopped(process, run_dir, signals), 3)

    def test_a_limit_of_cpu_time_asks_once_however_often_the_kernel_says_it(self):
        process, run_dir = self.start({"grad_acc_steps": 3000})  # steps of seconds
        self.wait_until(lambda: self.lines(run_dir) >= 1, process)
        process.send_signal(signal.SIGXCPU)
        time.sleep(2.2)  # seconds between the two are counted whole
        process.send_signal(signal.SIGXCPU)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 128 + signal.SIGXCPU)

    def test_no_thread_that_computes_takes_a_signal(self):
        """A product by oneDNN may have its stack pointer in the heap when a handler interrupts it."""
        process, run_dir = self.start({})
        self.wait_until(lambda: self.lines(run_dir) >= 1, process)
        blocked = {}
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            status = read(f"/proc/{process.pid}/task/{thread}", "status")
            mask = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE).group(1), 16)
            blocked[int(thread)] = [mask >> (number - 1) & 1
                                    for number in (signal.SIGINT, signal.SIGTERM)]
        takes = [thread for thread, masks in blocked.items() if masks != [1, 1]]
        self.assertEqual(len(takes), 1, "besides two that compute, one thread listens")
        self.assertEqual(blocked[takes[0]], [0, 0])
        self.assertGreaterEqual(len(blocked), 3)
        self.assertNotIn(process.pid, takes, "the main thread computes")
        process.send_signal(signal.SIGINT)
        self.check_stopped(process, run_dir)

    def test_a_signal_before_the_first_step(self):
        process, run_dir = self.start({})
        self.wait_until(lambda: os.path.exists(run_dir), process)
        process.send_signal(signal.SIGINT)
        self.check_stopped(process, run_dir)

    def test_a_signal_while_sampling_keeps_the_files(self):
        process, run_dir = self.start({"steps": 3, "sample_tokens": 10**7})
        self.wait_until(lambda: self.lines(run_dir) >= 3, process)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(self.check_stopped(process, run_dir, [signal.SIGTERM]), 3)

    def test_a_reader_who_has_seen_enough_ends_the_run_after_the_step(self):
        process, run_dir = self.start({})
        process.stdout.close()
        process.wait(timeout=60)
        self.assertGreaterEqual(process.returncode, 0, "killed by SIGPIPE")
        self.assertEqual(process.stderr.read(), b"")
        self.assertEqual(set(os.listdir(run_dir)), RUN_FILES)
        steps = len(read_metrics(run_dir))
        self.assertEqual(read(run_dir, "done"), f"interrupted after step {steps}\n")
        self.assertIn(f"{steps} steps", read(run_dir, "report.md"))

    def test_output_that_cannot_be_written_is_no_success(self):
        for flags in ({"version": True}, {"help": True}, {"estimate": True},
                      dict(SMALL, run_dir=self.new_run_dir()),
                      dict(SMALL, run_dir=self.new_run_dir(), sample_tokens=6000)):  # fills a buffer
            with open("/dev/full", "wb") as full:
                done = subprocess.run(command(flags), cwd=FOLDER, env=environment(), stdout=full,
                                      stderr=subprocess.PIPE, check=False)
            self.assertEqual(done.returncode, 1, flags)
            self.assertRegex(done.stderr, rb"\Aerror: standard output could not be written: "
                             rb"(No space left on device|is its disk full\?)\n\Z")

    def test_a_second_signal_ends_it_at_once(self):
        process, run_dir = self.start({"grad_acc_steps": 10**6})  # a step of an hour
        for name in ("run.json", "metrics.jsonl"):  # the latter is there for a moment before, too
            path = os.path.join(run_dir, name)
            self.wait_until(lambda: os.path.exists(path), process)
        # A signal just before the first step ends the run in good order. The main thread computes
        # next to nothing between opening that file and the step, so once it has, the step is on.
        before = main_thread_seconds(process.pid)
        self.wait_until(lambda: main_thread_seconds(process.pid) > before + 0.2, process)
        process.send_signal(signal.SIGINT)
        time.sleep(2.2)  # within a second or so, a second one is taken for the same wish
        self.assertIsNone(process.poll(), "the first one waits for the step to end")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), -signal.SIGINT)
        self.assertFalse(os.path.exists(os.path.join(run_dir, "done")))


class RunDirectories(Runs):
    def test_a_directory_that_holds_a_run_is_refused(self):
        run_dir = self.succeed({"steps": 3})
        before = {name: read(run_dir, name) for name in RUN_FILES}
        done = self.run_chapter({"run_dir": run_dir})
        self.assert_one_error(done, {2})
        self.assertRegex(done.err, "run_dir=.* holds a run.*--overwrite")
        self.assertEqual({name: read(run_dir, name) for name in os.listdir(run_dir)}, before)

    def test_overwrite_replaces_the_run_and_nothing_else(self):
        run_dir = self.succeed({"steps": 3})
        with open(os.path.join(run_dir, "notes.txt"), "w", encoding="utf-8") as f:
            f.write("mine\n")
        self.succeed({"run_dir": run_dir, "steps": 2, "overwrite": True})
        self.assertEqual(len(read_metrics(run_dir)), 2)
        self.assertEqual(read(run_dir, "notes.txt"), "mine\n")

    def test_a_directory_in_use_is_refused_and_a_dead_run_s_taken_over(self):
        flags = dict(SMALL, steps=10**6, run_dir=self.new_run_dir(), checkpoint_interval=1)
        run_dir = flags["run_dir"]
        process = subprocess.Popen(command(flags), cwd=FOLDER, env=environment(1),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        folder = os.path.join(run_dir, "checkpoints")
        self.wait_until(lambda: os.path.isdir(folder)
                        and any(name[-1].isdigit() for name in os.listdir(folder)), process)
        for more in ({}, {"overwrite": True}, {"resume": True}):
            with self.subTest(more=more):
                done = self.run_chapter(dict(flags, steps=1, **more))
                self.assert_one_error(done, {2})
                self.assertIn(f"in use by process {process.pid} on {socket.gethostname()}",
                              done.err)
        self.assertIsNone(process.poll())
        process.kill()
        process.wait(60)
        self.assertTrue(os.path.exists(os.path.join(run_dir, "lock")))
        steps = [record["step"] for record in read_metrics(run_dir)]
        self.assertEqual(steps, list(range(1, len(steps) + 1)), "the refused runs have written there")
        self.succeed(dict(flags, steps=len(steps) + 2, resume=True))
        self.assertEqual(set(os.listdir(run_dir)), RUN_FILES | {"checkpoints"})

    def test_names_and_prompts_that_are_not_utf_8(self):
        run_dir = os.path.join(self.scratch, os.fsdecode(b"caf\xe9"))
        flags = {"run_dir": run_dir, "prompt": os.fsdecode(b"a\xffz"), "sample_tokens": 5,
                 "steps": 2, "checkpoint_interval": 1}
        self.succeed(flags)
        self.assertIn("a\\xFFz", read(run_dir, "report.md"))
        self.assertEqual(read_json(run_dir, "run.json")["config"]["prompt"], "a\ufffdz")
        self.succeed(dict(flags, steps=3, resume=True))
        done = self.run_chapter({"estimate": True, "estimate_file": run_dir + "/estimate.json",
                                 "prompt": flags["prompt"]})
        self.assertEqual((done.code, done.err), (0, ""))

    def test_directories_are_created_on_the_way(self):
        run_dir = os.path.join(self.scratch, "a", "b c", "\u00e9")
        self.succeed({"run_dir": run_dir, "steps": 1})
        self.assertEqual(set(os.listdir(run_dir)), RUN_FILES)

    def test_a_failed_start_does_not_block_the_next(self):
        run_dir = self.new_run_dir()
        # A weight of 2^49 bytes: more than any machine's address space holds.
        done = self.run_chapter({"run_dir": run_dir, "hidden_size": 2**22, "seq_len": 1,
                                 "micro_batch_size": 1})
        self.assert_one_error(done, {1, 2})
        self.succeed({"run_dir": run_dir, "steps": 1})

    def test_a_full_disk_is_named(self):
        # A limit on the size of a file stands in for the disk. Every file is written to its end
        # or named; the trace is the largest of those that are written last. Digits of its times make
        # it longer or shorter by a few percent.
        flags = {"steps": 40, "eval_interval": 0, "trace_steps": 2}
        run_dir = self.succeed(flags)
        size = {name: os.path.getsize(os.path.join(run_dir, name)) for name in RUN_FILES}
        self.assertGreater(size["metrics.jsonl"], size["run.json"] + 500)
        most_of_trace = size["trace.json"] * 3 // 4
        self.assertGreater(most_of_trace, size["memory.json"] + 500)
        self.assertGreater(most_of_trace, size["metrics.jsonl"] + 500)
        for name, limit in (("run.json", 100), ("metrics.jsonl", size["run.json"] + 200),
                            ("trace.json", most_of_trace)):
            with self.subTest(file=name):
                done = self.run_chapter(
                    flags, restore_signals=False,  # Python ignores SIGXFSZ, and so does the child
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
                self.assert_one_error(done, {2 if name == "run.json" else 1})
                self.assertIn(name, done.err)
                self.assertFalse(os.path.exists(os.path.join(done.run_dir, "done")))


# What is refused: flags that differ from SMALL, and what the message must say (the rule, the
# value, what works).
BAD_INPUT = {
    "bf16 gradients of f32 weights": ({"grad_accumulation": "bf16"},
                                      ["grad_accumulation=bf16", "dtype=bf16"]),
    "a file for no estimate": ({"estimate_file": "x.json"}, ["estimate_file=x.json", "--estimate"]),
    "an unknown way to recompute": ({"recompute": "some"}, ["recompute", "selective"]),
    "unknown flag": ({"nun_layers": 3}, ["--nun_layers", "did you mean --num_layers?", "--help"]),
    "no number": ({"lr": "fast"}, ["--lr", "fast"]),
    "no whole number": ({"steps": "1e3"}, ["--steps", "1e3"]),
    "number beyond 64 bits": ({"steps": 10**30}, ["steps"]),
    "value missing": ({"tie_word_embeddings": True, "steps": True}, ["--steps"]),
    "a word of no choice": ({"dtype": "fp8"}, ["--dtype", "fp8", "f32", "bf16", "f64"]),
    "unknown preset": ({"model": "2B"}, ["model=2B", "tiny"]),
    "heads that do not divide": (
        {"num_heads": 5}, ["num_heads=5", "divide", "hidden_size=32", r"try 2, 4 or 8\b"]),
    "kv heads that do not divide": (
        {"num_kv_heads": 3}, ["num_kv_heads=3", "divide", "num_heads=4", r"1, 2 or 4\b"]),
    "odd head_dim": (
        {"hidden_size": 30, "num_heads": 10, "num_kv_heads": 10}, ["head_dim=3", "even", "try"]),
    "odd head_dim, given": ({"head_dim": 7}, ["head_dim=7", "even", "try 8"]),
    "negative head_dim": ({"head_dim": -2}, ["head_dim=-2", r"\[0, 16777216\]"]),
    "unknown rope_type": ({"rope_type": "dynamic"}, ["rope_type", "dynamic", "yarn"]),
    "yarn without different waves": (
        {"rope_type": "yarn", "rope_theta": 1}, ["rope_theta=1", "rope_type=yarn", "10000"]),
    "no room between rope betas": (
        {"rope_beta_slow": 32}, ["rope_beta_fast=32", "rope_beta_slow=32", "try 1024"]),
    "rope_factor below 1": ({"rope_factor": 0.5}, ["rope_factor=0.5", "at least 1"]),
    "no room between rope factors": (
        {"rope_high_freq_factor": 1}, ["rope_high_freq_factor=1", "rope_low_freq_factor=1"]),
    "seq_len above its limit": (
        {"max_position_embeddings": 31}, ["seq_len=32", "max_position_embeddings=31"]),
    "prompt ids beyond the vocabulary": ({"prompt_ids": "3 256"}, ["prompt_ids", "256"]),
    "prompt ids that are none": ({"prompt_ids": "3,x"}, ["prompt_ids", "'x'"]),
    "a directory without a model": ({"model": "."}, ["model=", "config.json"]),
    "no steps": ({"steps": 0}, ["steps=0", "at least 1"]),
    "negative length": ({"seq_len": -1}, ["seq_len=-1", "at least 1"]),
    "negative batch": ({"micro_batch_size": -2}, ["micro_batch_size=-2", "at least 1"]),
    "lr not a number": ({"lr": "nan"}, ["lr=nan"]),
    "negative lr": ({"lr": -0.001}, ["lr=-0.001", "at least 0"]),
    "beta of 1": ({"adam_beta2": 1}, ["adam_beta2=1"]),
    "negative temperature": ({"temperature": -1}, ["temperature=-1"]),
    "empty prompt": ({"prompt": ""}, ["prompt"]),
    "val_fraction above 1": ({"val_fraction": 1.5}, ["val_fraction=1.5", r"\[0, 1\)"]),
    "val_fraction not a number": ({"val_fraction": "nan"}, ["val_fraction=nan", r"\[0, 1\)"]),
    "missing data": ({"data": "nowhere.txt"}, ["nowhere.txt", "No such file"]),
    "empty data": ({"data": "empty.txt"}, ["empty.txt", "empty"]),
    "too little data": ({"data": "short.txt"}, ["short.txt", "27 ", "try --seq_len 26$"]),
    "a directory as data": ({"data": "."}, ["regular file"]),
    "a pipe as data": ({"data": "pipe"}, ["pipe", "regular file"]),
    "odd number of bytes": ({"data": "odd.bin"}, ["odd.bin", "201 bytes", "token_dtype"]),
    "half a uint32": ({"data": "odd.bin", "token_dtype": "uint32"}, ["odd.bin", "4-byte"]),
    "uint16 token beyond the vocabulary": (
        {"data": "vocab61.uint16.bin", "vocab_size": 61},
        ["token 61 ", "position 137 ", "vocab_size=61; try --vocab_size 62$"]),
    "uint32 token beyond the vocabulary": (
        {"data": "vocab70000.uint32.bin", "token_dtype": "uint32", "vocab_size": 70000},
        ["token 2147483653 ", "position 138 ", "vocab_size=70000; try --token_dtype uint16$"]),
    "a prompt beyond the vocabulary": (
        {"data": "digits.txt", "vocab_size": 100, "prompt": "12z", "sample_tokens": 5,
         "prompt_ids": None}, ["prompt", "byte 122", "vocab_size=100", "try --prompt_ids 0, or --vocab_size 256"]),
    "adam_eps of 0": ({"adam_eps": 0}, ["adam_eps=0 ", "0/0", "try 1e-8"]),
    "adam_eps that is 0 in f32": ({"adam_eps": 1e-50}, ["adam_eps=1e-50", "try 1e-8"]),
    "lr infinite": ({"lr": "inf"}, ["lr=inf", "finite"]),
    "one training token": (
        {"data": "one.txt", "seq_len": 1}, ["one.txt", "of 1 tokens", "2 or more", "give other data"]),
    "one training token by the split": (
        {"data": "two.txt", "seq_len": 1, "val_fraction": 0.5},
        ["of 2 tokens 1 are", "try --val_fraction 0$"]),
    "a name of 300 characters for the data": (
        {"data": "x" * 300}, ["x" * 300, "File name too long"]),
    "a width of 2^62": ({"hidden_size": 2**62}, ["hidden_size=", r"\[1, 16777216\]"]),
    "2^62 layers": ({"num_layers": 2**62}, ["num_layers=", r"\[1, 4096\]"]),
    "too many weights to count": (
        {"hidden_size": 2**24, "num_layers": 2**12}, ["num_layers=4096", "--model 405B and leave out --hidden_size and leave out --num_layers"]),
    "a batch of 2^62": ({"micro_batch_size": 2**62}, ["micro_batch_size=", "at most 134217728",
                                                      "try 4194304"]),
    "a sequence of 2^62": ({"seq_len": 2**62}, ["seq_len=", "134217728 tokens; try --seq_len 4096"]),
    "2^62 micro-batches": ({"grad_acc_steps": 2**62}, ["grad_acc_steps=", r"\[1, 1000000\]"]),
    "activations beyond 2^62 bytes": (
        {"num_heads": 2**14, "num_kv_heads": 2**14, "hidden_size": 2**15, "num_layers": 2**12,
         "seq_len": 2**27, "micro_batch_size": 1, "ffn_hidden_size": 1},
        ["seq_len=134217728", r"at most 2\^62 bytes", "try --micro_batch_size 1 --seq_len 256"]),
    "a device that is not there": ({"device": "cuda"}, ["device=cuda", "--device cpu"]),
    "a device of no known kind": ({"device": "gpu"}, ["--device", "gpu", "auto", "cpu", "cuda"]),
    "text with a small vocabulary": ({"vocab_size": 100}, ["vocab_size=100", "try --vocab_size 256$"]),
}


class BadInput(Runs):
    def check_refused(self, changes, messages):
        done = self.run_chapter(changes, timeout=15)
        self.assert_one_error(done, {2})
        for message in messages:
            self.assertRegex(done.err, message)
        self.assertEqual(done.out, "")
        return done

    def test_bad_input_is_refused(self):
        os.mkfifo(os.path.join(FOLDER, "pipe"))
        for name, (changes, messages) in BAD_INPUT.items():
            with self.subTest(name):
                try:
                    done = self.check_refused(changes, messages)
                except subprocess.TimeoutExpired:
                    self.fail("the program waits instead of refusing")
                self.assertFalse(os.path.exists(done.run_dir), "a run directory is left behind")

    def test_bad_run_directories_are_refused(self):
        for run_dir in ("text.txt", "text.txt/run", "/proc/no/run", "", "x" * 300):
            with self.subTest(run_dir=run_dir):
                self.check_refused({"run_dir": run_dir}, ["run_dir"])

    def test_a_directory_without_permission_is_refused(self):
        options = {}
        if os.geteuid() == 0:  # may write everywhere, so the program runs as nobody
            options = {"user": 65534, "group": 65534, "extra_groups": []}
            for folder in (FOLDER, self.scratch):
                os.chmod(folder, 0o755)
        for mode in (0o555, 0o000):
            for below in ("", "below"):
                with self.subTest(mode=oct(mode), below=below):
                    folder = self.new_run_dir()
                    os.mkdir(folder)
                    os.chmod(folder, mode)
                    try:
                        done = self.run_chapter({"run_dir": os.path.join(folder, below)}, **options)
                    except PermissionError:
                        self.skipTest("the user nobody may not run the program")
                    finally:
                        os.chmod(folder, 0o755)
                    self.assert_one_error(done, {1, 2})
                    self.assertIn("Permission denied", done.err)
                    self.assertIn(folder, done.err)
                    self.assertEqual(os.listdir(folder), [])


class Memory(Runs):
    """A run that needs more memory than there is does not start."""

    def refused(self, available, changes=(), **options):
        with mock.patch.dict(os.environ, USP_AVAILABLE_MEMORY=str(available)):
            done = self.run_chapter(changes, timeout=15, **options)
        self.assert_one_error(done, {2})
        self.assertFalse(os.path.exists(done.run_dir))
        self.assertIn("--allow_oversize", done.err)
        return done.err

    def test_it_is_refused_by_what_the_estimate_says(self):
        path = os.path.join(self.scratch, "estimate.json")
        with mock.patch.dict(os.environ, USP_AVAILABLE_MEMORY="1"):  # which asks for no memory
            done = self.run_chapter({"estimate": True, "estimate_file": path})
        self.assertEqual((done.code, done.err), (0, ""))
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["simulated"]
        need = sum(found[key] for key in ("weights", "gradients", "optimizer", "peak_activations"))
        self.assertGreater(need, 10**5)
        error = self.refused(need - 1)
        self.assertIn(f"the run needs {need / 2**20:.1f} MiB of memory here, ", error)
        remedy = re.search(r"; try ((?:--\w+ \d+ ?)+), or --allow", error).group(1).split()
        self.assertEqual(remedy, ["--micro_batch_size", "2", "--grad_acc_steps", "2"])
        with mock.patch.dict(os.environ, USP_AVAILABLE_MEMORY=str(need - 1)):
            run_dir = self.succeed({"micro_batch_size": 2, "grad_acc_steps": 2, "steps": 1})
            self.assertEqual(read_json(run_dir, "run.json")["config"]["micro_batch_size"], 2)
            self.succeed({"allow_oversize": True, "steps": 1})
        with mock.patch.dict(os.environ, USP_AVAILABLE_MEMORY=str(need)):
            self.succeed({"steps": 1})

    def test_a_model_for_a_thousand_gpus(self):
        done = self.run_chapter(timeout=15, base={"model": "405B", "data": "text.txt",
                                                  "seq_len": 128})
        self.assert_one_error(done, {2})
        self.assertRegex(done.err, r"needs \d+\.\d GiB .* [GM]iB are available; try --model tiny")


class Files(Runs):
    """What a finished run leaves behind, for every dtype."""

    STEPS, TRACED = 5, 2
    FLAGS = dict(SMALL, steps=STEPS, trace_steps=TRACED, grad_acc_steps=2, micro_batch_size=3,
                 eval_interval=2, val_fraction=0.25, tie_word_embeddings=False)
    TOKENS = 2 * 3 * SMALL["seq_len"]  # per step

    def each_dtype(self):
        for dtype in ("f32", "bf16", "f64"):
            with self.subTest(dtype=dtype):
                yield dtype, self.run_dirs[dtype]

    @classmethod
    def setUpClass(cls):
        cls.run_dirs = {}
        for dtype in ("f32", "bf16", "f64"):
            run_dir = os.path.join(FOLDER, "files_" + dtype)
            subprocess.run(command(dict(cls.FLAGS, dtype=dtype, run_dir=run_dir)), cwd=FOLDER,
                           env=environment(), timeout=120, check=True, stdout=subprocess.DEVNULL)
            cls.run_dirs[dtype] = run_dir

    @classmethod
    def tearDownClass(cls):
        for run_dir in cls.run_dirs.values():
            shutil.rmtree(run_dir)

    @property
    def matmul_parameters(self):
        f = self.FLAGS
        h, kv = f["hidden_size"], f["hidden_size"] * f["num_kv_heads"] // f["num_heads"]
        layer = 2 * h * h + 2 * h * kv + 3 * h * f["ffn_hidden_size"]
        return f["num_layers"] * layer + 256 * h

    @property
    def parameters(self):
        h = self.FLAGS["hidden_size"]
        return self.matmul_parameters + 256 * h + (2 * self.FLAGS["num_layers"] + 1) * h

    def test_the_files_are_there(self):
        for _, run_dir in self.each_dtype():
            self.assertEqual(set(os.listdir(run_dir)), RUN_FILES)
            self.assertEqual(read(run_dir, "done"), "finished\n")

    def test_run_json(self):
        for dtype, run_dir in self.each_dtype():
            record = read_json(run_dir, "run.json")
            self.assertEqual(set(record), {
                "chapter", "command", "config", "data", "machine", "build", "parameters",
                "matmul_gflops", "started"})
            self.assertEqual(record["chapter"], os.path.basename(BINARY))
            flags = dict(self.FLAGS, dtype=dtype, run_dir=run_dir)
            self.assertEqual(record["command"], command(flags))
            for name, value in flags.items():
                self.assertEqual(record["config"][name], value, name)
            self.assertEqual(set(record["machine"]), {"cpu", "isa", "cores", "ranks", "threads"})
            self.assertEqual(record["machine"]["threads"], 2)
            self.assertEqual(record["machine"]["ranks"], 1)
            self.assertGreaterEqual(record["machine"]["cores"], 1)
            self.assertEqual(set(record["build"]), {"commit", "compiler", "arch", "matmul"})
            self.assertNotIn("", record["build"].values())
            self.assertEqual(record["parameters"], self.parameters)
            self.assertGreater(record["matmul_gflops"], 0)
            self.assertRegex(record["started"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")

    def test_run_json_describes_the_data(self):
        with open(os.path.join(FOLDER, SMALL["data"]), "rb") as f:
            content = f.read()
        train = content[:len(content) - len(content) // 4]
        entropy = -sum(n / len(train) * math.log(n / len(train))
                       for n in collections.Counter(train).values())
        for _, run_dir in self.each_dtype():
            data = read_json(run_dir, "run.json")["data"]
            self.assertAlmostEqual(data.pop("unigram_entropy"), entropy, places=9)
            self.assertEqual(data, {
                "path": SMALL["data"], "sha256": hashlib.sha256(content).hexdigest(),
                "text": True, "train_tokens": len(train), "val_tokens": len(content) // 4})

    def test_metrics_jsonl(self):
        for _, run_dir in self.each_dtype():
            records = read_metrics(run_dir)
            self.assertEqual([r["step"] for r in records], list(range(1, self.STEPS + 1)))
            for step, record in enumerate(records, start=1):
                validated = step in (2, 4, self.STEPS)
                self.assertEqual(set(record), {
                    "step", "loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "mfu",
                    "book_mfu", "hfu", "flops", "skipped", "peak_bytes", "system_allocations",
                    "comm_bytes"}
                    | ({"val_loss"} if validated else set()))
                self.assertEqual(record["tokens"], step * self.TOKENS)
                self.assertIs(record["skipped"], False)
                self.assertEqual(record["comm_bytes"], {})  # there is nobody to talk to
                for key in ("loss", "grad_norm", "step_ms", "tokens_per_s", "mfu", "flops"):
                    self.assertGreater(record[key], 0, key)
                # step_ms is rounded to a microsecond.
                self.assertAlmostEqual(record["tokens_per_s"] * record["step_ms"] / 1e3,
                                       self.TOKENS, delta=0.01 * self.TOKENS)

    def test_utilisation_is_operations_over_time_and_peak(self):
        f = self.FLAGS
        S, heads = f["seq_len"], f["num_layers"] * f["hidden_size"]
        linear = 6 * self.matmul_parameters * self.TOKENS
        needed = linear + 12 * heads * self.TOKENS * (S + 1) / 2  # (query, key) pairs, causal
        book = linear + 12 * heads * self.TOKENS * S
        executed = needed + 2 * heads * self.TOKENS * (S + 1) / 2  # blockwise: scores once more
        for dtype, run_dir in self.each_dtype():
            peak = read_json(run_dir, "run.json")["matmul_gflops"] * 1e9
            for record in read_metrics(run_dir):
                self.assertEqual(record["flops"], executed)
                for key, operations in (("mfu", needed), ("book_mfu", book), ("hfu", executed)):
                    found = record[key] * peak * record["step_ms"] * 1e-3
                    self.assertAlmostEqual(found / operations, 1, delta=0.01, msg=(dtype, key))

    def test_the_report_s_speed_is_the_median_step_s(self):
        f = self.FLAGS
        S, heads = f["seq_len"], f["num_layers"] * f["hidden_size"]
        executed = (6 * self.matmul_parameters + 14 * heads * (S + 1) / 2) * self.TOKENS
        for _, run_dir in self.each_dtype():
            rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", read(run_dir, "report.md"), re.M))
            speed, ms, tokens, steps = map(float, re.fullmatch(
                r"(\d+) tokens/s: ([\d.]+) ms a step of (\d+) tokens, median of (\d+)",
                rows["speed"]).groups())
            self.assertEqual((tokens, steps), (self.TOKENS, self.STEPS))
            self.assertAlmostEqual(speed * ms * 1e-3 / tokens, 1, delta=0.001)
            times = sorted(record["step_ms"] for record in read_metrics(run_dir))
            self.assertAlmostEqual(ms, times[len(times) // 2], delta=0.001)
            peak = float(re.search(r"library's ([\d.]+) GFLOP/s", rows["MFU"])[1])
            # Measured twice, and the better one counts.
            measured = read_json(run_dir, "run.json")["matmul_gflops"]
            self.assertGreaterEqual(peak, measured - 0.05)
            hfu = 100 * executed / (ms * 1e-3) / (peak * 1e9)
            self.assertAlmostEqual(float(rows["HFU"].split(" %")[0]), hfu, delta=0.51 + 0.01 * hfu)
            self.assertIn("below the causal mask", rows["MFU"])
            self.assertIn("the book's count", rows["MFU, no mask"])

    def test_metrics_jsonl_has_the_digits_to_tell_bits_apart(self):
        for dtype, run_dir in self.each_dtype():
            losses = [record["loss"] for record in results(run_dir)]
            digits = max(len(loss.replace(".", "").lstrip("0")) for loss in losses)
            self.assertIn(digits, {"f64": (16, 17)}.get(dtype, (8, 9)), losses)

    def test_learning_rates(self):
        f = self.FLAGS
        want = []
        for step in range(self.STEPS):
            q = (step - f["warmup_steps"]) / (self.STEPS - f["warmup_steps"])
            cosine = f["lr"] * (0.1 + 0.9 * (1 + math.cos(math.pi * q)) / 2)
            want.append(f["lr"] * (step + 1) / f["warmup_steps"] if q < 0 else cosine)
        for _, run_dir in self.each_dtype():
            for record, lr in zip(read_metrics(run_dir), want):
                self.assertAlmostEqual(record["lr"], lr, delta=1e-12)

    def test_peak_bytes_are_those_of_the_formula(self):
        # Bytes per parameter: weight, gradient, and the optimizer's moments and master weight.
        cost = {"f32": (4, 4, 8), "bf16": (2, 4, 12), "f64": (8, 8, 16)}
        for dtype, run_dir in self.each_dtype():
            for record in read_metrics(run_dir):
                peak = record["peak_bytes"]
                self.assertEqual(list(peak), CATEGORIES)
                self.assertEqual([peak[key] for key in ("weights", "gradients", "optimizer")],
                                 [bytes_ * self.parameters for bytes_ in cost[dtype]])
                self.assertGreater(peak["activations"], 0)
                self.assertEqual(peak["communication"], 0)

    def test_start_json_has_every_part_until_the_first_step_has_ended(self):
        begin = time.monotonic()
        run_dir = self.succeed({"steps": 2, "checkpoint_interval": 1})
        whole = time.monotonic() - begin
        start = read_json(run_dir, "start.json")
        parts = start["parts"]
        self.assertEqual([part["what"] for part in parts],
                         ["command line", "device", "data", "check of memory", "check of a product",
                          "run directory and connections", "rate of products", "model",
                          "checkpoint and records", "first step"])
        self.assertAlmostEqual(sum(part["seconds"] for part in parts), start["seconds"],
                               delta=0.001 * len(parts))
        self.assertLess(start["seconds"], whole)
        self.assertGreater(parts[-1]["seconds"] + 0.001, 1e-3 * read_metrics(run_dir)[0]["step_ms"])
        for part in parts:
            self.assertTrue(0 <= part["cores"] <= os.cpu_count() + 1, part)
        # A run that resumes has a start of its own, whose first step is a later one.
        self.succeed({"run_dir": run_dir, "resume": True, "steps": 3})
        self.assertNotEqual(read_json(run_dir, "start.json"), start)

    def test_memory_json(self):
        for _, run_dir in self.each_dtype():
            memory = read_json(run_dir, "memory.json")
            self.assertEqual(set(memory), {
                "peak_bytes", "peak_total_bytes", "reserved_bytes", "reserved_workspace_bytes",
                "system_allocations", "initial_bytes", "names", "phases", "events"})
            total = memory["peak_total_bytes"]
            self.assertEqual(list(memory["peak_bytes"]), CATEGORIES)
            self.assertLessEqual(total, sum(memory["peak_bytes"].values()))
            self.assertGreaterEqual(total, max(memory["peak_bytes"].values()))
            self.assertGreaterEqual(memory["reserved_bytes"], total)
            times = [event[0] for event in memory["events"]]
            self.assertEqual(times, sorted(times))
            self.assertLessEqual({event[2] for event in memory["events"]}, set(CATEGORIES))
            # Whatever a step takes for its activations, it gives back.
            self.assertEqual(sum(bytes_ for _, bytes_, category, _, _ in memory["events"]
                                 if category == "activations"), 0)
            kinds = {memory["names"][name] for _, _, _, _, name in memory["events"]}
            self.assertLessEqual({"residual", "qkv", "gate_up", "logits"}, kinds)
            self.assertEqual({name for _, _, name, _ in memory["phases"]},
                             {"train_step", "forward", "backward", "optimizer"})
            for begin, end, _, step in memory["phases"]:
                self.assertLess(begin, end)
                self.assertIn(step, range(1, self.TRACED + 1))
            self.assertGreater(len(times), 50)

    def spans(self, run_dir):
        """The trace's spans as (begin, end, name, args) in nanoseconds, outer before inner."""
        trace = read_json(run_dir, "trace.json")
        self.assertEqual(set(trace), {"displayTimeUnit", "otherData", "traceEvents"})
        self.assertEqual(trace["otherData"]["ranks"], 1)
        names = [e for e in trace["traceEvents"] if e["ph"] == "M"]
        self.assertEqual([e["name"] for e in names], ["process_name", "thread_name"])
        spans = []
        for event in trace["traceEvents"]:
            if event["ph"] != "X":
                self.assertIn(event["ph"], ("M", "C"))
                continue
            self.assertEqual(set(event), {"name", "cat", "ph", "pid", "tid", "ts", "dur", "tts",
                                          "tdur", "args"})
            told = set(event["args"])
            self.assertLessEqual(told, {"step", "flops", "bytes", "GFLOP/s", "GB/s",
                                        "micro_batch"})
            self.assertIn("step", told)
            for amount, rate in (("flops", "GFLOP/s"), ("bytes", "GB/s")):
                if rate in told:  # three decimals of both are printed
                    expected = event["args"][amount] / (1e3 * event["dur"])
                    self.assertAlmostEqual(event["args"][rate], expected,
                                           delta=0.001 + 0.001 * expected / event["dur"])
            for value in (event["ts"], event["dur"], event["tts"], event["tdur"],
                          *event["args"].values()):
                self.assertGreaterEqual(value, 0, event)
            begin, duration = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            spans.append((begin, begin + duration, event["name"], event["args"]))
        return sorted(spans, key=lambda span: (span[0], -span[1]))

    def test_trace_json(self):
        outer = (["train_step"] + ["train_step", "evaluate"] * (self.TRACED - 1))[:self.TRACED + 1]
        for _, run_dir in self.each_dtype():
            top, inside, stack = [], collections.defaultdict(list), []
            for span in self.spans(run_dir):
                while stack and stack[-1][1] <= span[0]:
                    stack.pop()
                if stack:
                    self.assertLessEqual(span[1], stack[-1][1], f"{span} leaves {stack[-1]}")
                    self.assertEqual(span[3]["step"], stack[0][3]["step"])
                    inside[stack[0][2], stack[0][3]["step"]].append(span)
                else:
                    top.append(span[2])
                stack.append(span)
            self.assertEqual(top, outer)
            for step in range(1, self.TRACED + 1):
                names = collections.Counter(span[2] for span in inside["train_step", step])
                self.assertEqual([names[name] for name in ("forward", "backward", "optimizer")],
                                 [2, 2, 1])

    def test_memory_in_the_trace(self):
        for dtype, run_dir in self.each_dtype():
            live = collections.defaultdict(list)
            for event in read_json(run_dir, "trace.json")["traceEvents"]:
                if event["ph"] == "C":
                    self.assertEqual(set(event), {"name", "ph", "pid", "ts", "args"})
                    (category, bytes_), = event["args"].items()
                    live[category].append(bytes_)
            self.assertEqual(set(live), set(CATEGORIES))
            peak = read_metrics(run_dir)[self.TRACED - 1]["peak_bytes"]
            for category in ("weights", "gradients", "optimizer", "activations"):
                self.assertEqual(max(live[category]), peak[category], category)
            self.assertEqual(live["activations"][-1], 0)

    def test_operations_in_the_trace(self):
        # The book's 6 N per token: a linear layer is one product forward and two backward.
        for _, run_dir in self.each_dtype():
            steps = [span for span in self.spans(run_dir) if span[2] == "train_step"]
            linear = collections.Counter()
            for begin, end, name, args in self.spans(run_dir):
                if any(s[0] <= begin and end <= s[1] for s in steps):
                    linear[name] += args.get("flops", 0)
            product = 2 * self.matmul_parameters * self.TOKENS * self.TRACED
            for name in ("linear_forward", "linear_backward_input", "linear_backward_weight"):
                self.assertEqual(linear[name], product, name)

    def test_no_traced_steps(self):
        run_dir = self.succeed({"trace_steps": 0})
        self.assertEqual(self.spans(run_dir), [])
        self.assertEqual(read_json(run_dir, "memory.json")["events"], [])


class Text(Runs):
    def sample(self, **changes):
        flags = {"sample_tokens": 30, "steps": 20, "lr": 0.01}
        text = read(self.succeed(dict(flags, **changes)), "report.md")
        return re.search(r"^~~~+text\n(.*)\n~~~+$", text, re.S | re.M).group(1)

    def test_context_is_learnt_from_the_project_s_own_text(self):
        # Measured: 3.1 against 3.7 nats.
        run_dir = self.succeed({
            "hidden_size": 64, "ffn_hidden_size": 160, "num_kv_heads": 4, "seq_len": 64,
            "micro_batch_size": 8, "steps": 100, "lr": 0.01, "warmup_steps": 10,
            "eval_interval": 50, "eval_samples": 64, "data": None})
        data = read_json(run_dir, "run.json")["data"]
        self.assertTrue(data["path"].endswith("data/corpus.txt"), data["path"])
        with open(data["path"], "rb") as f:
            self.assertEqual(data["sha256"], hashlib.sha256(f.read()).hexdigest())
        val_loss = read_metrics(run_dir)[-1]["val_loss"]
        self.assertLess(val_loss, data["unigram_entropy"])
        report = read(run_dir, "report.md")
        self.assertIn(f"{val_loss:.4f}", report)
        self.assertIn(f"{data['unigram_entropy']:.4f}", report)
        self.assertIn("is below the entropy", report)

    def test_the_report_admits_that_nothing_is_learnt(self):
        self.assertIn("is not below the entropy", read(self.succeed({"steps": 2}), "report.md"))

    def test_the_same_tokens_as_text_and_as_bin(self):
        runs = [self.succeed({"data": "text.txt"}), self.succeed({"data": "text.uint16.bin"}),
                self.succeed({"data": "text.uint32.bin", "token_dtype": "uint32"})]
        self.assertEqual(results(runs[0]), results(runs[1]))
        self.assertEqual(results(runs[0]), results(runs[2]))

    def test_sample_of_a_bin_is_its_ids(self):
        sample = self.sample(data="text.uint16.bin", sample_tokens=12, steps=2)
        self.assertTrue(sample.startswith("token ids: "), sample)
        ids = sample.removeprefix("token ids: ").split()
        self.assertEqual(len(ids), 13)  # the file's first token, continued by 12
        self.assertLess(max(int(token) for token in ids), 256)

    def test_sample_continues_the_prompt(self):
        prompt = "Gr\u00fc\u00dfe an \u4e16\u754c \U0001f680: "
        text = self.sample(prompt=prompt)
        self.assertTrue(text.startswith(prompt), text)
        self.assertGreater(len(text), len(prompt))

    def test_a_sample_shows_no_raw_control_characters(self):
        flags = {"prompt": "\x1b[2J\a\u00e9\tz\n", "sample_tokens": 3, "steps": 1}
        done = self.run_chapter(flags)
        self.assertEqual((done.code, done.err), (0, ""))
        for text in (done.out, read(done.run_dir, "report.md")):
            self.assertIn("\\x1B[2J\\x07\u00e9\tz\n", text)
            self.assertEqual([c for c in text if ord(c) < 32 and c not in "\n\t"], [])

    def test_no_validation_without_samples_for_it(self):
        run_dir = self.succeed({"eval_samples": 0})
        self.assertEqual([record for record in read_metrics(run_dir) if "val_loss" in record], [])
        report = read(run_dir, "report.md")
        self.assertNotIn("validation loss", report)
        self.assertNotIn("nan", report)

    def test_a_sample_is_the_same_without_the_cache_also_beyond_seq_len(self):
        for attention in ("naive", "blockwise"):
            flags = {"sample_tokens": 5 * SMALL["seq_len"], "dtype": "f64", "attention": attention}
            cached = self.sample(**flags)
            self.assertEqual(self.sample(no_kv_cache=True, **flags), cached)
            self.assertGreater(len(cached), 2 * SMALL["seq_len"])

    def test_temperature_zero_takes_the_likeliest_token(self):
        greedy = self.sample(temperature=0)
        self.assertEqual(self.sample(temperature=0, top_k=3), greedy)
        self.assertEqual(self.sample(temperature=1, top_k=1), greedy)
        self.assertNotEqual(self.sample(temperature=2, top_k=0), greedy)

    def test_divergence_is_reported_as_text(self):
        # Beyond what a float32 holds, so the first update makes every weight infinite.
        done = self.run_chapter({"lr": 1e39, "warmup_steps": 0, "steps": 6, "sample_tokens": 8})
        self.assertEqual((done.code, done.err), (0, ""))
        self.assertIn("step 2: gradient norm is", done.out)
        self.assertIn("update is left out", done.out)
        self.assertIn("| skipped updates | 5 of 6, the gradient was not finite: steps 2 to 6 |",
                      read(done.run_dir, "report.md"))
        records = read_metrics(done.run_dir)  # refuses bare NaN and Infinity
        self.assertIsInstance(records[0]["loss"], float)
        for key in ("loss", "grad_norm", "val_loss"):
            self.assertIn(records[-1][key], ("nan", "inf", "-inf"), key)
        self.assertEqual([record["skipped"] for record in records], [False] + 5 * [True])
        self.assertEqual(set(os.listdir(done.run_dir)), RUN_FILES)

    def test_so_many_skipped_updates_in_a_row_end_the_run(self):
        flags = {"lr": 1e39, "warmup_steps": 0, "steps": 40, "sample_tokens": 8,
                 "checkpoint_interval": 100}
        for limit, steps in ((None, 11), (3, 4)):
            with self.subTest(limit=limit):
                done = self.run_chapter(dict(flags, max_skipped_steps=limit))
                self.assert_one_error(done, {1})
                self.assertIn(f"the last {limit or 10} updates were left out", done.err)
                self.assertIn("try a lower --lr", done.err)
                self.assertEqual(read(done.run_dir, "done"), f"diverged after step {steps}\n")
                self.assertEqual(len(read_metrics(done.run_dir)), steps)
                report = read(done.run_dir, "report.md")
                self.assertIn(f"steps 2 to {steps} |", report)
                self.assertIn("Training has diverged", report)
                self.assertNotIn("A sample", report)
                self.assertEqual(set(os.listdir(done.run_dir)), RUN_FILES | {"checkpoints"})
        self.assertEqual(self.run_chapter(dict(flags, max_skipped_steps=0)).code, 0)

    def test_a_short_run_without_any_update_has_diverged(self):
        run_dir = self.succeed({"checkpoint_interval": 1, "steps": 1, "lr": 1e39, "warmup_steps": 0})
        done = self.run_chapter({"checkpoint_interval": 1, "steps": 3, "lr": 1e39,
                                 "warmup_steps": 0, "resume": True, "run_dir": run_dir})
        self.assert_one_error(done, {1})
        self.assertEqual(read(run_dir, "done"), "diverged after step 3\n")


class Estimate(Runs):
    """--estimate: a dry run."""

    def estimate(self, **flags):
        path = os.path.join(self.scratch, "estimate.json")
        done = self.run_chapter({"estimate": True, "estimate_file": path, **flags}, timeout=30)
        self.assertEqual((done.code, done.err), (0, ""))
        self.assertFalse(os.path.exists(done.run_dir))
        with open(path, encoding="utf-8") as file:
            return json.load(file), done.out

    def test_a_model_far_larger_than_memory(self):
        found, text = self.estimate(model="405B", hidden_size=16384, num_layers=126, num_heads=128,
                                    num_kv_heads=8, ffn_hidden_size=53248, vocab_size=128256,
                                    seq_len=4096, dtype="bf16", attention="naive")
        self.assertEqual(found["parameters"], 405_853_388_800)
        self.assertIn("405853388800 parameters in bf16", text)
        for key, predicted in found["predicted"].items():
            tolerance = 1e-12 * predicted if "flops" in key else 0  # sums beyond 2^53
            self.assertAlmostEqual(found["simulated"][key], predicted, delta=tolerance, msg=key)
        for part in found["activations"]:
            self.assertEqual(part["bytes"], part["predicted"], part)
        self.assertEqual(sum(part["bytes"] for part in found["activations"]),
                         found["simulated"]["activations"])
        self.assertEqual(found["book"]["weights_gradients_optimizer"], 16 * 405_853_388_800)

    def test_a_file_that_cannot_be_written_is_refused_before_anything_is_said(self):
        for path in ("/dev/full", os.path.join(self.scratch, "nowhere", "estimate.json")):
            done = self.run_chapter({"estimate": True, "estimate_file": path})
            self.assert_one_error(done, {2})
            self.assertEqual(done.out, "")
            self.assertIn(f"estimate_file={path} cannot be written", done.err)

    def test_what_a_run_measures_is_what_was_estimated(self):
        for recompute in ("none", "selective", "full"):
            with self.subTest(recompute=recompute):
                flags = {"recompute": recompute, "attention": "naive"}
                found, _ = self.estimate(**flags)
                run_dir = self.succeed(dict(flags, steps=2, trace_steps=2, eval_interval=0,
                                            sample_tokens=0))
                with open(os.path.join(run_dir, "report.md"), encoding="utf-8") as file:
                    report = file.read()
                for what in ("weights", "gradients", "optimizer states", "saved activations"):
                    self.assertRegex(report, rf"\| {what} \| .*\(1\.0000\) \|")
                memory = read_json(run_dir, "memory.json")
                self.assertEqual(memory["peak_bytes"]["activations"],
                                 found["simulated"]["peak_activations"])
                self.assertEqual(read_metrics(run_dir)[-1]["flops"], found["simulated"]["flops"])


class CommandLine(Runs):
    def test_help_lists_every_flag_under_its_group(self):
        done = self.run_chapter(dict.fromkeys(SMALL), base={"help": True})
        self.assertEqual((done.code, done.err), (0, ""))
        self.assertEqual(re.findall(r"^(\w+):$", done.out, re.M)[1:], GROUPS)
        flags = set(re.findall(r"^ +(?:-h,)?--(\w+)", done.out, re.M)) - {"help", "version"}
        config = read_json(self.succeed({"steps": 1}), "run.json")["config"]
        self.assertEqual(flags, set(config))
        self.assertGreaterEqual(len(flags), 35)
        self.assertFalse(os.path.exists(done.run_dir))

    def test_version_describes_the_build(self):
        done = self.run_chapter(base={"version": True})
        self.assertEqual((done.code, done.err), (0, ""))
        for pattern in (r"ultrascale\.cpp \w+", r"compiler +(g\+\+|clang)", r"oneDNN \d",
                        r"bf16 matmul +(native|by conversion)"):
            self.assertRegex(done.out, pattern)
        self.assertFalse(os.path.exists(done.run_dir))


def main():
    global BINARY
    BINARY, rest = binary.parse(__doc__)
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
