"""Runs that stop, are killed, and go on: what a checkpoint promises.

  test_checkpoints.py --binary build/release/bin/ch01_single_gpu [unittest arguments]

Only the standard library is needed.
"""

import concurrent.futures
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest

import test_runs
from test_runs import RUN_FILES, SMALL, Runs, read, read_json, read_metrics

# Without warm-up and decay, learning rates do not depend on --steps.
CONSTANT = {"warmup_steps": 0, "min_lr_ratio": 1, "eval_interval": 0, "trace_steps": 0}
# That many runs at a time, each killed so often.
CHAINS, KILLS = 4, 25 if os.environ.get("USP_TEST_ALL") else 8


def setUpModule():
    test_runs.setUpModule()


def checkpoints(run_dir):
    folder = os.path.join(run_dir, "checkpoints")
    return sorted(name for name in os.listdir(folder) if not name.endswith(".tmp")
                  ) if os.path.isdir(folder) else []


def state_file(run_dir, step):
    return os.path.join(run_dir, "checkpoints", f"step-{step:08}", "state.safetensors")


def content(path):
    with open(path, "rb") as f:
        return f.read()


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def comparable(run_dir):
    """What must not depend on whether a run was interrupted, as the text of the file."""
    return [{key: record[key] for key in ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
             if key in record} for record in read_metrics(run_dir, parse_float=str)]


