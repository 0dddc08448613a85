"""What pages quote of commands is what these print: the questions, and the demos of the clubs.

    python3 tests/course/test_transcripts.py --bin build/release/bin

A transcript is a block of commands, `sh`, and right behind it a block of `text`: lines of their
output in their order. `...` alone stands for lines left out, `…` in a line for what differs between
machines. A page's commands run one after the other, in a folder of their own.

A run takes two steps where no quoted line depends on them, and validates on few samples. With
--all one page in turn trains as long as it says; with USP_TEST_EVERYTHING=1 all do. A comparison
draws nothing here: test_book.py looks at that figure.
"""
import argparse
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import machine  # noqa: E402  (the path comes first)
from tools.base import BookError  # noqa: E402
from tools.chapters import resolve  # noqa: E402
from tools.run import launch  # noqa: E402
from tools.test import testing  # noqa: E402

BIN = None  # folder of the programs
FENCED = re.compile(r"^(```+|~~~+)(\w*)\n(.*?)^\1[ \t]*$", re.M | re.S)
LEAST = {"docs/faq.md": 12, "ch01_single_gpu/club.md": 2, "ch02_data_parallel/club.md": 2,
         "ch03_tensor_sequence/club.md": 3, "ch04_context/club.md": 3}
COMMAND_S = 120
# Lines that depend on how many steps there are, the second on whether roundings have added up.
COUNTED, ROUNDED = re.compile(r"\bsteps\b|\bstep[ -]\d"), re.compile("Largest relative difference")
FEW_STEPS, FEW_SAMPLES = 2, 4
COMPARE = ("import sys; sys.path.insert(0, sys.argv.pop(1)); from tools import cli; from tools.look import figures; "
           "figures.draw = lambda *_: None; sys.exit(cli.main(sys.argv[1:]))")


class Transcript(NamedTuple):
    """Commands, each as words, and lines of what they print, with the number of the first."""

    commands: list
    quoted: list
    line: int


def pages():
    return [ROOT / "docs" / "faq.md", *sorted(ROOT.glob("ch[0-9][0-9]_*/club.md"))]


def transcripts(text):
    """Every Transcript of a page."""
    found, before = [], None
    for match in FENCED.finditer(text):
        if before and match[2] == "text" and not text[before.end():match.start()].strip():
            commands = [shlex.split(line, comments=True)
                        for line in before[3].replace("\\\n", " ").splitlines()]
            found.append(Transcript([words for words in commands if words],
                                    match[3].splitlines(),
                                    text.count("\n", 0, match.start()) + 2))
        before = match if match[2] == "sh" else None
    return found


def command_of(words):
    """(words to start, environment) of a page's command. ValueError for one that no test runs."""
    if words[:1] != ["./book"]:
        raise ValueError(f"{shlex.join(words)} is no ./book command")
    if words[1] == "compare":
        return [sys.executable, "-c", COMPARE, str(ROOT), *words[1:]], dict(os.environ)
    if words[1] != "run":
        return [sys.executable, str(ROOT / "book"), *words[1:]], dict(os.environ)
    own, flags = (words[2:], []) if "--" not in words else \
        (words[2:words.index("--")], words[words.index("--") + 1:])
    name, _, example = own[0].partition("/")
    chapter = resolve(name)
    informs = launch.INFORMATION_FLAGS & set(flags)
    if not informs and not example and launch.given_run_dir(flags) is None:
        raise ValueError(f"{shlex.join(words)} names no --run_dir below runs/")
    count = int(own[own.index("--ranks") + 1]) if "--ranks" in own else chapter.ranks or 1
    ranks = 1 if informs else launch.rank_count(chapter, launch.Options(ranks=count))
    program = BIN / (f"{chapter.name}_{example}" if example else chapter.name)
    return (launch.rank_command([str(program), *flags], ranks, None, None),
            machine.thread_environment(ranks=ranks))


def shortened(transcript):
    """The transcript with runs that take no longer than what it quotes needs."""
    quoted = "\n".join(transcript.quoted)
    if COUNTED.search(quoted):
        return transcript
    most = math.inf if ROUNDED.search(quoted) else FEW_STEPS
    return transcript._replace(commands=[short_run(words, most) for words in transcript.commands])


def short_run(words, most):
    """A command with few steps, if it says how many, and few samples to validate on."""
    if "--steps" not in words or words[1] != "run":
        return words
    at = words.index("--steps") + 1
    steps = min(most, int(words[at]))
    return [*words[:at], str(steps), *words[at + 1:], "--eval_samples", str(FEW_SAMPLES)]


def spaced(text):
    """The pattern of a text whose columns may stand elsewhere: rows are wider on other machines."""
    return " {2,}".join(map(re.escape, re.split(" {2,}", text)))


def unmatched(quoted, printed):
    """The first quoted line that the printed ones do not have, in order; None: all are there."""
    rest, skips = iter(printed), True  # what precedes the first one needs no dots
    for line in quoted:
        if line.strip() == "...":
            skips = True
            continue
        pattern = re.compile(".*".join(map(spaced, line.rstrip().split("…"))))
        for other in rest:
            if pattern.fullmatch(other.rstrip()):
                break
            if not skips:
                return line
        else:
            return line
        skips = False
    return None


