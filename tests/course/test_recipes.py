"""Recipes of published runs, and the commands that take them.

    python3 tests/course/test_recipes.py        needs no build
"""
import contextlib
import io
import json
import re
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch07_5d.figures import published, speed  # noqa: E402
from tools import chapters, cli  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.bench import bench  # noqa: E402
from tools.run import launch, program_help, recipes  # noqa: E402

CHAPTER = next(chapter for chapter in chapters.find_chapters() if recipes.names(chapter))


class Published(unittest.TestCase):
    """The table of dry runs beside what the sources report."""

    def test_what_a_dry_run_says_is_what_the_source_reports(self):
        record = json.loads((CHAPTER.folder / "figures" / "estimates.json").read_text(encoding="utf-8"))["published"]
        self.assertEqual(list(record), list(published.published()))
        compared = 0
        for name, recipe in published.published().items():
            for fact in recipe.reported:
                here = published.here(fact["what"], record[name])
                if here is None:
                    continue
                # As many digits as the source has: 405 billion, 540.35 billion, 16 million, 3,360.
                numbers = [float(re.match(r"[\d,.]+", text)[0].replace(",", "")) for text in (fact["value"], here)]
                self.assertLess(abs(numbers[1] - numbers[0]), 1, f"{name}: {fact['what']}")
                compared += 1
        self.assertGreater(compared, 10)


