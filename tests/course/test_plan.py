"""Tests of ./book plan: what it asks the program in each of its forms, and what it refuses.

    python3 tests/course/test_plan.py --bin build/release/bin      asks the program, too
"""
import argparse
import contextlib
import csv
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import cli  # noqa: E402
from tools.run import launch, plan  # noqa: E402

TABLE = plan.find_chapter().folder / "data" / "vtrain_a100_multi.csv"
TINY = ("--nodes", "2", "--seq_len", "16", "--batch", "1K", "--", "--hidden_size", "24", "--num_heads", "4",
        "--num_kv_heads", "2", "--ffn_hidden_size", "36", "--vocab_size", "32", "--num_layers", "4", "--dtype", "f32")
BIN = None


def book_plan(*arguments):
    """(exit code, standard error, what it would start a chapter with)"""
    error = io.StringIO()
    with mock.patch.object(launch, "run_chapter", return_value=0) as run, contextlib.redirect_stderr(error):
        code = cli._run_command(["plan", *arguments])  # pylint: disable=protected-access
    return code, error.getvalue(), [call.args for call in run.call_args_list]


def asked(*arguments):
    """The words with which the program is started."""
    code, error, started = book_plan(*arguments)
    assert (code, error, len(started)) == (0, "", 1), error
    chapter, words, options = started[0]
    assert (chapter.short, options.ranks) == (plan.find_chapter().short, 1)
    return words