class CheckpointRuns(Runs):
    def start(self, changes):
        flags = dict(SMALL, run_dir=self.new_run_dir())
        flags.update(changes)
        return self.start_at(flags), flags["run_dir"]

    def start_at(self, flags):
        process = subprocess.Popen(
            test_runs.command(flags), cwd=test_runs.FOLDER, env=test_runs.environment(1),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def refuse(self, flags, codes, *patterns):
        done = self.run_chapter(flags)
        self.assert_one_error(done, codes)
        for pattern in patterns:
            self.assertRegex(done.err, pattern)


class Resume(CheckpointRuns):
    def test_an_interrupted_run_goes_on_bit_for_bit(self):
        for dtype, more in (("f32", {}), ("bf16", {"tie_word_embeddings": True}),
                            ("f64", {"grad_acc_steps": 3, "micro_batch_size": 2})):
            with self.subTest(dtype=dtype):
                flags = dict(more, dtype=dtype, steps=300, eval_interval=20,
                             checkpoint_interval=50, sample_tokens=10)
                whole = self.succeed(flags, threads=1)
                process, run_dir = self.start(flags)
                self.wait_until(lambda: os.path.isdir(os.path.join(run_dir, "checkpoints")),
                                process)
                process.send_signal(signal.SIGTERM)
                self.assertEqual(process.wait(60), 128 + signal.SIGTERM)
                steps = len(read_metrics(run_dir))
                self.assertLess(steps, 300)
                self.assertEqual(read(run_dir, "done"), f"interrupted after step {steps}\n")
                self.assertEqual(checkpoints(run_dir)[-1], f"step-{steps:08}")
                record = read_json(run_dir, "run.json")
                self.succeed(dict(flags, run_dir=run_dir, resume=True), threads=1)
                self.assertEqual(comparable(run_dir), comparable(whole))
                self.assertEqual(len(comparable(run_dir)), 300)
                found = read_json(run_dir, "run.json")
                [resumed] = found.pop("resumed")
                self.assertEqual(found, record)
                self.assertIn("--resume", resumed["command"])
                self.assertEqual(resumed["build"], record["build"])
                self.assertEqual(read(run_dir, "done"), "finished\n")
                self.assertEqual(set(os.listdir(run_dir)), RUN_FILES | {"checkpoints"})
                self.assertEqual(content(state_file(run_dir, 300)),
                                 content(state_file(whole, 300)))
                self.assertEqual(read(run_dir, "report.md").split("## A sample")[1],
                                 read(whole, "report.md").split("## A sample")[1])

    def test_killed_at_random_moments(self):
        # Every start continues what the one before has left; the last one's run is compared with
        # one that nobody killed. Half of the kills come at any time after the start, the others
        # soon after a step, when a checkpoint is written.
        flags = dict(SMALL, **CONSTANT, steps=10**6, checkpoint_interval=1, dtype="bf16")
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(CHAINS) as pool:
            chains = list(pool.map(lambda seed: self.kill_again_and_again(flags, seed),
                                   range(CHAINS)))
        print(f"{sum(kills for kills, _, _ in chains)} kills in "
              f"{time.monotonic() - begin:.0f} s, checkpoints at steps "
              f"{[steps for _, steps, _ in chains]}, "
              f"{sum(bare for _, _, bare in chains)} with nothing to resume", file=sys.stderr)

    def kill_again_and_again(self, flags, seed):
        rng = random.Random(seed)
        run_dir = os.path.join(self.scratch, f"chain{seed}")
        flags = dict(flags, run_dir=run_dir)
        bare = 0
        for _ in range(KILLS):
            resume = bool(checkpoints(run_dir))
            if not resume:
                bare += 1
                self.refuse(dict(flags, resume=True), {2}, "holds no (run|checkpoint); start ")
            newest = checkpoints(run_dir)[-1:]
            process = self.start_at(dict(flags, resume=resume, overwrite=not resume))
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 1))
            else:
                self.wait_until(lambda: checkpoints(run_dir)[-1:] > newest, process)
                time.sleep(rng.uniform(0, 0.02))
            process.kill()
            self.assertEqual(process.wait(60), -signal.SIGKILL, process.stderr.read())
        steps = int(checkpoints(run_dir)[-1][5:])
        self.succeed(dict(flags, resume=True, steps=steps + 3), threads=1)
        whole = self.succeed(dict(flags, run_dir=run_dir + "whole", steps=steps + 3,
                                  checkpoint_interval=10**6), threads=1)
        self.assertEqual(comparable(run_dir), comparable(whole))
        self.assertEqual(content(state_file(run_dir, steps + 3)),
                         content(state_file(whole, steps + 3)))
        self.assertEqual(sorted(os.listdir(os.path.join(run_dir, "checkpoints"))),
                         [f"step-{steps + 2:08}", f"step-{steps + 3:08}"])
        return KILLS, steps, bare

    def test_flags_that_are_not_typed_are_those_of_the_run(self):
        for more in ({}, {"model": "tiny", "num_layers": 1, "num_kv_heads": 4, "head_dim": 12},
                     {"grad_acc_steps": 2, "micro_batch_size": 2, "prompt": "it's a \"b\" "}):
            with self.subTest(more):
                flags = dict(SMALL, checkpoint_interval=2, steps=6, sample_tokens=9, **more)
                whole = self.succeed({}, base=flags)
                run_dir = self.succeed({}, base=flags)
                shutil.rmtree(os.path.dirname(state_file(run_dir, 6)))
                self.succeed({"run_dir": run_dir, "resume": True}, base={})
                self.assertEqual(comparable(run_dir), comparable(whole))
                self.assertEqual(content(state_file(run_dir, 6)), content(state_file(whole, 6)))

    def test_a_directory_called_as_a_preset_is_not_taken_for_the_model(self):
        os.mkdir(os.path.join(test_runs.FOLDER, "small"))
        flags = {**SMALL, **CONSTANT, "model": "small", "checkpoint_interval": 2}
        run_dir = self.succeed(flags)
        self.succeed({"run_dir": run_dir, "resume": True, "steps": 5}, base={})
        self.assertEqual(len(comparable(run_dir)), 5)

    def test_the_command_that_goes_on_is_printed_and_does(self):
        flags = dict(SMALL, steps=10**6, checkpoint_interval=10**6,
                     run_dir=os.path.join(self.scratch, "a run's"))
        process = subprocess.Popen(
            test_runs.command(flags), cwd=test_runs.FOLDER, env=test_runs.environment(1),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        path = os.path.join(flags["run_dir"], "metrics.jsonl")
        self.wait_until(lambda: os.path.exists(path) and os.path.getsize(path), process)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0]
        line = out[out.index("To go on from here:\n") + len("To go on from here:\n"):].strip()
        steps = len(read_metrics(flags["run_dir"]))
        done = subprocess.run(["sh", "-c", f"{line} --steps {steps + 2}"], cwd=test_runs.FOLDER,
                              env=test_runs.environment(1), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""), line)
        self.assertEqual(len(read_metrics(flags["run_dir"])), steps + 2)

    def test_a_checkpoint_is_enough(self):
        flags = dict(CONSTANT, checkpoint_interval=2, steps=4)
        whole = comparable(self.succeed(dict(flags, steps=6)))
        for name, damage in (("missing", os.remove), ("cut off", lambda path: os.truncate(path, 99)),
                             ("of another kind", lambda path: write_text(path, "[1]")),
                             ("with other entries", lambda path: write_text(
                                 path, json.dumps({"resumed": 3})))):
            for file in ("run.json", "metrics.jsonl", "both"):
                with self.subTest(name, file=file):
                    run_dir = self.succeed(flags)
                    for one in ("run.json", "metrics.jsonl") if file == "both" else (file,):
                        damage(os.path.join(run_dir, one))
                    self.refuse(dict(flags, run_dir=run_dir), {2}, "--resume")
                    self.succeed({"run_dir": run_dir, "resume": True, "steps": 6}, base={})
                    self.assertEqual(comparable(run_dir)[-2:], whole[-2:])
                    record = read_json(run_dir, "run.json")
                    self.assertEqual(record["config"]["num_layers"], SMALL["num_layers"])
                    self.assertEqual(len(record["resumed"]), 1)

    def test_more_steps(self):
        flags = dict(CONSTANT, checkpoint_interval=4)
        run_dir = self.succeed(dict(flags, steps=6))
        self.assertEqual(checkpoints(run_dir), ["step-00000004", "step-00000006"])
        # The run's own interval goes on, as nothing else is said.
        self.succeed(dict(CONSTANT, steps=11, run_dir=run_dir, resume=True))
        self.assertEqual(checkpoints(run_dir), ["step-00000008", "step-00000011"])
        self.assertEqual(comparable(run_dir), comparable(self.succeed(dict(flags, steps=11))))

    def test_no_steps_left(self):
        flags = {"checkpoint_interval": 4, "steps": 6}
        run_dir = self.succeed(flags)
        lines, report = read(run_dir, "metrics.jsonl"), read(run_dir, "report.md")
        os.remove(os.path.join(run_dir, "done"))  # killed before it could say so
        self.succeed(dict(flags, run_dir=run_dir, resume=True))
        self.assertEqual(read(run_dir, "metrics.jsonl"), lines)
        self.assertEqual(read(run_dir, "done"), "finished\n")
        for row in ("trained", "training loss", "validation loss"):
            line = next(line for line in report.splitlines() if f"| {row} |" in line)
            self.assertIn(line, read(run_dir, "report.md"))

    def test_a_batch_may_be_divided_otherwise(self):
        flags = {"dtype": "f64", "checkpoint_interval": 2, "steps": 8}
        whole = self.succeed(flags)
        run_dir = self.succeed(dict(flags, steps=8))
        shutil.rmtree(os.path.join(run_dir, "checkpoints", "step-00000008"))
        self.succeed(dict(flags, run_dir=run_dir, resume=True, micro_batch_size=1,
                          grad_acc_steps=4))
        for a, b in zip(read_metrics(whole), read_metrics(run_dir)):
            self.assertLessEqual(abs(b["loss"] - a["loss"]), 1e-12 * abs(a["loss"]))

    def test_the_trace_is_of_the_resumed_steps(self):
        flags = dict(CONSTANT, checkpoint_interval=4, trace_steps=2)
        run_dir = self.succeed(dict(flags, steps=4))
        self.succeed(dict(flags, steps=8, run_dir=run_dir, resume=True))
        traced = {event["args"]["step"] for event in read_json(run_dir, "trace.json")["traceEvents"]
                  if event["ph"] == "X"}
        self.assertEqual(traced, {5, 6})


