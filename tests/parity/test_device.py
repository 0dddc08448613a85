"""The chapter's program on an emulated GPU: what it writes, resumes, prints and refuses.

  test_device.py --binary build/release/bin/ch01_single_gpu_emulated
                 --plain build/release/bin/ch01_single_gpu [unittest arguments]

The plain program has CUDA where the build found nvcc, and sees no GPU here. Only the standard
library is needed.
"""

import argparse
import array
import json
import os
import re
import struct
import sys
import unittest
from unittest import mock

import binary
import test_runs
from test_runs import Runs, read, read_json, read_metrics

PLAIN = None  # set by main()

GPU = {"device": "cuda", "dtype": "f64", "eval_interval": 0, "trace_steps": 1}


def setUpModule():
    test_runs.setUpModule()


def tensors(run_dir, step):
    """{name: values} of a checkpoint in f64."""
    path = os.path.join(run_dir, "checkpoints", f"step-{step:08}", "state.safetensors")
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = array.array({"F64": "d", "I64": "q"}[entry["dtype"]], data[begin:end])
    return found


class Records(Runs):
    def test_they_name_the_device_and_the_gpu(self):
        record = read_json(self.succeed(dict(GPU, steps=1)), "run.json")
        self.assertEqual(record["config"]["device"], "cuda")
        self.assertRegex(record["machine"]["gpu"],
                         r"\Aemulated device, compute capability 9\.0, driver for CUDA \d+\.\d\Z")
        self.assertRegex(record["build"]["matmul"], r"\AcuBLASLt \d+\.\d+\.\d+\Z")
        record = read_json(self.succeed(dict(GPU, steps=1, device="cpu")), "run.json")
        self.assertEqual(record["config"]["device"], "cpu")
        self.assertNotIn("gpu", record["machine"])
        self.assertNotIn("cuBLASLt", record["build"]["matmul"])

    def test_the_report_is_that_of_the_cpu_but_for_speed_and_workspace(self):
        reports = []
        for device in ("cuda", "cpu"):
            run_dir = self.succeed(dict(GPU, eval_interval=2, device=device, sample_tokens=20))
            rows = read(run_dir, "report.md").splitlines()
            self.assertTrue(any(row.startswith("| speed |") for row in rows))
            reports.append([row for row in rows
                            if not re.match(r"\| (speed|MFU|HFU|peak memory|reserved memory)", row)])
        self.assertEqual(*reports)
        for what in ("weights", "gradients", "optimizer states", "saved activations"):
            self.assertRegex("\n".join(reports[0]), rf"\| {what} \| .*\(1\.0000\) \|")

    def test_products_that_went_another_way_stand_in_the_report(self):
        flags = dict(GPU, steps=1)
        usual = self.succeed(flags)
        with mock.patch.dict(os.environ, {"USP_EMULATED_CUBLAS": "none"}):
            without = self.succeed(flags)
        self.assertNotIn("cuBLASLt had no kernel", read(usual, "report.md"))
        self.assertRegex(read(without, "report.md"),
                         r"\| device \| cuBLASLt had no kernel for some products: \d+ by aligned "
                         r"copies, [1-9]\d* by a kernel of our own")
        self.assertEqual(read_metrics(usual)[0]["tokens"], read_metrics(without)[0]["tokens"])

    def test_a_gpu_is_asked_for_no_memory_after_the_second_step(self):
        for more in ({}, {"dtype": "bf16", "attention": "naive"}, {"recompute": "full"}):
            with self.subTest(more=more):
                records = read_metrics(self.succeed(dict(GPU, steps=6, **more)))
                asked = [record["system_allocations"] for record in records]
                self.assertEqual(asked[1:], 5 * [asked[1]])

    def test_the_host_waits_twice_a_step_for_the_loss_and_the_norm(self):
        records = read_metrics(self.succeed(dict(GPU, steps=4, trace_steps=0)))
        waits = [record["host_waits"] for record in records]
        self.assertEqual([after - before for before, after in zip(waits, waits[1:])], [2, 2, 2])
        launches = [record["launches"] for record in records]
        each = {after - before for before, after in zip(launches, launches[1:])}
        self.assertEqual(len(each), 1)
        self.assertGreater(min(each), 50)
        self.assertNotIn("host_waits", read_metrics(self.succeed(dict(GPU, device="cpu")))[0])

    def test_the_trace_has_the_device_s_times_in_a_lane_of_its_own(self):
        run_dir = self.succeed(dict(GPU, steps=1))
        events = read_json(run_dir, "trace.json")["traceEvents"]
        queued, spans = ([event for event in events if event["ph"] == "X" and event["cat"] == cat]
                         for cat in ("op", "device op"))
        self.assertGreater(len(spans), 50)
        self.assertEqual([(span["name"], span["args"]["step"]) for span in spans],
                         [(span["name"], span["args"]["step"]) for span in queued])
        self.assertEqual({span["tid"] for span in queued}, {0})
        [lane] = {span["tid"] for span in spans}
        [name] = [event["args"]["name"] for event in events
                  if event["name"] == "thread_name" and event["tid"] == lane]
        self.assertEqual(name, "device")
        for before, after in zip(spans, spans[1:]):  # one after the other, as the queue runs them
            self.assertGreater(before["dur"], 0)
            self.assertGreaterEqual(after["ts"], before["ts"] + before["dur"] - 0.002)
            self.assertGreater(after["args"]["queued"], before["args"]["queued"])


