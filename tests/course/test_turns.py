"""Which long tests have their turn, and how many submissions pass until each has had one.

    python3 tests/course/test_turns.py        needs a configured build
"""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.base import BookError  # noqa: E402
from tools.run import build  # noqa: E402
from tools.test import inputs, progress, testing, turns  # noqa: E402


class InTurn(unittest.TestCase):
    """What takes turns: in another submission, other items."""

    def taken(self, submission, *arguments, **environment):
        with mock.patch.dict(os.environ, {"USP_TEST_EVERYTHING": "", "USP_TEST_TURN": str(submission),
                                          **environment}):
            return testing.in_turn(*arguments)

    def test_consecutive_numbers_take_all_items_once(self):
        taken = [self.taken(number, "abc") for number in range(6)]
        self.assertEqual(taken, [["a"], ["b"], ["c"]] * 2)

    def test_several_at_a_time_keep_their_order(self):
        self.assertEqual(self.taken(3, "abcde", 2), ["b", "c"])
        self.assertEqual(self.taken(1, "abcd", 4), list("abcd"))

    def test_a_few_turns_reach_every_item(self):
        for count in range(1, 40):
            seen = {item for number in range(7, 7 + turns.TURNS)
                    for item in self.taken(number, range(count))}
            self.assertEqual(len(seen), count)

    def test_the_record_counts_and_a_seed_stands_for_its_count(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), \
                mock.patch.object(turns, "RECORD", Path(folder) / "turns.json"):
            os.environ.pop("USP_TEST_TURN", None)
            self.assertEqual(testing.turn(), 0)
            turns.RECORD.write_text('{"submissions": 6, "ran": {}}', encoding="utf-8")
            self.assertEqual(testing.turn(), 6)
            self.assertEqual(testing._environment(False, False)["USP_TEST_TURN"], "6")
            os.environ["USP_TEST_TURN"] = "9"
            self.assertEqual(testing.turn(), 9)
            self.assertEqual(testing._environment(False, False)["USP_TEST_TURN"], "9")

    def test_faults_have_a_limit_unless_all_are_asked_for(self):
        self.assertEqual(testing._limits(everything=False), {"USP_FAULT_SECONDS": "120"})
        self.assertNotIn("USP_FAULT_SECONDS", testing._limits(everything=True))

    def test_everything(self):
        self.assertEqual(self.taken(1, "abc", USP_TEST_EVERYTHING="1"), list("abc"))
        self.assertEqual(self.taken(1, []), [])


class Turns(unittest.TestCase):
    """Which cases of `./book test --all --minutes` run in which submission."""

    BUDGET_S = 60 * 60
    USUAL_S = {6: 16 * 60, 9: 25 * 60}  # what every commit has to pass, by the number of chapters

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.scratch = Path(folder.name)

    def cases(self, chapters):
        """Of the tests and faults as they are; each chapter more has tests like those of the last one
        that is not the newest, and as many faults as a chapter has."""
        seconds = progress.read_durations(progress.ROUGH)
        try:
            tests = testing.read_tests(build.build_dir(build.RELEASE))
        except BookError:  # nothing is configured here: each test that has ever been timed
            tests = {name: testing.Test(name, {"only_in_all": True, "targets": [
                *re.findall(r"ch\d\d_[a-z_]*[a-z]", name), "test_common"]}) for name in seconds}
        faults = testing.read_faults()
        here = sorted({target for test in tests.values() for target in test.targets
                       if re.fullmatch(r"ch\d\d_[a-z_]*[a-z]", target)} & {
                           path.name for path in ROOT.glob("ch*")})
        for name, test in list(tests.items()):
            for number in range(chapters - len(here)):
                if here[-2] in name:
                    copy = name.replace(here[-2], f"copy{number}")
                    tests[copy], seconds[copy] = test, 2 * seconds.get(name, turns.TEST_S)
        each = len(faults) // len(here) // 2
        faults += [(f"fault{i}", "test_more") for i in range((chapters - len(here)) * each)]
        return turns.cases_of(tests, seconds, faults), dict(faults)

    def submit(self, cases, targets, record, seconds):
        """One submission that has so many seconds; the entries that ran."""
        ran = []
        while True:
            waiting = turns.in_order([case for case in cases if not set(ran) & set(case.entries())],
                                     record, targets)
            batch = turns.next_batch(waiting, seconds)
            if not batch:
                break
            seconds -= sum(case.seconds for case in batch)
            ran += [entry for case in batch for entry in case.entries()]
        self.assertEqual(len(ran), len(set(ran)))
        record.note(ran, {entry for case in cases for entry in case.entries()})
        return ran

    def test_every_case_runs_within_five_submissions(self):
        """By the durations of tests/durations.json, with six chapters and with nine."""
        for chapters, usual in self.USUAL_S.items():
            cases, targets = self.cases(chapters)
            record, last, longest = turns.Record(self.scratch / "none"), {}, {}
            known = {entry for case in cases for entry in case.entries()}
            end = 4 * turns.WITHIN
            for submission in range(1, end + 1):
                for entry in self.submit(cases, targets, record, self.BUDGET_S - usual):
                    longest[entry] = max(longest.get(entry, 0), submission - last.get(entry, 0))
                    last[entry] = submission
            late = {entry: wait for entry in known if (
                wait := max(longest.get(entry, 0), end + 1 - last.get(entry, 0))) > turns.WITHIN}
            with self.subTest(chapters=chapters):
                self.assertEqual(late, {}, "a turn that never comes")

    def test_what_does_not_fit_waits_and_what_is_shorter_takes_its_place(self):
        long, short = turns.Case("long", 50.0), turns.Case("short", 5.0)
        self.assertEqual(turns.next_batch([long, short], 20.0), [short])
        self.assertEqual(turns.next_batch([long, short], 60.0), [long, short])
        self.assertEqual(turns.next_batch([long], 20.0), [])
        self.assertEqual(turns.next_batch([long, short], 60.0, lambda case: 2 * case.seconds), [short])

    def test_cases_of_one_turn_run_together(self):
        first, second, fault = turns.Case("a", 1.0, 0), turns.Case("b", 1.0, 1), turns.Case(
            turns.FAULTS, 1.0, faults=("x",))
        self.assertEqual(turns.next_batch([first, second], 9.0), [first])
        self.assertEqual(turns.next_batch([turns.Case("c", 1.0), fault], 9.0), [turns.Case("c", 1.0)])

    def test_the_record_forgets_what_is_gone_and_writes_a_line_for_each_case(self):
        path = self.scratch / "turns.json"
        record = turns.Record(path)
        record.note(["a@0", "b"], {"a@0", "b"})
        record.note(["a@0"], {"a@0", "c"})
        record.write()
        again = turns.Record(path)
        self.assertEqual((again.submissions, again.ran), (2, {"a@0": 2}))
        self.assertIn('\n"a@0": 2\n', path.read_text(encoding="utf-8"))
        path.write_text("[]", encoding="utf-8")
        with self.assertRaisesRegex(BookError, "turns.json.*git checkout"):
            turns.Record(path)


