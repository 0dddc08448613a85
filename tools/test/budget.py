"""`./book test --all --minutes M`: what must pass on every commit, then the cases that have waited
longest, as long as there is time; and ctest's summary of all that as one."""
import json
import re
import time

from tools.base import BookError, say
from tools.run import build
from tools.test import progress, turns

USUAL_S = 25 * 60       # for what every commit has to pass, the build included
CHANGED_FAULTS_S = 360  # of these, at most, for the seeded faults that have changed; the others wait
LEAST_FAULTS_S = 60     # at least for these faults, even where the 25 minutes are used
SANITIZER_S = 360       # of these, for a turn of a sanitizer on half of the cores, its build included
DAILY_FAULTS_S = 120    # the same in ./book test
TRIED = "tried.json"    # in the work folder of faults: the names of those that the last run tried
SANITIZERS = "sanitize."
SANITIZER_TURN = "USP_SANITIZER_TURN"  # which of its turns a sanitizer takes; unset: all
CLOSING = re.compile(r"\d+% tests passed")
RESULT = re.compile(r"\s*\d+/\d+ Test\s+#(\d+): (\S+) \.*\s*(?:(Passed)|\*\*\*(\S.*?))\s+[\d.]+ sec")


class Summary:
    """Reads what ctest prints in several runs, keeps back how each ends, and says how all did."""

    def __init__(self):
        self.begin, self.tests, self.failed, self.is_closing = time.monotonic(), 0, [], False

    def begin_run(self):
        """Another run of ctest."""
        self.is_closing = False

    def keeps_back(self, line):
        """Whether the line is one of those with which a run ends."""
        result = RESULT.match(line)
        if result and not self.is_closing:
            self.tests += 1
            if not result[3] and "Skipped" not in result[4]:
                self.add_failed(result[2], result[4], int(result[1]))
        self.is_closing = self.is_closing or CLOSING.match(line) is not None
        return self.is_closing

    def add_failed(self, name, why, number=0):
        """A test that failed, which keeps_back() has counted."""
        self.failed.append((number, name, why))

    def text(self):
        """The lines with which ctest would have ended one run of all."""
        passed = self.tests - len(self.failed)
        lines = ["", f"{100 * passed // max(1, self.tests)}% tests passed, {len(self.failed)} tests "
                 f"failed out of {self.tests}", "",
                 f"Total Test time (real) = {time.monotonic() - self.begin:7.2f} sec"]
        if self.failed:
            lines += ["", "The following tests FAILED:",
                      *(f"\t{number:3} - {name} ({why})" for number, name, why in self.failed),
                      "Errors while running CTest"]
        return "\n".join(lines)


def planned(tests, seconds):
    """The {entry: seconds} with what a turn of a sanitizer may take, where that has never been timed."""
    may = {turns.entry(name, turn): SANITIZER_S for name, test in tests.items()
           if name.startswith(SANITIZERS) for turn in range(test.turns)}
    return {**may, **seconds}


def expected_seconds(seconds, tests, names, turn_of, jobs):
    """How long these tests take together, by {entry: seconds}."""
    return progress.seconds_left(
        [(turns.seconds_of(seconds, name, turn_of.get(name)), tests[name].is_serial) for name in names],
        [], jobs)


def _sanitizer_env(turn_of):
    return {SANITIZER_TURN: str(turn) for name, turn in turn_of.items() if name.startswith(SANITIZERS)}