class Resume(Runs):
    def test_a_run_goes_on_where_another_device_left_it(self):
        flags = dict(GPU, steps=6, checkpoint_interval=3, warmup_steps=0, min_lr_ratio=1)
        whole = {device: self.succeed(dict(flags, device=device)) for device in ("cpu", "cuda")}
        for before, after in (("cpu", "cuda"), ("cuda", "cpu")):
            with self.subTest(before=before):
                run_dir = self.succeed(dict(flags, device=before, steps=3))
                kept = tensors(run_dir, 3)
                self.assertEqual(kept, tensors(whole[before], 3))
                self.succeed(dict(flags, device=after, run_dir=run_dir, resume=True))
                self.assertEqual(tensors(run_dir, 3), kept)
                record = read_json(run_dir, "run.json")
                [resumed] = record["resumed"]
                self.assertEqual("gpu" in record["machine"], before == "cuda")
                self.assertEqual("gpu" in resumed["machine"], after == "cuda")
                losses = [[record["loss"] for record in read_metrics(run)]
                          for run in (run_dir, whole[before], whole[after])]
                self.assertEqual(losses[0][:3], losses[1][:3])
                for loss, expected in zip(losses[0], losses[2]):
                    self.assertLessEqual(abs(loss - expected), 1e-12 * expected)
                found, expected = tensors(run_dir, 6), tensors(whole[after], 6)
                self.assertEqual(sorted(found), sorted(expected))
                for name, values in expected.items():
                    scale = max(map(abs, values))
                    for x, y in zip(found[name], values):
                        self.assertTrue(abs(x - y) <= 1e-9 * scale, name)


class Attention(Runs):
    """By what attention a GPU computes where no flag says it."""

    # A shape for which naive attention is estimated to be faster: wide heads, many scores.
    WIDE = dict(GPU, dtype="bf16", hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=4,
                ffn_hidden_size=32, seq_len=512, micro_batch_size=1, steps=1, trace_steps=0)

    def chosen(self, changes=(), available=None):
        """(what the run's record says, the line that says why or "")"""
        limit = {} if available is None else {"USP_AVAILABLE_MEMORY": str(available)}
        with mock.patch.dict(os.environ, limit):
            done = self.run_chapter(dict(self.WIDE, **dict(changes)))
        self.assertEqual((done.code, done.err), (0, ""))
        lines = [line for line in done.out.splitlines() if line.startswith("On this GPU")]
        self.assertLessEqual(len(lines), 1)
        return read_json(done.run_dir, "run.json")["config"]["attention"], "".join(lines)

    def needed(self, attention):
        """The bytes that a run is refused for where there is next to nothing."""
        with mock.patch.dict(os.environ, {"USP_AVAILABLE_MEMORY": "1"}):
            done = self.run_chapter(dict(self.WIDE, attention=attention))
        return float(re.search(r"needs ([\d.]+) MiB", done.err)[1]) * 2**20

    def test_it_is_the_faster_one_at_that_shape_and_one_line_says_so(self):
        attention, line = self.chosen()
        self.assertEqual(attention, "naive")
        self.assertRegex(line, r"\AOn this GPU attention=naive: estimated to be 1\.\d times as fast as "
                               r"blockwise at this shape; --attention takes either\.\Z")
        attention, line = self.chosen({"seq_len": 32})
        self.assertEqual(attention, "blockwise")
        self.assertRegex(line, r"attention=blockwise: estimated to be \d\.\d times as fast as naive")

    def test_it_is_blockwise_where_the_memory_would_not_do(self):
        naive, blockwise = self.needed("naive"), self.needed("blockwise")
        self.assertGreater(naive, blockwise + 2**20)
        attention, line = self.chosen(available=int((naive + blockwise) / 2))
        self.assertEqual(attention, "blockwise")
        self.assertRegex(line, r"attention=blockwise: naive is estimated to be 1\.\d times as fast at "
                               r"this shape, but needs [\d.]+ MiB of memory, and [\d.]+ MiB are available")
        self.assertEqual(self.chosen(available=int(naive + 2**17))[0], "naive")

    def test_nothing_is_chosen_on_a_cpu_nor_where_a_flag_or_a_checkpoint_says_it(self):
        self.assertEqual(self.chosen({"device": "cpu"}), ("blockwise", ""))
        self.assertEqual(self.chosen({"attention": "blockwise"}), ("blockwise", ""))
        run_dir = self.succeed(dict(self.WIDE, device="cpu", checkpoint_interval=1))
        resumed = {"run_dir": run_dir, "resume": True, "steps": 2}
        self.assertEqual(self.chosen(resumed), ("blockwise", ""))


