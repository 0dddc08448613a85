"""The museum of composition bugs: each exhibit has a fault that fits this chapter, a layout that is right without
it, and something that sees it.

    test_museum.py --bin build/release/bin [unittest arguments]
    test_museum.py --binary build/release/bin/ch07_5d Layouts.test_NAME     # as a seeded fault asks
"""
import contextlib
import io
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ch07_5d.figures import museum, museum_bf16  # noqa: E402
from tests.parity import binary  # noqa: E402
from tools import chapters  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.exercise import check, exercises, planted  # noqa: E402
from tools.test import testing  # noqa: E402

CHAPTER = chapters.resolve("ch07")
PROGRAM = None  # set below
FULL = 8  # exhibits that the page shows in full


class Files(unittest.TestCase):
    def test_every_exhibit_names_a_fault_that_fits_the_chapter_and_an_address(self):
        names = [exhibit["fault"] for exhibit in museum.exhibits()]
        self.assertEqual(len(names), len(set(names)))
        for exhibit in museum.exhibits():
            fault = planted.fault_in(exhibit["fault"], CHAPTER)
            self.assertIn(exhibit["seen_by"], (*museum.SEES, "test"), fault.name)
            for hunk in fault.hunks:
                self.assertRegex(hunk[0], rf"^({CHAPTER.name}|common)/", fault.name)
            self.assertTrue(exhibit["places"], fault.name)
            for name, address in exhibit["places"]:
                self.assertRegex(address, r"^https://\S+$", name)
                number = re.search(r"#(\d+)$", name)
                self.assertTrue(number is None or address.endswith(f"/{number[1]}"), f"{name}: {address}")

    def test_the_page_shows_eight_in_full_that_a_proof_sees(self):
        full = [exhibit for exhibit in museum.exhibits() if exhibit.get("full")]
        self.assertEqual([exhibit["seen_by"] for exhibit in full], ["prove"] * FULL)
        page = (CHAPTER.folder / "museum.md").read_text(encoding="utf-8")
        for exhibit in full:
            self.assertIn(f"<!-- output: figures/museum_{exhibit['fault']}.txt", page)
            self.assertIn(f"tests/faults/{self.room(exhibit)}/{exhibit['fault']}.patch", page)
            for _, address in exhibit["places"]:
                self.assertIn(f"]({address})", page)

    def test_the_lesson_says_how_many_there_are_and_each_report_stands_once(self):
        lesson = (CHAPTER.folder / "README.md").read_text(encoding="utf-8")
        self.assertIn(f"[The museum](museum.md) has {len(museum.exhibits())} of them", lesson)
        addresses = [address for exhibit in museum.exhibits() for _, address in exhibit["places"]]
        self.assertEqual(len(addresses), len(set(addresses)))

    def test_runs_with_two_seeds_are_further_apart_than_those_with_a_mistake_and_without(self):
        record = museum.read_json(museum.FOLDER / "museum.json")
        seeded = museum.exhibits()[museum.SEEDED]["fault"]
        pairs = [(own["right"], own["planted"]) for own in record["exhibits"].values() if "planted" in own]
        self.assertEqual(len(pairs), FULL)
        for step in museum.SHOWN[1:]:
            at = museum.KEPT.index(step)
            apart = [abs(right["loss"][at] - other["loss"][at]) for right, other in pairs]
            seeds = abs(record["exhibits"][seeded]["right"]["loss"][at] - record["other_seed"]["loss"][at])
            self.assertLess(max(apart), seeds, step)

    def test_a_fault_that_is_not_there_is_named(self):
        with self.assertRaisesRegex(BookError, "no fault of tests/faults is called not_there"):
            planted.fault_in("not_there", CHAPTER)

    @staticmethod
    def room(exhibit):
        return testing.find_fault(exhibit["fault"]).parent.name


class Proof(unittest.TestCase):
    """What is read of ./book prove."""

    def proof(self, printed, code):
        with tempfile.TemporaryDirectory(prefix="test_museum_") as folder:
            program = Path(folder) / "program"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
            program.chmod(0o755)
            return planted.proof(program, ["--tp_size", "2"])

    def test_the_first_twin_that_differs_is_read(self):
        twin = "twin 1, 2 ranks (tp 2)\n  --tp_size 2\n"
        self.assertEqual(self.proof(f"{twin}  equal to one process\n\n{twin}  DIFFERS\n  first\n  second\n\nend", 1),
                         ["first", "second"])
        self.assertEqual(self.proof(f"{twin}  equal to one process\n\n", 0), [])

    def test_what_ended_otherwise_is_no_proof(self):
        for printed, code, message in (("error: tp_size=3 must divide num_heads=4; try 1, 2 or 4", 2, "^tp_size=3"),
                                       ("twin 1\nsegmentation fault", 139, "fault"), ("out of memory", 1, "memory")):
            with self.assertRaisesRegex(BookError, message) as caught:
                self.proof(printed, code)
            self.assertEqual(caught.exception.code, 2 if code == 2 else 1)