class Run:
    """The cases of one `./book test` with --minutes, which lie between `begin` and `end`. ctest:
    called with names of tests, what to add to the environment and {test: which of its turns}, prints
    what ctest does but for its summary, and returns its exit code."""

    def __init__(self, preset, tests, faults, begin, end, jobs, ctest, summary):
        self.preset, self.tests, self.jobs = preset, tests, jobs
        self.begin, self.end = begin, end
        self.ctest, self.summary = ctest, summary
        self.folder = build.build_dir(preset)
        self.record = turns.Record()
        self.seconds = planned(tests, progress.durations(self.folder))
        self.targets = dict(faults)  # {fault: the executable that it needs}
        self.cases = turns.cases_of(tests, self.seconds, faults)
        self.built, self.pace, self.code, self.ran = {}, 1.0, 0, []

    def run_usual(self, names):
        """First what every commit has to pass, with a turn of a sanitizer; then the seeded faults that
        have changed, in what is left of its minutes. Returns the seconds since the begin."""
        sanitizers = [case for case in self.waiting() if case.test.startswith(SANITIZERS)][:1]
        turn_of = {case.test: case.turn for case in sanitizers}
        tests = [*(name for name in names if name != turns.FAULTS), *turn_of]
        began = time.monotonic()
        expected = expected_seconds(self.seconds, self.tests, tests, turn_of, self.jobs)
        if tests:
            self._note(self.ctest(tests, _sanitizer_env(turn_of), turn_of), sanitizers)
        # Estimates are of another machine.
        self.pace = min(4.0, max(0.8, (time.monotonic() - began) / max(1.0, expected)))
        if turns.FAULTS in names:
            left = self.begin + USUAL_S - time.monotonic()
            seconds = round(min(CHANGED_FAULTS_S, max(LEAST_FAULTS_S, left)))
            self._note(self.ctest([turns.FAULTS], {"USP_FAULT_SECONDS": str(seconds)}, {}), [])
            self._note_tried()
        return time.monotonic() - self.begin

    def run_waiting(self):
        """Then cases, until what is next does not fit into what is left."""
        while batch := turns.next_batch(self.waiting(), self.end - time.monotonic(), self._cost):
            self._run_batch(batch)

    def waiting(self):
        """What has not run, in its order."""
        done = set(self.ran)
        return turns.in_order([case for case in self.cases if not done & set(case.entries())],
                              self.record, self.targets)

    def left(self):
        """What has not run, in words."""
        waiting = self.waiting()
        faults = sum(len(case.faults) for case in waiting)
        names = [entry for case in waiting if not case.faults for entry in case.entries()]
        if not waiting:
            return "every case has run"
        oldest = self.record.last(waiting[0])
        since = f"has waited since submission {oldest}" if oldest else "has never run"
        return (f"the minutes are used; {len(names)} cases and {faults} seeded faults wait for the next "
                f"submissions, and the first of them {since}"
                + (f": {' '.join(names)}" if names else ""))

    def write_record(self):
        """Counts this submission, and says what ran in it."""
        self.record.note(self.ran, {entry for case in self.cases for entry in case.entries()})
        self.record.write()

    def _cost(self, case):
        """Seconds, the build included where there is something to build."""
        if case.faults:
            return self.pace * case.seconds
        for target in self.tests[case.test].targets:
            if target not in self.built:
                self.built[target] = build.is_up_to_date(self.preset, [target])
        unbuilt = [target for target in self.tests[case.test].targets if not self.built[target]]
        return self.pace * (case.seconds + sum(
            turns.seconds_of(self.seconds, f"build.{target}", default=turns.BUILD_S) for target in unbuilt))

    def _run_batch(self, batch):
        first = batch[0]
        if first.faults:
            begin = time.monotonic()
            names = [fault for case in batch for fault in case.faults]
            self._note(self.ctest([turns.FAULTS], {"USP_FAULTS": " ".join(names)}, {}), batch)
            progress.note_seconds(self.folder, "fault", (time.monotonic() - begin) / len(names))
            return
        targets = sorted({target for case in batch for target in self.tests[case.test].targets})
        unbuilt = [target for target in targets if not self.built.get(target)]
        begin = time.monotonic()
        try:
            if targets:
                build.prepare(self.preset, targets, jobs=self.jobs)
        except BookError as error:
            say(f"error: {error}")
            for case in batch:
                self.summary.tests += 1
                self.summary.add_failed(case.test, "Not Run")
            self._note(8, batch)
            return
        for target in unbuilt:
            progress.note_seconds(self.folder, f"build.{target}", (time.monotonic() - begin) / len(unbuilt))
        self.built.update(dict.fromkeys(targets, True))
        turn_of = {case.test: case.turn for case in batch}
        env = {"USP_TEST_ALL": "1"}
        if first.turn is not None:
            env.update(USP_TEST_FULL="in_turns", USP_TEST_TURN=str(first.turn), **_sanitizer_env(turn_of))
        self._note(self.ctest(list(turn_of), env, turn_of), batch)

    def _note(self, code, cases):
        self.code = self.code or code
        self.ran += [entry for case in cases for entry in case.entries()]

    def _note_tried(self):
        """Those of the seeded faults that have changed, as far as their time went."""
        path = self.folder / "faults" / TRIED
        if path.is_file():
            self.ran += [f"{turns.FAULTS}:{name}" for name in json.loads(path.read_text(encoding="utf-8"))]