def said(*arguments):
    """(exit code, standard output, standard error) of the program, asked by ./book plan."""
    words = asked(*arguments)
    done = subprocess.run([str(BIN / plan.find_chapter().name), *words], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Words(unittest.TestCase):
    def value(self, words, flag):
        self.assertEqual(words.count(flag), 1, words)
        return words[words.index(flag) + 1]

    def test_a_search_has_a_cluster_a_batch_and_a_dtype(self):
        words = asked("--model", "8B", "--cluster", "h100_nvl8", "--nodes", "8", "--batch", "1M")
        self.assertEqual(words, ["--cluster", "h100_nvl8", "--plan", str(2**20), "--dtype", "bf16", "--model", "8B",
                                 "--nodes", "8", "--seq_len", "4096"])
        words = asked("--cluster", "a100", "--batch", "1M", "--require", "mem<=40", "--json", "--", "--dtype", "f32")
        self.assertEqual((self.value(words, "--dtype"), self.value(words, "--require")), ("f32", "mem<=40"))
        self.assertIn("--plan_json", words)

    def test_a_batch_is_a_number_of_tokens(self):
        for text, tokens in (("1048576", 2**20), ("512K", 2**19), ("1.5m", 3 * 2**19), ("2G", 2**31)):
            words = asked("--cluster", "a100", "--batch", text)
            self.assertEqual(self.value(words, "--plan"), str(tokens))

    def test_files_are_named_from_the_root(self):
        words = asked("--cluster", "./mine.json", "--predict", str(TABLE), "-o", "out.csv")
        self.assertEqual(words, ["--cluster", str(Path("mine.json").absolute()), "--plan_rows", str(TABLE),
                                 "--plan_out", str(Path("out.csv").absolute())])
        words = asked("--cluster", "a100", "--fit", str(TABLE), str(TABLE), "--rows", "pp<=1")
        self.assertEqual(words, ["--cluster", "a100", "--plan_rows", f"{TABLE},{TABLE}", "--plan_fit", "pp<=1"])

    def test_what_if_and_why_are_handed_on(self):
        words = asked("--cluster", "a100", "--batch", "1M", "--what_if", "net=+100%,gpu=./new.json")
        self.assertEqual(self.value(words, "--what_if"), f"net=+100%,gpu={Path('new.json').absolute()}")
        words = asked("--cluster", "a100", "--batch", "1M", "--what_if", "gpu=h100_nvl8,ranks=-8")
        self.assertEqual(self.value(words, "--what_if"), "gpu=h100_nvl8,ranks=-8")
        words = asked("--cluster", "a100", "--batch", "1M", "--why", "1", "--tp_size 2 --micro_batch_size 4")
        self.assertEqual(self.value(words, "--why"), "1; --tp_size 2 --micro_batch_size 4")

    def test_what_cannot_be_asked_is_refused_in_a_line(self):
        for arguments, parts in (
                ((), ("--cluster",)),
                (("--cluster", "a100"), ("--batch", "--predict", "--fit")),
                (("--cluster", "a100", "--batch", "0"), ("--batch 0", "512K")),
                (("--cluster", "a100", "--batch", "0.3"), ("--batch 0.3", "1048576")),
                (("--cluster", "a100", "--batch", "much"), ("--batch much", "1M")),
                (("--cluster", "a100", "--batch", "1M", "--predict", str(TABLE)), ("--predict", "not allowed")),
                (("--cluster", "a100", "--predict", "nowhere.csv"), ("nowhere.csv", "playbook_h100.csv")),
                (("--cluster", "a100", "--fit", str(TABLE), "nowhere.csv"), ("nowhere.csv", "no such table")),
                (("--cluster", "a100", "--batch", "1M", "--why", "1"), ("--why", "2 arguments")),
                (("--cluster", "a100", "--predict", str(TABLE), "--why", "1", "2"), ("--why", "--batch 1M")),
                (("--cluster", "a100", "--fit", str(TABLE), "--what_if", "net=+1%"), ("--what_if", "--batch 1M"))):
            with self.subTest(arguments):
                code, text, started = book_plan(*arguments)
                self.assertEqual((code, text.count("\n"), started), (2, 1, []), text)
                for part in parts:
                    self.assertIn(part, text)


class Answers(unittest.TestCase):
    def setUp(self):
        if BIN is None:
            self.skipTest("needs --bin")

    def test_a_search_says_what_is_fastest_and_what_that_depends_on(self):
        code, text, _ = said("--cluster", "two_cores", *TINY)
        self.assertEqual(code, 0)
        for heading in ("1. What fits", "2. How the batch is reached", "3. What is fastest", "What the first depends on"):
            self.assertIn(heading, text)
        code, text, _ = said("--cluster", "two_cores", "--json", *TINY)
        best = json.loads(text)["best"]
        self.assertEqual((code, len(best)), (0, 10))
        for row in best:
            self.assertAlmostEqual(sum(row["critical_path_s"].values()), row["step_s"], delta=1e-9 * row["step_s"])

    def test_what_if_and_why_answer(self):
        code, text, _ = said("--cluster", "two_cores", "--what_if", "peak=+100%", *TINY)
        self.assertEqual(code, 0)
        self.assertIn("What if peak=+100%", text)
        self.assertIn("then:", text)
        code, text, _ = said("--cluster", "two_cores", "--why", "1", "2", "--json", *TINY)
        found = json.loads(text)
        bars = sum(part["b_s"] - part["a_s"] for part in found["parts"])
        self.assertEqual(code, 0)
        self.assertAlmostEqual(bars, found["b"]["step_s"] - found["a"]["step_s"], delta=1e-9 * found["a"]["step_s"])

    def test_exit_codes(self):
        for arguments, code, part in (
                (("--require", "mfu>=1.5"), 3, ""),
                (("--what_if", "capacity=-99.99999%"), 3, ""),
                (("--what_if", "speed=+1%"), 2, "try net=+100%"),
                (("--why", "1", "4000"), 2, "4000 is none of them"),
                (("--why", "1", "--tp_size 3"), 2, "try --dp_size"),
                (("--why", "1", "2", "--what_if", "net=+1%"), 2, "two questions")):
            with self.subTest(arguments):
                found, _, error = said("--cluster", "two_cores", *arguments, *TINY)
                self.assertEqual(found, code, error)
                self.assertEqual(error.count("\n"), 1 if code == 2 else 0, error)
                self.assertIn(part, error)
        self.assertEqual(said("--cluster", "nowhere", *TINY)[0], 2)

    def test_a_table_gets_three_columns(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.csv"
            code, _, error = said("--cluster", "a100", "--predict", str(TABLE), "-o", str(out))
            self.assertEqual(code, 0, error)
            with open(out, encoding="utf-8", newline="") as file, open(TABLE, encoding="utf-8", newline="") as before:
                found, given = csv.DictReader(file), csv.DictReader(before)
                self.assertEqual(found.fieldnames[-3:], ["predicted_step_time_s", "predicted_mem_GB", "predicted_fits"])
                self.assertEqual(len(list(found)), len(list(given)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path)
    known, rest = parser.parse_known_args()
    BIN = known.bin and known.bin.absolute()
    unittest.main(argv=[sys.argv[0], *rest])
