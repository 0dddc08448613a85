"""How runs of several ranks end when one goes wrong, and what the chapters' examples print.

  test_failures.py --bin build/release/bin

Needs mpi_scenarios and the examples there, and mpiexec on PATH (77: skipped without it).
"""
import re
import subprocess
import sys
import unittest

import test_ranks
from test_ranks import CHAPTERS, ROOT, SECONDS, RankTest, environment


class Failures(RankTest):
    """Every way to go wrong ends in seconds, with an exit code other than 0, and is explained."""

    def scenario(self, name, *flags):
        code, output = self.finish(self.start(4, "mpi_scenarios", "--scenario", name, *flags))
        if name != "_exit":  # of which mpiexec makes what it will; ./book run looks for `done`
            self.assertNotEqual(code, 0, output)
        self.assertFalse((self.run_dir / "done").exists())
        return output, self.why()

    def test_without_a_fault(self):
        code, output = self.finish(self.start(4, "mpi_scenarios", "--scenario", "none"))
        self.assertEqual((code, output), (0, "finished\n"))
        done = subprocess.run([sys.executable, str(ROOT / "book"), "why", str(self.run_dir)],
                              stdout=subprocess.PIPE, text=True, check=True)
        self.assertIn("nothing is wrong", done.stdout)

    def test_kill_9(self):
        _, why = self.scenario("kill")
        self.assertRegex(why, r"rank 2 .*killed or crashed during step 7")
        self.assertIn("rank 0  waits in all_reduce #8 of dp (1000 f32)", why)

    def test_segmentation_fault(self):
        _, why = self.scenario("segv")
        self.assertRegex(why, r"rank 2 .*killed or crashed during step 7")

    def test_exception(self):
        output, why = self.scenario("throw")
        self.assertEqual(output.count("error: "), 1, output)
        self.assertIn("error: rank 2: the loss of rank 2 is beyond words", output)
        self.assertRegex(why, r"rank 2 .*failed \(step 7\): the loss of rank 2 is beyond words")

    def test_early_exit_with_code_0(self):
        for name in ("exit", "_exit"):
            with self.subTest(name):
                _, why = self.scenario(name)
                self.assertRegex(why.splitlines()[0], r"rank 2 .*(killed|crashed|left|exit\(\))")

    def test_early_return_from_main(self):
        output, why = self.scenario("leave")
        self.assertIn("rank 2 has left the run", output)
        self.assertIn("rank 2", why.splitlines()[0])
        self.assertIn("all_reduce #8 of dp", why.splitlines()[0])

    def test_ranks_disagree(self):
        # About everything else that must agree: tests/ranks/failures.cpp.
        output, why = self.scenario("kind")
        for word in ("all_gather #8", "all_reduce #8"):
            self.assertIn(word, output)
            self.assertIn(word, why)

    def test_deadlock(self):
        output, why = self.scenario("deadlock", "--comm_timeout", "1")
        self.assertEqual(output.count("error: "), 1, output)
        for rank in (0, 1, 3):
            self.assertIn(f"rank {rank} waits in all_reduce #8 of dp (f32, 1000 elements)", output)
        self.assertIn("rank 2 waits in recv #1 of dp from rank 3 (f32, 3 elements)", output)
        self.assertIn("deadlock", why)

    def test_stuck_outside_communication(self):
        output, why = self.scenario("stuck", "--comm_timeout", "1")
        self.assertIn("rank 2 is outside communication", output)
        self.assertIn("rank 2", why.splitlines()[0])

    def test_flags_that_one_rank_minds(self):
        output, _ = self.scenario("usage")
        self.assertEqual(output.count("error: "), 1, output)

    def test_flags_that_all_ranks_mind(self):
        code, output = self.finish(self.start(4, "mpi_scenarios", "--scenario",
                                              "usage_everywhere"))
        self.assertEqual((code, output), (2, "error: flags that every rank minds\n"))

    def test_ranks_that_believe_to_be_alone(self):
        for variable in ("OMPI_COMM_WORLD", "SLURM"):
            names = {"SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")}.get(
                variable, (f"{variable}_SIZE", f"{variable}_RANK"))
            outputs = []
            for rank in range(4):
                env = environment(**{names[0]: "4", names[1]: str(rank)})
                done = subprocess.run([str(test_ranks.BIN / "mpi_scenarios")], env=env,
                                      timeout=SECONDS, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, check=False)
                self.assertEqual(done.returncode, 2, done.stdout)
                outputs.append(done.stdout)
            self.assertIn(f"{names[0]}=4, but this program's MPI library sees a world of 1",
                          outputs[0])
            self.assertEqual(outputs[1:], ["", "", ""])