class Refusals(CheckpointRuns):
    FLAGS = {"checkpoint_interval": 2, "steps": 4}

    def setUp(self):
        super().setUp()
        self.run_dir = self.succeed(self.FLAGS)
        self.flags = dict(self.FLAGS, run_dir=self.run_dir, resume=True, steps=8)

    def test_nothing_to_resume(self):
        for question in ({}, {"estimate": True}):
            self.refuse(dict(self.flags, run_dir=self.new_run_dir(), **question), {2},
                        "holds no run.*--resume")
        without = self.succeed({"steps": 2})
        self.assertFalse(os.path.exists(os.path.join(without, "checkpoints")))
        self.refuse(dict(self.flags, run_dir=without), {2},
                    "holds no checkpoint.*--overwrite.*--checkpoint_interval")
        self.refuse(dict(self.flags, overwrite=True), {2}, "resume and overwrite")
        self.refuse(dict(self.flags, steps=3), {2}, "steps=3 must be at least the 4 .* try 8")

    def test_flags_that_make_another_run(self):
        before = {name: read(self.run_dir, name) for name in RUN_FILES}
        for name, value in (("seed", 2), ("dtype", "f64"), ("hidden_size", 64), ("lr", 0.001),
                            ("data_order", "sequential"), ("attention", "naive"),
                            ("tie_word_embeddings", True), ("seq_len", 16),
                            ("val_fraction", 0.2)):
            with self.subTest(flag=name):
                there = read_json(self.run_dir, "run.json")["config"][name]
                self.refuse(dict(self.flags, **{name: value}), {2},
                            f"step-00000004 was trained with {name}={json.dumps(there)}, and "
                            f"this run has {name}={json.dumps(value)};")
        self.refuse(dict(self.flags, grad_acc_steps=2), {2},
                    "global_batch_size=4, and this run has global_batch_size=8;")
        self.refuse(dict(self.flags, data="digits.txt"), {2}, 'data_sha256="[0-9a-f]{64}"')
        self.assertEqual({name: read(self.run_dir, name) for name in RUN_FILES}, before)
        self.succeed(dict(self.flags, data=os.path.join(test_runs.FOLDER, SMALL["data"])))

    def test_numbers_of_checkpoints(self):
        self.refuse({"checkpoint_interval": -1}, {2}, "checkpoint_interval=-1")
        self.refuse({"keep_checkpoints": 0}, {2}, "keep_checkpoints=0 must be at least 1")
        run_dir = self.succeed({"checkpoint_interval": 1, "keep_checkpoints": 3, "steps": 5})
        self.assertEqual(checkpoints(run_dir), [f"step-0000000{step}" for step in (3, 4, 5)])

    def test_a_damaged_checkpoint(self):
        path = state_file(self.run_dir, 4)
        data = content(path)
        for name, damaged, pattern in (
                ("truncated", data[:-100], rf"ends at byte {len(data) - 100}, and {len(data)} "),
                ("altered", data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
                 rf"bytes 0 to {len(data) - 1} are not"),
                ("missing", None, "No such file")):
            with self.subTest(name):
                os.remove(path)
                if damaged is not None:
                    with open(path, "wb") as f:
                        f.write(damaged)
                self.refuse(self.flags, {2}, "step-00000004/state.safetensors", pattern,
                            "step-00000002 is whole, remove step-00000004")
                self.assertEqual(read(self.run_dir, "done"), "finished\n")
                with open(path, "wb") as f:
                    f.write(data)
        shutil.rmtree(os.path.dirname(path))
        self.succeed(self.flags)
        self.assertEqual(len(read_metrics(self.run_dir)), 8)

    def test_a_full_disk_keeps_the_checkpoint_before(self):
        # A limit on the size of a file stands in for the disk.
        limit = os.path.getsize(state_file(self.run_dir, 4)) - 1000
        done = self.run_chapter(
            self.flags, restore_signals=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assert_one_error(done, {1})
        self.assertRegex(done.err, r"writing .*step-00000006\.tmp/state\.safetensors failed at byte "
                                   r"\d+: File too large")
        self.assertEqual(sorted(os.listdir(os.path.join(self.run_dir, "checkpoints"))),
                         ["step-00000002", "step-00000004"])
        self.assertFalse(os.path.exists(os.path.join(self.run_dir, "done")))
        self.succeed(self.flags)
        self.assertEqual(comparable(self.run_dir)[:4], comparable(self.succeed(self.FLAGS)))
        self.assertEqual([record["step"] for record in read_metrics(self.run_dir)],
                         list(range(1, 9)))

    def test_overwrite_removes_the_checkpoints_too(self):
        self.succeed({"run_dir": self.run_dir, "overwrite": True, "steps": 2})
        self.assertEqual(set(os.listdir(self.run_dir)), RUN_FILES)

    def test_only_unfinished_checkpoints_are_removed(self):
        folder = os.path.join(self.run_dir, "checkpoints")
        foreign = {"notes.tmp", "step-by-step.tmp", "step-7.tmp", "epoch-00000003.tmp"}
        for name in foreign | {"step-00000003.tmp", "step-00000001.old.tmp"}:
            os.mkdir(os.path.join(folder, name))
            with open(os.path.join(folder, name, "file"), "w", encoding="utf-8") as f:
                f.write("mine\n")
        self.succeed(self.flags)
        self.assertEqual(set(os.listdir(folder)), foreign | {"step-00000006", "step-00000008"})
        self.succeed({"run_dir": self.run_dir, "overwrite": True, "steps": 2})
        self.assertEqual(set(os.listdir(folder)), foreign)

    def test_checkpoints_of_somebody_else_stay(self):
        foreign = os.path.join(self.new_run_dir(), "checkpoints", "epoch-3")
        os.makedirs(foreign)
        run_dir = os.path.dirname(os.path.dirname(foreign))
        self.refuse({"run_dir": run_dir, "steps": 2}, {2}, "holds checkpoints and no run")
        self.succeed({"run_dir": run_dir, "steps": 2, "overwrite": True})
        self.assertTrue(os.path.isdir(foreign))


if __name__ == "__main__":
    test_runs.main()