class Files(unittest.TestCase):
    def test_every_published_number_has_the_address_that_it_is_from(self):
        for name in recipes.names(CHAPTER):
            recipe = recipes.load(CHAPTER, name)
            self.assertTrue(recipe.title and recipe.note, name)
            for row in recipe.reported:
                self.assertRegex(row["source"], r"^https://\S+$", f"{name}: {row['what']}")
                self.assertRegex(row["value"], r"\d", f"{name}: {row['what']}")
            self.assertTrue(recipe.reported or not recipe.source, name)

    def test_ranks_and_batch_are_those_that_the_source_reports(self):
        for name in recipes.names(CHAPTER):
            recipe = recipes.load(CHAPTER, name)
            size = {key: recipe.flags.get(f"{key}_size", 1) for key in ("dp", "tp", "cp", "pp")}
            ranks = size["dp"] * size["tp"] * size["cp"] * size["pp"]
            batch = size["dp"] * recipe.flags["micro_batch_size"] * recipe.flags.get("grad_acc_steps", 1)
            tokens = batch * recipe.flags.get("seq_len", 256)
            said = {row["what"]: row["value"].replace(",", "") for row in recipe.reported}
            first = {what: float(re.search(r"[\d.]+", value)[0]) for what, value in said.items()}
            for what, found in (("GPUs", ranks), ("chips", ranks), ("sequences in a batch", batch),
                                ("tokens in a batch", tokens // 2**20)):
                if what in first:
                    self.assertEqual(found, first[what], f"{name}: {what}")


class Expansion(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_recipes_")
        self.addCleanup(folder.cleanup)
        (Path(folder.name) / "recipes").mkdir()
        self.chapter = replace(CHAPTER, folder=Path(folder.name))

    def write(self, name, **fields):
        path = self.chapter.folder / "recipes" / f"{name}.json"
        path.write_text(json.dumps(fields))
        return path

    def expand(self, *flags):
        return recipes.expand(list(flags), recipes.load(self.chapter, "own"))

    def refused(self, name):
        with self.assertRaises(BookError) as caught:
            recipes.load(self.chapter, name)
        self.assertEqual(caught.exception.code, 2)
        return str(caught.exception)

    def test_flags_that_are_given_besides_win(self):
        self.write("own", flags={"tp_size": 8, "sequence_parallel": True, "seq_len": 64})
        self.assertEqual(self.expand("--steps", "3", "--recipe", "own"),
                         ["--tp_size", "8", "--sequence_parallel", "--seq_len", "64", "--steps", "3"])
        self.assertEqual(self.expand("--recipe=own", "--seq_len=32", "--tp_size", "2"),
                         ["--sequence_parallel", "--seq_len=32", "--tp_size", "2"])

    def test_a_file_of_the_readers_own(self):
        path = self.write("own", flags={"tp_size": 8})
        self.assertEqual(recipes.load(CHAPTER, str(path)).flags, {"tp_size": 8})

    def test_names_keys_and_flags_that_are_unknown(self):
        self.write("own", flags={"tp_sise": 8}, notes="")
        self.assertIn("did you mean 'note'?", self.refused("own"))
        self.assertIn("did you mean --recipe own?", self.refused("owm"))
        self.assertIn("there are: own", self.refused("llama"))
        self.write("own", flags={}, reported=[{"what": "GPUs", "vlaue": "8"}])
        self.assertIn("did you mean 'value'?", self.refused("own"))
        self.write("own", flags=[])
        self.assertIn("laptop.json shows the form", self.refused("own"))
        (self.chapter.folder / "recipes" / "own.json").write_text("{")
        self.assertIn("is no JSON", self.refused("own"))
        self.write("own", flags={"tp_sise": 8})
        with self.assertRaisesRegex(BookError, "no key 'tp_sise'; did you mean 'tp_size'"):
            recipes.check_flags(recipes.load(self.chapter, "own"), {"--tp_size": "INT", "--dp_size": "INT"})

    def test_a_switch_is_true_or_false_and_no_other_flag_is(self):
        text = program_help.help_text(CHAPTER, CHAPTER.name)
        with mock.patch.object(launch, "output_of", return_value=text):
            known = launch.known_flags(CHAPTER)
        for flag, value, said in (("prompt", True, 'is true; --prompt takes "text"'),
                                  ("prompt", False, 'is false; --prompt takes "text"'),
                                  ("tp_size", True, "is true; --tp_size takes a number, such as 2"),
                                  ("lr", True, "is true; --lr takes a number"),
                                  ("sequence_parallel", 1, "is 1; --sequence_parallel is a switch: give true or false"),
                                  ("sequence_parallel", "true", 'is "true"; --sequence_parallel is a switch')):
            path = self.write("own", flags={flag: value})
            with self.assertRaises(BookError) as caught:
                recipes.check_flags(recipes.load(self.chapter, "own"), known)
            self.assertIn(f"own.json: flags.{flag} {said}", str(caught.exception), path)
            self.assertEqual(caught.exception.code, 2)
        for name in recipes.names(CHAPTER):
            recipes.check_flags(recipes.load(CHAPTER, name), known)

    def test_a_recipe_a_page_and_a_framework_are_given_once(self):
        for flags, said in ((["--recipe", "A", "--recipe=B"], "--recipe is given twice, as A and as B; leave one"),
                            (["--as=A", "--as", "B"], "--as is given twice, as A and as B"),
                            (["--mesh_page", "A", "--mesh_page", "B"], "--mesh_page is given twice, as A and as B")):
            with self.assertRaises(BookError) as caught:
                launch.run_chapter(CHAPTER, flags, launch.Options(only_print=True))
            self.assertIn(said, str(caught.exception))
            self.assertEqual(caught.exception.code, 2)
        self.assertEqual(launch.given_value(["--seq_len", "8", "--as", "A"], "--as"), "A")

    def test_a_switch_that_is_off_is_left_out(self):
        self.write("own", flags={"sequence_parallel": False, "tp_size": 8})
        self.assertEqual(self.expand("--recipe", "own"), ["--tp_size", "8"])

    def test_each_value_is_one_of_its_key_s_and_stands_once(self):
        row = {"what": "GPUs", "value": "8", "source": "https://example.org"}
        for fields, said in (({"flags": {"tp_size": [8]}}, r"flags.tp_size is \[8\]; give a number"),
                             ({"flags": {"tp_size": None}}, "flags.tp_size is null; give a number"),
                             ({"flags": {}, "title": 3}, 'title is 3; give it as "text"'),
                             ({"flags": {}, "reported": 5}, "reported is 5; give a list"),
                             ({"flags": {}, "reported": ["GPUs"]}, r'reported\[0\] is "GPUs"; give an object'),
                             ({"flags": {}, "reported": [{**row, "value": 8}]}, r"reported\[0\].value is 8"),
                             ({"flags": {}, "reported": [{"what": "GPUs", "value": "8"}]},
                              r"reported\[0\].source is null")):
            self.write("own", **fields)
            self.assertRegex(self.refused("own"), said)
        (self.chapter.folder / "recipes" / "own.json").write_text('{"flags": {"tp_size": 8, "tp_size": 4}}')
        self.assertIn("has 'tp_size' twice; keep one of them", self.refused("own"))

    def test_a_chapter_without_recipes_says_so(self):
        first = chapters.find_chapters()[0]
        with self.assertRaisesRegex(BookError, "this chapter has none"):
            recipes.load(first, "laptop")

    def test_what_the_source_reports_stands_under_the_estimate(self):
        recipe = recipes.load(CHAPTER, "deepseek_v3")
        lines = recipe.lines()
        self.assertIn("DeepSeek-V3: the source says", lines[0])
        for row, line in zip(recipe.reported, lines[1:]):
            self.assertIn(row["what"], line)
            self.assertIn(row["source"], line)
        self.assertEqual(lines[-1], recipe.note)


class Proving(unittest.TestCase):
    def run_book(self, *arguments):
        with mock.patch.object(launch, "run_chapter", return_value=0) as run, \
                contextlib.redirect_stderr(io.StringIO()) as said:
            code = cli._run_command(list(arguments))
        return code, said.getvalue(), run

    def test_the_program_gets_the_most_ranks_of_a_twin_and_the_flags(self):
        code, _, run = self.run_book("prove", CHAPTER.short, "--ranks", "24", "--", "--tp_size", "8")
        self.assertEqual(code, 0)
        chapter, flags, options = run.call_args[0]
        self.assertEqual((chapter.name, flags), (CHAPTER.name, ["--prove", "24", "--mesh_show", "types", "--tp_size", "8"]))
        self.assertIsNone(options.ranks)

    def test_in_bf16_the_program_is_asked_about_rounding(self):
        _, _, run = self.run_book("prove", CHAPTER.short, "--dtype", "bf16", "--", "--tp_size", "2")
        self.assertEqual(run.call_args[0][1],
                         ["--prove", "16", "--mesh_show", "types", "--prove_dtype", "bf16", "--tp_size", "2"])

    def test_of_types_the_program_is_asked_for_a_reason(self):
        _, _, run = self.run_book("types", CHAPTER.short, "--why", "forward o_proj", "--", "--tp_size", "2")
        self.assertEqual(run.call_args[0][1],
                         ["--mesh_show", "types", "--mesh_why", "forward o_proj", "--tp_size", "2"])

    def test_a_chapter_that_proves_nothing_names_one_that_does(self):
        code, said, run = self.run_book("prove", "ch01", "--", "--steps", "3")
        self.assertEqual((code, run.called), (2, False))
        self.assertIn(f"./book prove {CHAPTER.short} -- --steps 3", said)

    def test_layouts_drawn_at_random_get_minutes_and_the_first_number(self):
        code, _, run = self.run_book("fuzz", CHAPTER.short, "--minutes", "0.5", "--seed", "7")
        self.assertEqual(code, 0)
        chapter, flags, _ = run.call_args[0]
        self.assertEqual((chapter.name, flags),
                         (CHAPTER.name, ["--fuzz", "0.5", "--seed", "7"]))
        self.assertIsNone(run.call_args[0][2].ranks)
        _, _, run = self.run_book("fuzz", CHAPTER.short, "--ranks", "6")
        self.assertEqual((run.call_args[0][1], run.call_args[0][2].ranks), (["--fuzz", "1", "--seed", "1"], 6))
        code, said, run = self.run_book("fuzz", "ch01")
        self.assertEqual((code, run.called), (2, False))
        self.assertIn(f"./book fuzz {CHAPTER.short}", said)

    def test_other_commands_take_no_flags_after_the_dashes(self):
        code, said, _ = self.run_book("list", "--", "--steps", "3")
        self.assertEqual(code, 2)
        self.assertIn("only `run`, `prove`, `types` and `plan` hand flags on", said)


class Speed(unittest.TestCase):
    ROUNDS = [{"ch01": 100.0, "ch02": 99.0, "copies_never": 80.0, "copies_every": 79.0, "two_dp": 90.0, "two_tp": 50.0},
              {"ch01": 10.0, "ch02": 10.0, "copies_never": 8.0, "copies_every": 8.0, "two_dp": 9.0, "two_tp": 9.9},
              {"ch01": 100.0, "ch02": 98.0, "copies_never": 80.0, "copies_every": 78.0, "two_dp": 95.0, "two_tp": 50.0}]

    def test_ratios_are_those_of_rounds_and_the_best_of_two_ranks_has_a_goal(self):
        record = {"composition": {"rounds": self.ROUNDS}}
        self.assertEqual([(what, found["median"], goal) for what, found, goal in speed.rows(record)], [
            ("ch02, size 1, over ch01", 0.99, 0.99), ("`--check_copies 10` over none", 79 / 80, 0.995),
            ("`dp` on 2 ranks over ch01 with all threads", 0.9, 0.95),
            ("`tp` on 2 ranks over ch01 with all threads", 0.5, None)])

    def test_each_estimate_has_its_own_goal(self):
        estimates = {name: {"ranks": 8, "distinct": 4, "seconds": 6.0} for name in ("deepseek_v3", "llama3_405b")}
        said = list(speed.text({"composition": {"rounds": self.ROUNDS}, "estimates": estimates}))[-2:]
        self.assertEqual(said, [f"estimate of {name}: 6.00 s, 1.50 s for each of 4 ranks that differ (goals: {goal} and 1)"
                                for name, goal in (("deepseek_v3", 20), ("llama3_405b", 10))])

    def test_ranks_of_an_estimate_are_those_of_the_mesh(self):
        mesh = {"dp": 4, "pp": 3, "cp": 2, "tp": 2, "ep": 8}
        self.assertEqual(speed.counted({"mesh": mesh, "distinct_ranks": [{}, {}]}), {"ranks": 48, "distinct": 2})

    def test_every_way_of_two_ranks_has_the_batch_of_one(self):
        for way, flags in speed.WAYS.items():
            samples = flags.get("micro_batch_size", 4) * flags.get("grad_acc_steps", 1) * flags.get("dp_size", 1)
            ranks = flags.get("dp_size", 1) * flags.get("tp_size", 1) * flags.get("cp_size", 1) * flags.get("pp_size", 1)
            self.assertEqual((samples, ranks), (bench.CONFIGS["B"]["micro_batch_size"], speed.RANKS), way)


if __name__ == "__main__":
    unittest.main()
