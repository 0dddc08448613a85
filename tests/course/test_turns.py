"""Which long tests have their turn, and how many submissions pass until each has had one.

    python3 tests/course/test_turns.py        needs a configured build
"""
import os
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
from tools.test import budget, inputs, progress, testing, turns  # noqa: E402


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

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.scratch = Path(folder.name)
        self.timed = progress.read_durations(progress.ROUGH)
        try:
            self.tests = testing.read_tests(build.build_dir(build.RELEASE))
        except BookError:  # nothing is configured here: each test that has ever been timed
            self.tests = {name: testing.Test(name, {
                "only_in_all": True, "turns": testing.SANITIZED.get(name.rpartition(".")[2], (0,))[0]})
                for name in self.timed if "@" not in name and not name.startswith("build")}
        self.seconds = budget.planned(self.tests, self.timed)

    def submit(self, cases, targets, record, seconds):
        """One submission that has so many seconds, besides what every commit has to pass; the entries
        that ran."""
        in_order = turns.in_order(cases, record, targets)
        ran = [case.entries()[0] for case in in_order if case.test.startswith(budget.SANITIZERS)][:1]
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
        """By the durations of tests/durations.json."""
        faults = testing.read_faults()
        cases, targets = turns.cases_of(self.tests, self.seconds, faults), dict(faults)
        record, last, longest = turns.Record(self.scratch / "none"), {}, {}
        known = {entry for case in cases for entry in case.entries()}
        end = 4 * turns.WITHIN
        for submission in range(1, end + 1):
            for entry in self.submit(cases, targets, record, self.BUDGET_S - budget.USUAL_S):
                longest[entry] = max(longest.get(entry, 0), submission - last.get(entry, 0))
                last[entry] = submission
        late = {entry: wait for entry in known if (
            wait := max(longest.get(entry, 0), end + 1 - last.get(entry, 0))) > turns.WITHIN}
        self.assertEqual(late, {}, "a turn that never comes")

    def test_what_every_commit_has_to_pass_fits_into_its_minutes_with_six_of_them_for_faults(self):
        """By the durations of tests/durations.json, on two cores, beside each turn of each sanitizer."""
        usual = [name for name, test in self.tests.items() if not test.only_in_all and name != turns.FAULTS]
        for name in filter(lambda name: name.startswith(budget.SANITIZERS), self.tests):
            for turn in range(self.tests[name].turns):
                took = self.timed.get("build", 0) + budget.CHANGED_FAULTS_S + budget.expected_seconds(
                    self.seconds, self.tests, [*usual, name], {name: turn}, jobs=2)
                with self.subTest(turn=turns.entry(name, turn)):
                    self.assertLessEqual(took, budget.USUAL_S)
                    self.assertLessEqual(turns.seconds_of(self.seconds, name, turn), budget.SANITIZER_S)

    def test_no_source_is_compiled_for_a_share_alone(self):
        """Or a share would fail where a source no longer compiles, and the build would pass."""
        folder = build.build_dir(build.RELEASE)
        if not (folder / "build.ninja").is_file():
            self.skipTest("nothing is configured here")

        def sources(*targets):
            found = subprocess.run(["ninja", "-C", folder, "-t", "inputs", *targets], capture_output=True,
                                   text=True, check=True).stdout
            return {line for line in found.splitlines() if line.startswith(f"{ROOT}/") and line.endswith(".cpp")
                    and not line.startswith(f"{folder}/")}

        shares = {target for test in self.tests.values() if test.only_in_all for target in test.targets}
        self.assertEqual(sorted(sources(*sorted(shares)) - sources("all")), [])

    def test_what_has_never_been_timed_takes_as_long_as_its_kin(self):
        seconds = {"technique.a": 30.0, "technique.b": 50.0, "technique.b@1": 70.0, "course.x": 2.0}
        self.assertEqual(turns.seconds_of(seconds, "technique.c"), 50.0)
        self.assertEqual(turns.seconds_of(seconds, "technique.c", 1), 50.0)
        self.assertEqual([turns.seconds_of(seconds, "technique.b", turn) for turn in (None, 0, 1)], [50, 50, 70])
        self.assertEqual(turns.seconds_of(seconds, "parity.x"), turns.TEST_S)
        self.assertEqual(turns.seconds_of(seconds, "build.x", default=1.0), 1.0)

    def test_durations_are_recorded_by_test_turn_and_target_and_what_is_gone_goes(self):
        with mock.patch.object(progress, "ROUGH", self.scratch / "durations.json"):
            progress.ROUGH.write_text('{"a": 1.0, "gone": 2.0, "c@0": 3.0, "build.gone": 9.0}', encoding="utf-8")
            for name, took in (("a", 5.04), ("c@1", 6.0), ("build.x", 7.0), ("fault", 4.0)):
                progress.note_seconds(self.scratch, name, took)
            tests = {name: testing.Test(name, {"targets": ["x"]}) for name in "ac"}
            progress.record(self.scratch, tests)
            self.assertEqual(progress.read_durations(progress.ROUGH), {
                "a": 5.0, "c@0": 3.0, "c@1": 6.0, "build.x": 7.0, "fault": 4.0})

    def test_a_few_turns_of_a_sanitizer_try_all_of_its_cases_and_each_some_of_every_room(self):
        sources = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("technique/**/*.cpp")]
        test = testing.Test("technique.newest", {"sources": sources})
        for count, without in testing.SANITIZED.values():
            every = {source: testing.read_cases(source, without) for source in test.sources}
            shares = [set(testing.share_of({"t": test}, turn, count, without)["t"]) for turn in range(count)]
            self.assertEqual(set.union(*shares), {case for cases in every.values() for case in cases})
            for turn, share in enumerate(shares):
                self.assertLess(len(share), 1.2 / count * len(set.union(*shares)))
                for room in {source.parent for source, cases in every.items() if cases}:
                    cases = {case for source in every if source.parent == room for case in every[source]}
                    self.assertTrue(share & cases, f"turn {turn} has nothing of {room.name}")

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