class Pages(unittest.TestCase):
    def test_every_quoted_line_is_printed(self):
        everything = {"USP_TEST_ALL", "USP_TEST_EVERYTHING"} & set(os.environ)
        whole = testing.in_turn(pages()) if everything else []
        for page in pages():
            name = str(page.relative_to(ROOT))
            found = transcripts(page.read_text(encoding="utf-8"))
            self.assertGreaterEqual(len(found), LEAST.get(name, 1), name)
            with tempfile.TemporaryDirectory(prefix="book_transcripts_") as scratch:
                for each in found:
                    with self.subTest(page=name, line=each.line):
                        self.check(each if page in whole else shortened(each), Path(scratch),
                                   f"{name}:{each.line}")

    def check(self, transcript, folder, where):
        printed = []
        for words in transcript.commands:
            command, environment = command_of(words)
            done = subprocess.run(command, cwd=folder, env=environment, timeout=COMMAND_S,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  encoding="utf-8", errors="replace", check=False)
            printed += done.stdout.splitlines()
        line = unmatched(transcript.quoted, printed)
        self.assertIsNone(line, f"{where}: no command prints '{line}' there; they print:\n"
                          + "\n".join(printed))


class Reading(unittest.TestCase):
    PAGE = ("text\n\n```sh\n./book run ch01 -- --estimate \\\n  --dtype bf16  # why\n```\n\n"
            "~~~~text\na\n...\nb … d\n~~~~\n\n```sh\n./book list\n```\n\nwords\n\n~~~~text\nx\n~~~~\n"
            "<!-- output: a.txt -->\n~~~~text\ny\n~~~~\n<!-- /woven -->\n")

    def test_a_transcript_is_a_block_of_text_right_behind_its_commands(self):
        found, = transcripts(self.PAGE)
        self.assertEqual(found.commands, [["./book", "run", "ch01", "--", "--estimate", "--dtype",
                                           "bf16"]])
        self.assertEqual(found.quoted, ["a", "...", "b … d"])
        self.assertEqual(self.PAGE.splitlines()[found.line - 1], "a")

    def test_lines_are_found_in_order(self):
        quoted = ["a", "...", "b … d"]
        self.assertIsNone(unmatched(quoted, ["0", "a  ", "1", "b c d"]))
        self.assertIsNone(unmatched(quoted, ["a", "b  d"]))
        self.assertEqual(unmatched(quoted, ["b c d", "a"]), "b … d")
        self.assertIsNone(unmatched(["a   b c"], ["a  b c"]))
        self.assertEqual(unmatched(["a   b c"], ["a b  c"]), "a   b c")
        self.assertEqual(unmatched(quoted, ["a", "b c"]), "b … d")
        self.assertEqual(unmatched(["a", "b"], ["a", "1", "b"]), "b")  # without dots in between
        self.assertEqual(unmatched(["a.c"], ["abc"]), "a.c")

    def test_runs_are_short_where_no_quoted_line_counts_steps(self):
        words = ["./book", "run", "ch01", "--", "--steps", "12", "--run_dir", "runs/x"]
        compare = ["./book", "compare", "runs/x", "runs/y"]
        for quoted, steps, few in (
                ("sent 7 bytes a step by rank 0", "2", True), ("All 12 common steps", "12", False),
                ("step 5/6  loss 4.7", "12", False), ("from step-00000004", "12", False),
                ("Largest relative difference of the loss: 1", "12", True)):
            run, other = shortened(Transcript([words, compare], ["a", quoted], 1)).commands
            self.assertEqual(run[:8], [*words[:5], steps, *words[6:]], quoted)
            self.assertEqual(run[8:], ["--eval_samples", "4"] if few else [], quoted)
            self.assertEqual(other, compare)
        self.assertEqual(short_run([*words[:5], "1"], 2)[5], "1")

    def test_what_no_test_can_run(self):
        with self.assertRaisesRegex(ValueError, "names no --run_dir"):
            command_of(["./book", "run", "ch01", "--", "--steps", "2"])
        with self.assertRaisesRegex(ValueError, "is no ./book command"):
            command_of(["kill", "-9", "1"])
        with self.assertRaisesRegex(BookError, "ch99"):
            command_of(["./book", "run", "ch99", "--", "--estimate"])

    def test_ranks_as_the_page_has_them(self):
        words = ["./book", "run", "ch02", "--ranks", "3", "--", "--run_dir", "runs/x"]
        command, environment = command_of(words)
        self.assertIn("3", command)
        self.assertEqual(command[-2:], ["--run_dir", "runs/x"])
        self.assertIn("OMP_NUM_THREADS", environment)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bin", required=True, help="folder of the programs")
    args, left = parser.parse_known_args()
    BIN = Path(args.bin).resolve()
    unittest.main(argv=[sys.argv[0], *left])