def run_example(name, ranks, *flags):
    """What an example of whichever chapter has it comes to, on so many ranks."""
    chapter = next(c for c in CHAPTERS if name in c.examples())
    program = str(test_ranks.BIN / f"{chapter.name}_{name}")
    return subprocess.run(["mpiexec", "-n", str(ranks), program, *flags], env=environment(),
                          timeout=60, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          check=False)


class Examples(unittest.TestCase):
    """The chapters' examples print what they should."""

    def test_collectives(self):
        chapter = next(c for c in CHAPTERS if "collectives" in c.examples())
        program = str(test_ranks.BIN / f"{chapter.name}_collectives")
        output = subprocess.run(["mpiexec", "-n", "3", program],
                                env=environment(), timeout=60, stdout=subprocess.PIPE, text=True,
                                check=True).stdout
        blocks = {}
        for block in output.split("\n\n")[1:]:
            title, *lines = block.splitlines()
            blocks[title.split(" (")[0]] = [line.split(" -> ")[-1] for line in lines]
        fives = ["[1, 1, 1, 1, 1]", "[2, 2, 2, 2, 2]", "[3, 3, 3, 3, 3]"]
        everyone = "[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3]"
        nothing = "[" + ", ".join(["0"] * 15) + "]"
        self.assertEqual(blocks["broadcast from rank 0"], ["[1, 2, 3, 4, 5]"] * 3)
        self.assertEqual(blocks["reduce to rank 0"], ["[6, 6, 6, 6, 6]", *fives[1:]])
        self.assertEqual(blocks["all_reduce"], ["[6, 6, 6, 6, 6]"] * 3)
        self.assertEqual(output.count("[6, 6, 6, 6, 6]"), 7)  # the ring's, too
        self.assertEqual(blocks["gather to rank 0"], [everyone, nothing, nothing])
        self.assertEqual(blocks["all_gather"], [everyone] * 3)
        self.assertEqual(blocks["scatter from rank 0"], fives)
        self.assertEqual(blocks["reduce_scatter"], ["[6, 12]", "[14, 56]", "[36, 288]"])
        barrier = next(lines for title, lines in blocks.items() if title.startswith("barrier"))
        for seconds in barrier:
            self.assertAlmostEqual(float(seconds.strip("[]")), 2, delta=0.5)

    def test_tensor_2d(self):
        def run(ranks, *flags):
            return run_example("tensor_2d", ranks, *flags)

        # Of a small model that the squares divide; the ledger's bytes are the formula's.
        done = run(4, "--hidden_size", "64", "--ffn_hidden_size", "192", "--seq_len", "65536")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("2 x 2 ranks: an MLP's output and gradients are"))
        rows = [line.replace(" x ", "x").replace("> ", "").split()
                for line in done.stdout.splitlines() if re.match(r" *\d+  \d x \d ", line)]
        self.assertEqual([row[:2] for row in rows], 2 * [["4", "2x2"], ["16", "4x4"],
                                                         ["64", "8x8"]])
        for row in rows[:3]:
            self.assertEqual(len(row), 8)
            self.assertEqual(row[2::2], row[3::2], row)
        for row in rows[3:]:
            side = int(row[1][0])
            for found, more_than in (row[2:4], row[4:6]):
                self.assertEqual(found == "never", more_than == "never", row)
                if found != "never":
                    self.assertIn(int(found) - int(more_than), range(1, side + 1), row)
        refused = run(3)
        self.assertEqual((refused.returncode, refused.stdout), (2, ""))
        self.assertIn("error: tp_size=3 must be a square; try 4 or 9", refused.stderr)

    def test_beside(self):
        done = run_example("beside", 2, "--rounds", "7", "--width", "192", "--mib", "8")
        self.assertEqual(done.returncode, 0, done.stderr)
        parts = done.stdout.split("an emulated link of ")
        for part in parts:
            found = {what: [float(number) for number in numbers] for what, *numbers in
                     re.findall(r"^(\w.*?) {2,}([\d.]+) +([\d.]+) to ([\d.]+)$", part, re.M)}
            self.assertEqual(len(found), 5, part)
            for what, (median, lower, upper) in found.items():
                self.assertTrue(0 < lower <= median <= upper, what)
        # Of two ranks each sends as many bytes as it has, and the emulated link takes its time.
        asked_ms = 1e3 * 8 * 2**20 / (1e9 * float(parts[1].split()[0]))
        self.assertGreater(found["ms of the all-reduce alone"][1], 0.95 * asked_ms)
        for ranks, flags, part in ((2, ("--rounds", "0"), "rounds=0 must be at least 1; try --rounds"),
                                   (1, (), "needs two ranks; try --ranks 2")):
            refused = run_example("beside", ranks, *flags)
            self.assertEqual((refused.returncode, refused.stdout), (2, ""))
            self.assertEqual(refused.stderr.count("error: "), 1)
            self.assertIn(part, refused.stderr)

    def test_kv_cache(self):
        chapter = next(c for c in CHAPTERS if "kv_cache" in c.examples())

        def run(*flags):
            return subprocess.run([str(test_ranks.BIN / f"{chapter.name}_kv_cache"), *flags],
                                  env=environment(), timeout=60, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, check=False)

        def numbers(*flags):
            done = run(*flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return {name: int(value) for name, value in
                    re.findall(r"^ *(\S.*?) {2,}(\d+) [a-z ]+$", done.stdout, re.M)}

        shape = ("--num_layers", "2", "--seq_len", "32", "--sample_tokens", "12")
        mla = ("--attention_kind", "mla", "--kv_lora_rank", "40", "--qk_rope_head_dim", "6")
        for flags, cached in (((), 384), (("--num_kv_heads", "2"), 128), (mla, 46)):
            for counted, more in (("cache in a dry run", ()),
                                  ("cache while sampling", ("--while_sampling",))):
                found = numbers(*shape, *flags, *more)
                self.assertEqual(found["cache by formula"], 2 * 32 * cached * 4)
                self.assertEqual(found[counted], found["cache by formula"], flags)
        # Of 6 heads of 32 channels a rank has 3, and all of a latent; cp divides positions.
        for ranks, flags, cached in (("--tp_size", (), 192), ("--tp_size", mla, 46),
                                     ("--cp_size", (), 192), ("--cp_size", mla, 23)):
            found = numbers(*shape, *flags, ranks, "2")
            for counted in ("cache by formula", "cache in a dry run"):
                self.assertEqual(found[counted], 2 * 32 * cached * 4, (ranks, flags))
        # Of queries, latents and output; to the latents and back, or from them; of 122 pairs.
        found = numbers(*shape, *mla, "--new_tokens", "4")
        both, pairs = 2 * 4 * 192 * (6 * 38 + 46 + 6 * 32), 4 * 32 - 6
        self.assertEqual(found["by the cache"], both + 2 * 4 * 6 * 40 * 64 + 4 * pairs * 6 * 46)
        self.assertEqual(found["by keys and values again"],
                         both + 2 * 32 * 6 * 40 * 64 + 4 * pairs * 6 * 38)
        most = numbers(*shape, *mla)["the first is less up to"]
        for new, less in ((most, True), (most + 1, False)):
            found = numbers(*shape, *mla, "--new_tokens", str(new))
            self.assertEqual(found["by the cache"] <= found["by keys and values again"], less)
        for flags in (("--new_tokens", "33"), ("--while_sampling", "--tp_size", "2"),
                      ("--pp_size", "2")):
            refused = run(*shape, *flags)
            self.assertEqual(refused.returncode, 2, refused.stdout)
            self.assertIn(f"{flags[0 if len(flags) == 2 else 1].strip('-')}=", refused.stderr)

    def test_ring_self_attention(self):
        def run(ranks, *flags):
            return run_example("ring_self_attention", ranks, *flags)

        done = run(3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("3 ranks: outputs and gradients are those of"))
        rows = re.findall(r"^ +(\d+)  (ring [\w-]+) +(\S.*)$", done.stdout, re.M)
        kept = {}
        for ranks, way, cells in rows:
            numbers = cells.split()
            self.assertEqual(numbers[0:6:2], numbers[1:6:2], (ranks, way))  # the formulas'
            kept[way, int(ranks)] = float(numbers[0])
        self.assertEqual(len(rows), 8)
        for ranks in (2, 4, 8):  # scores of s²/cp, and nothing that does not shrink
            for way in ("ring self-attention", "ring attention"):
                self.assertAlmostEqual(kept[way, ranks], 2 * kept[way, 2 * ranks], delta=0.2)
        doubled = run(1, "--seq_len", "16384")
        found = re.search(r"^ +2  ring self-attention +(\S+)", doubled.stdout, re.M)
        self.assertGreater(float(found[1]), 3.8 * kept["ring self-attention", 2])
        refused = run(2, "--seq_len", "33")
        self.assertEqual((refused.returncode, refused.stdout), (2, ""))
        self.assertIn("error: seq_len=33 must be a multiple of 32", refused.stderr)


if __name__ == "__main__":
    sys.exit(test_ranks.main())
