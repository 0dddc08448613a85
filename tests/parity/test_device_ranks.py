"""Ranks under mpiexec whose tensors lie on emulated GPUs, next to the same on CPUs.

  test_device_ranks.py --bin build/release/bin [unittest arguments]

Needs the newest chapter there, and the same with the suffix _emulated; and mpiexec on PATH (77:
skipped without it).
"""
import json
import re
import shutil
import sys
import unittest
from statistics import fmean

import test_ranks
from test_ranks import RankTest, metrics, tiny
from tools import trace as traces

FLAGS = ("--dtype", "f64", "--micro_batch_size", "2", "--warmup_steps", "0",
         "--min_lr_ratio", "1")
LAYOUTS = (
    ("--grad_acc_steps", "2", "--bucket_mb", "0.03"),
    ("--zero_stage", "3", "--grad_acc_steps", "2"),
    ("--tp_size", "2", "--sequence_parallel"),
    ("--pp_size", "2", "--grad_acc_steps", "4"),
)


class Devices(RankTest):
    def run_on(self, device, ranks, *flags, steps=3, traced=("--trace_steps", "0"), resume=False):
        """The run's folder: a new one, unless an earlier run goes on."""
        if not resume:
            self.run_dir = self.folder / f"{device} {len(list(self.folder.iterdir()))}"
        program = test_ranks.CHAPTER + ("_emulated" if device == "cuda" else "")
        flags = (*FLAGS, *flags, "--device", device, "--steps", str(steps))
        code, output = self.finish(
            self.start(ranks, program, *tiny(flags), *traced, *flags,
                       *(["--resume"] if resume else []),
                       env=test_ranks.environment(USP_MATMUL_SECONDS="0")), 120)
        self.assertEqual(code, 0, output)
        return self.run_dir

    def test_they_train_alike_and_send_the_same(self):
        for flags in LAYOUTS:
            with self.subTest(flags=flags):
                cuda, cpu = (self.run_on(device, 2, *flags) for device in ("cuda", "cpu"))
                for step, reference in zip(metrics(cuda), metrics(cpu), strict=True):
                    for key in ("loss", "grad_norm"):
                        self.assertLessEqual(abs(step[key] - reference[key]),
                                             1e-10 * abs(reference[key]), key)
                    self.assertEqual(step["comm_bytes"], reference["comm_bytes"])
                sent, expected = (json.loads((folder / "ledger.json").read_text())
                                  for folder in (cuda, cpu))
                self.assertEqual(sorted(sent), sorted(expected))
                for operation, entry in expected.items():
                    for what in ("calls", "payload_bytes", "wire_bytes", "header_bytes"):
                        self.assertEqual(sent[operation][what], entry[what], (operation, what))

    def test_the_report_s_memory_is_the_formulas(self):
        for flags in LAYOUTS[:2]:
            with self.subTest(flags=flags):
                folder = self.run_on("cuda", 2, *flags, traced=("--trace_steps", "1"))
                report = (folder / "report.md").read_text()
                for what in ("weights", "gradients", "optimizer states", "saved activations"):
                    self.assertRegex(report, rf"\| {what} \| .*\(1\.0000\) \|")
                self.assertNotIn("scratch of reductions", report)
                trace = traces.load(folder / "trace.json")
                shares = list(traces.steps(trace).values())[0]
                row = re.search(r"\| communication not hidden \| ([\d.]+) of a traced step's "
                                r"([\d.]+) ms; waiting for a late rank: ([\d.]+) ms", report)
                expected = (fmean(share.exposed for share in shares),
                            shares[0].end - shares[0].begin,
                            fmean(share.skew for share in shares))
                for printed, found in zip(row.groups(), expected):
                    self.assertLessEqual(abs(float(printed) - found / 1000), 0.0051, row)
                for rank, share in zip(trace.ranks, shares):
                    ops = [[(span.name, span.step) for span in spans if span.category == "op"]
                           for spans in (rank.spans, rank.device)]
                    self.assertCountEqual(*ops)
                    self.assertEqual(len(rank.device_waits), len(rank.waits))
                    self.assertTrue(rank.copies)
                    self.assertGreater(share.compute, 0)
                    self.assertLessEqual(share.compute + share.exposed + share.skew,
                                         share.end - share.begin + 0.1)

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

    def test_nccl_s_ranks_want_a_gpu_each(self):
        for device, words, more in (("cuda", "ranks 0 and 1 share a GPU", ()),
                                    ("cpu", "comm=nccl is for", ()),
                                    ("cuda", "slows messages", ("--link", "node=9000,0.01"))):
            with self.subTest(words):
                flags = ("--comm", "nccl", "--device", device, *more)
                code, output = self.finish(self.start(2, test_ranks.CHAPTER + "_emulated",
                                                      *tiny(flags), *flags))
                self.assertEqual(code, 2, output)
                self.assertRegex(output, rf"\Aerror: .*{words}.*--comm mpi.*\n\Z")

    def test_what_ranks_refuse_is_one_line(self):
        flags = ("--micro_batch_size", "2", "--dp_size", "3", "--device", "cuda")
        self.run_dir = self.folder / "refused"
        code, output = self.finish(self.start(2, test_ranks.CHAPTER + "_emulated", *tiny(flags),
                                              *flags))
        self.assertEqual(code, 2, output)
        self.assertEqual(len(re.findall("^error: ", output, re.M)), 1, output)


def main():
    rest = test_ranks.take_arguments()
    if shutil.which("mpiexec") is None:
        print("no mpiexec on PATH")
        return 77
    done = unittest.main(argv=[sys.argv[0], *rest], exit=False)
    return 0 if done.result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
