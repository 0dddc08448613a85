"""Whose turn it is among tests that take long. tests/turns.json counts the submissions, and says in
which of them each case last ran; orders, seeds and shares follow that count, not a commit or a clock.

A case is a test that only `./book test --all` runs, one of the turns of a test whose long cases take
turns, or a seeded fault.
"""
import json
from dataclasses import dataclass

from tools.base import ROOT, BookError, write_whole

RECORD = ROOT / "tests" / "turns.json"
TURNS = 4   # so many try all long cases of a test: kTurns in tests/technique/case_cover.h
WITHIN = 5  # so many submissions run every case
BATCH_S = 240.0      # cases are built and run together up to this time
FAULTS_TOGETHER = 6  # seeded faults, of one target where there are as many
FAULTS = "faults"    # the test that plants them
FAULT_S, BUILD_S, TEST_S = 7.0, 10.0, 10.0  # of what has never been timed, nor anything of its kind


@dataclass(frozen=True)
class Case:
    """What is run for one entry of the record, or several seeded faults, with as many entries."""
    test: str
    seconds: float
    turn: int = None     # which one of a test that has several
    faults: tuple = ()

    def entries(self):
        """What the record calls it."""
        if self.faults:
            return [f"{self.test}:{fault}" for fault in self.faults]
        return [entry(self.test, self.turn)]


def entry(test, turn=None):
    """What records call a test, or one of its turns."""
    return test if turn is None else f"{test}@{turn}"


def seconds_of(seconds, test, turn=None, default=TEST_S):
    """How long a test or one of its turns takes, by {entry: seconds}: what has never been timed takes
    as long as those of its kind do, on average."""
    known = seconds.get(entry(test, turn), seconds.get(test))
    if known is None:
        kind = test.partition(".")[0]
        kin = [took for name, took in seconds.items() if name.startswith(f"{kind}.")]
        known = sum(kin) / len(kin) if kin else default
    return known


class Record:
    """tests/turns.json"""

    def __init__(self, path=None):
        self.path = path or RECORD
        try:
            fields = json.loads(self.path.read_text(encoding="utf-8"))
            self.submissions, self.ran = int(fields["submissions"]), dict(fields["ran"])
        except FileNotFoundError:
            self.submissions, self.ran = 0, {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BookError(f"cannot read {self.path}: {error!r}; git checkout {self.path}")

    def last(self, case):
        """The submission in which the case, or that of its faults which has waited longest, ran."""
        return min(self.ran.get(entry, 0) for entry in case.entries())

    def note(self, entries, known):
        """One more submission, in which these ran; what is not known any more is forgotten."""
        self.submissions += 1
        self.ran.update(dict.fromkeys(entries, self.submissions))
        self.ran = {entry: at for entry, at in sorted(self.ran.items()) if entry in known}

    def write(self):
        """With a line for each case, so that two branches merge."""
        write_whole(self.path, json.dumps({"submissions": self.submissions, "ran": self.ran},
                                          indent=0) + "\n")


def cases_of(tests, seconds, with_faults=()):
    """All cases. tests: {name: testing.Test}; seconds: how long tests take, by their names;
    with_faults: [(name, target)] of the seeded faults."""
    found = []
    for name, test in tests.items():
        if test.turns:
            found += [Case(name, seconds_of(seconds, name, turn), turn) for turn in range(test.turns)]
        elif test.takes_turns:
            found.append(Case(name, seconds_of(seconds, name)))
    each = seconds.get("fault", FAULT_S)
    found += [Case(FAULTS, each, faults=(name,)) for name, _ in with_faults]
    return found


def in_order(cases, record, targets=None):
    """Longest unrun first; among equals the first turns of tests, and faults last: several of these
    are one case then. targets: {fault: the executable that it needs built}."""
    targets = targets or {}
    rest = sorted((case for case in cases if not case.faults),
                  key=lambda case: (record.last(case), case.turn or 0))
    planted = sorted((case for case in cases if case.faults), key=lambda case: (
        record.last(case), targets.get(case.faults[0], ""), case.faults))
    together = [planted[i:i + FAULTS_TOGETHER] for i in range(0, len(planted), FAULTS_TOGETHER)]
    groups = [Case(FAULTS, sum(case.seconds for case in some),
                   faults=tuple(case.faults[0] for case in some)) for some in together]
    return sorted(rest + groups, key=lambda case: (record.last(case), bool(case.faults)))


def next_batch(waiting, seconds_left, cost=lambda case: case.seconds):
    """The next cases that are run together, as many as fit: those of one turn, whatever waits
    longest first; one that takes longer than is left waits for the next submission, and a shorter
    one takes its place. Empty where none fits."""
    batch, used = [], 0.0
    for case in waiting:
        took = cost(case)
        if used + took > seconds_left or (batch and used + took > BATCH_S):
            if batch:
                break
            continue
        if batch and (bool(case.faults), case.turn) != (bool(batch[0].faults), batch[0].turn):
            break
        batch.append(case)
        used += took
    return batch