class InBf16(unittest.TestCase):
    """What is read of ./book prove --dtype bf16."""

    TWIN = "twin 1, 2 ranks (tp 2)\n  --tp_size 2\n"

    def test_a_bug_hides_where_the_layout_is_no_further_than_two_orders(self):
        for printed, ratio, verdict in (
                ("  rounding: no further from one process than its orders are from each other (0.85 times), in 1.6 s\n",
                 0.85, "hidden"),
                ("  perhaps rounding: further, but less than twice as far as its orders (1.34 times), in 2 s\n",
                 1.34, "perhaps rounding"),
                (f"{planted.DIFFERS}  60.4 times as far from one process as any two of its orders are from each other\n",
                 60.4, "seen"),
                (f"{planted.DIFFERS}  after step 1, a.weight: ranks 1 hold other values than ranks 0 of the same 4 "
                 "elements\n", None, "seen: copies differ")):
            self.assertEqual((museum_bf16.ratio(self.TWIN + printed), museum_bf16.verdict(self.TWIN + printed)),
                             (ratio, verdict))

    def test_what_has_no_ratio_or_two_is_no_answer(self):
        for printed in ("", "(0.85 times), in 1.6 s\n" * 2):
            with self.assertRaisesRegex(BookError, "one twin"):
                museum_bf16.ratio(self.TWIN + printed)

    def test_the_record_has_every_bug_that_a_proof_sees_and_none_without_the_mistake(self):
        printed = museum.read_json(museum.FOLDER / "museum_bf16.json")["printed"]
        self.assertEqual(list(printed), [exhibit["fault"] for exhibit in museum.exhibits()
                                         if exhibit["seen_by"] == "prove"])
        for fault, own in printed.items():
            self.assertNotIn(planted.DIFFERS, own["right"], fault)


class Layouts(unittest.TestCase):
    """A test for each layout, which its seeded fault names."""

    def look_at(self, exhibit):
        sees = museum.SEES.get(exhibit["seen_by"], museum.prove)
        self.assertEqual("\n".join(sees(PROGRAM, exhibit)), "", exhibit["what"])


def add_tests():
    for exhibit in museum.exhibits():
        setattr(Layouts, f"test_{exhibit['fault']}", lambda self, exhibit=exhibit: self.look_at(exhibit))


class Blind(unittest.TestCase):
    """The exercise."""

    def setUp(self):
        self.judge = check.load_judge(exercises.resolve("ch07.ex5"))

    def test_its_layout_is_right_without_the_mistake(self):
        self.assertEqual("\n".join(planted.proof(PROGRAM, self.judge.LAYOUT.split())), "")

    def test_the_museum_does_not_show_it(self):
        self.assertNotIn(self.judge.MISTAKE, [exhibit["fault"] for exhibit in museum.exhibits()])
        planted.fault_in(self.judge.MISTAKE, CHAPTER)


class Planted(unittest.TestCase):
    """Once more what the page says, of one exhibit in turn."""

    @unittest.skipUnless("USP_TEST_ALL" in os.environ, "builds a copy of the sources: --all")
    def test_what_is_planted_is_seen_as_the_page_says(self):
        record = museum.read_json(museum.FOLDER / "museum.json")["exhibits"]
        copy = planted.Copy(CHAPTER)
        every = [exhibit for exhibit in museum.exhibits() if exhibit["fault"] in record]
        own = [every[testing.turn() % len(every)]]
        for exhibit in every if os.environ.get("USP_TEST_EVERYTHING") == "1" else own:
            with self.subTest(exhibit["fault"]), contextlib.redirect_stderr(io.StringIO()):
                with copy.program(exhibit["fault"]) as program:
                    said = museum.SEES[exhibit["seen_by"]](program, exhibit)
                    if "drawn" in record[exhibit["fault"]]:
                        self.assertEqual(museum.drawn(program), record[exhibit["fault"]]["drawn"])
                self.assertEqual(*(self.tensor(lines) for lines in (said, record[exhibit["fault"]]["says"])))

    @staticmethod
    def tensor(lines):
        """Which one, and its groups: another processor rounds otherwise."""
        return [line.split(", element ")[0] for line in lines[:2]]


if __name__ == "__main__":
    add_tests()
    PROGRAM = binary.given(CHAPTER.name)
    unittest.main()
