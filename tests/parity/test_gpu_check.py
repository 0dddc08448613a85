"""./book gpu-check on the emulated GPU: all that it would do on a GPU but for what has no meaning here.

  test_gpu_check.py --bin build/release/bin

Needs the programs of the target gpu_emulated, and mpiexec on PATH (77: skipped without it). The
programs that are tests by themselves, and the long run on a text, are left to the tests of their own.
"""
import argparse
import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import test_ranks  # noqa: E402
from tools import cli  # noqa: E402
from tools.gpu import gpu_check, gpu_ranks  # noqa: E402
from tools.gpu.gpu_part import Check  # noqa: E402
from tools.lab import lab  # noqa: E402

BIN = ROOT / "build" / "release" / "bin"
LEFT_OUT = ("tests", "learning")


class Emulated(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="test_gpu_check_")
        cls.addClassCleanup(folder.cleanup)
        place = gpu_check.checkout_place(BIN.parent, cli.starts_ranks())
        check = Check(place, Path(folder.name), True, [], {"cuBLASLt": None, "NCCL": None})
        parts = [part for part in gpu_check.PARTS if part.name not in LEFT_OUT]
        cls.passed = gpu_check.run_parts(check, parts)
        cls.parts = {part["name"]: part for part in
                     json.loads((check.folder / "report.json").read_text())["parts"]}

    def asked(self, name):
        """{what is asked: what was found}"""
        return {row["what"]: row["found"] for rows in self.parts[name]["figures"].values()
                for row in rows if "asked" in row}

    def test_every_part_runs_that_needs_no_gpu(self):
        self.assertTrue(self.passed, self.parts)
        states = {part.name: "skipped" if part.needs_gpu else "passed"
                  for part in gpu_check.PARTS if part.name not in LEFT_OUT}
        self.assertEqual({name: part["state"] for name, part in self.parts.items()}, states)

    def test_every_chapter_trains_on_two_four_and_eight_ranks(self):
        rows, = self.parts["ranks"]["figures"].values()
        self.assertEqual([(row["chapter"], row["layout"], row["ranks"]) for row in rows],
                         gpu_ranks.plan(gpu_ranks.layouts_of(ROOT), gpu_ranks.RANKS))
        self.assertEqual({(row["steps"], row["bytes sent"]) for row in rows},
                         {(gpu_ranks.STEPS, "the same")})

    def test_nothing_is_said_of_time(self):
        for name in ("products", "memory", "ladder", "all-reduce", "alone"):
            self.assertEqual(set(self.asked(name).values()), {"not measured"}, name)
        found = self.asked("steps")
        self.assertEqual(sorted(found.values()), ["2", "not measured", "not measured"], found)

    def test_fused_kernels_launch_less_and_attend_on_tensor_cores(self):
        (title, (reference, fused)), (_, (compiled,)) = self.parts["fused"]["figures"].items()
        self.assertTrue(title.startswith(list(gpu_ranks.layouts_of(ROOT))[-1]), title)
        self.assertEqual([(row["kernels"], row["attention on tensor cores"]) for row in (reference, fused)],
                         [("reference", "no"), ("fused", "yes")])
        self.assertGreater(fused["launches a step"], 50)
        self.assertLess(fused["launches a step"], reference["launches a step"])
        self.assertEqual({row[name] for row in (reference, fused) for name in ("tokens/s", "idle share")},
                         {"not measured"})
        self.assertIn("not measured", compiled.values())  # beside PyTorch's

    def test_every_rung_of_the_product_agrees_with_the_library(self):
        figures = self.parts["ladder"]["figures"]
        rows = figures[""]
        self.assertEqual([row["rung"] for row in rows if row["rung"] != "cuBLAS"], list(lab.rungs("ch09.matmul")))
        self.assertEqual([row["rung"] for row in rows].count("cuBLAS"), 2)
        # And each rung of the chapter runs at sizes with tails, where it is compared, too.
        tails = {row["rung"].split(",")[0] for row in figures["tails"]}
        for name in lab.LABS:
            if name != "ch09.primer":  # whose rungs compute three things
                self.assertLessEqual(set(lab.rungs(name)), tails, name)

    def test_products_are_those_of_the_model_and_kernels_are_many(self):
        rows = next(iter(self.parts["products"]["figures"].values()))
        names = {(row["product"], row["m"], row["n"], row["k"]) for row in rows}
        # The output layer of the preset tiny: 16 tokens, 192 channels, 256 words.
        for product in ((16, 256, 192), (16, 192, 256), (256, 192, 16)):
            self.assertIn(("head", *product), names)
        kernels = [row["kernel"] for row in next(iter(self.parts["memory"]["figures"].values()))]
        self.assertEqual(len(kernels), len(set(kernels)))
        self.assertLessEqual({"copy", "adamw", "fused adamw", "cross_entropy_backward", "unpermute_backward"},
                             set(kernels))


def main():
    global BIN  # pylint: disable=global-statement
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bin", type=Path, default=BIN)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin
    return test_ranks.run_tests(rest)


if __name__ == "__main__":
    sys.exit(main())