class CommandLine(Runs):
    def test_an_estimate_needs_no_gpu(self):
        found = []
        for executable in (test_runs.BINARY, PLAIN):
            with mock.patch.object(test_runs, "BINARY", executable):
                done = self.run_chapter({"device": "cuda", "estimate": True})
            self.assertEqual((done.code, done.err), (0, ""))
            found.append(done.out)
        self.assertIn("a step without data", found[0])
        self.assertIn("A run takes naive attention where it is estimated to be faster", found[0])
        self.assertEqual(*found)

    def test_a_machine_without_a_gpu_says_so(self):
        with mock.patch.object(test_runs, "BINARY", PLAIN):
            done = self.run_chapter({"device": "cuda"})
        self.assert_one_error(done, {2})
        self.assertRegex(done.err, r"device=cuda: .*--device cpu")
        self.assertEqual(done.out, "")
        self.assertFalse(os.path.exists(done.run_dir))

    def test_a_gpu_that_cannot_be_used_is_one_line_that_says_why(self):
        for seen, why in (({"DRIVER": 0}, "there is no NVIDIA driver here"),
                          ({"DRIVER": 12040}, r"the driver knows CUDA up to 12\.4, .* newer driver"),
                          ({"GPUS": 0}, "the driver shows no GPU"),
                          ({"CAPABILITY": 70}, r"no kernels for this GPU, .* capability 7\.0; .*"
                                               r"-DCMAKE_CUDA_ARCHITECTURES=70")):
            seen = {f"USP_EMULATED_{name}": str(value) for name, value in seen.items()}
            with self.subTest(seen=seen), mock.patch.dict(os.environ, seen):
                done = self.run_chapter(GPU)
                self.assert_one_error(done, {2})
                self.assertRegex(done.err, rf"device=cuda: .*{why}.*--device cpu")
                self.assertEqual(done.out, "")
                self.assertFalse(os.path.exists(done.run_dir))

    def test_a_gpu_without_bf16_says_so_and_trains_in_f32(self):
        with mock.patch.dict(os.environ, {"USP_EMULATED_CAPABILITY": "75"}):
            done = self.run_chapter(dict(GPU, dtype="bf16"))
            self.assert_one_error(done, {2})
            self.assertRegex(done.err, r"dtype=bf16: .* capability 7\.5, .* 8\.0 or later; "
                                       r"try --dtype f32, or --device cpu")
            self.assertFalse(os.path.exists(done.run_dir))
            self.assertEqual(self.run_chapter(dict(GPU, dtype="f32")).code, 0)

    def test_a_model_that_the_gpu_s_memory_does_not_hold_does_not_start(self):
        done = self.run_chapter(dict(GPU, micro_batch_size=4096, data="text.txt"))  # it has 1 GiB
        self.assert_one_error(done, {2})
        # Of the GiB that the GPU has, half is left to what comes besides tensors.
        self.assertRegex(done.err, r"needs .* GiB of memory here, and 51[012]\.\d MiB are available; "
                                   r"try --micro_batch_size \d+")
        self.assertFalse(os.path.exists(done.run_dir))


def main():
    global PLAIN
    test_runs.BINARY, rest = binary.parse(__doc__)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--plain", help="beside the other one, without _emulated, if not given")
    args, rest = parser.parse_known_args(rest)
    PLAIN = os.path.abspath(args.plain or test_runs.BINARY.removesuffix("_emulated"))
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