class Inputs(unittest.TestCase):
    """Long tests of pages run where what they read has changed since they passed."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, value in (("ROOT", self.root), ("RECORD", self.root / "tests/digests.json")):
            patch = mock.patch.object(inputs, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        for path in ("ch01_a/x.cpp", "tests/unit.cpp", "tests/turns.json", "build/seen.txt"):
            (self.root / path).parent.mkdir(exist_ok=True)
            (self.root / path).write_text("1", encoding="utf-8")
        (self.root / ".gitignore").write_text("build\n", encoding="utf-8")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)

    def unchanged(self):
        return inputs.unchanged(inputs.digests(), self.root / "build")

    def test_a_test_that_passed_waits_until_what_it_reads_changes(self):
        self.assertEqual(self.unchanged(), set())
        inputs.note(inputs.digests(), set(inputs.READ_BY), inputs.RECORD)
        self.assertEqual(self.unchanged(), set(inputs.READ_BY))
        for path, left in (("tests/turns.json", set(inputs.READ_BY)),
                           ("build/seen.txt", set(inputs.READ_BY)),
                           ("tests/unit.cpp", {"course.transcripts", "course.figures"}),
                           ("ch01_a/x.cpp", set())):
            (self.root / path).write_text("2", encoding="utf-8")
            self.assertEqual(self.unchanged(), left, path)

    def test_what_failed_or_changed_meanwhile_is_not_noted_and_a_folder_has_its_own(self):
        before = inputs.digests()
        inputs.note(before, {"course.figures"}, self.root / "build" / inputs.HERE)
        self.assertEqual(self.unchanged(), {"course.figures"})
        (self.root / "ch01_a/x.cpp").write_text("2", encoding="utf-8")
        inputs.note(before, set(inputs.READ_BY), inputs.RECORD)
        self.assertFalse(inputs.RECORD.exists())

    def test_without_git_all_run(self):
        with mock.patch.object(inputs.subprocess, "run", side_effect=OSError):
            self.assertEqual(self.unchanged(), set())

    def test_of_those_that_are_unchanged_all_runs_one_in_turn(self):
        now, kept = inputs.digests(), []
        inputs.note(now, set(inputs.READ_BY), inputs.RECORD)
        for number in range(3):
            with mock.patch.dict(os.environ, {"USP_TEST_TURN": str(number), "USP_TEST_EVERYTHING": ""}), \
                    mock.patch.object(testing, "say"):
                kept += set(inputs.READ_BY) - set(testing._unchanged(now, self.root / "build", True))
                self.assertEqual(testing._unchanged(now, self.root / "build", False), sorted(inputs.READ_BY))
        self.assertEqual(sorted(kept), sorted(inputs.READ_BY))


if __name__ == "__main__":
    unittest.main()
