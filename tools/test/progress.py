"""What `./book test` shows of a run of ctest: what is running, and how long the rest will take.

    python3 -m tools.test.progress      how long tests have taken here becomes tests/durations.json
"""
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

from tools.base import ROOT, write_whole
from tools.run.steps import in_words
from tools.test import turns

HISTORY = "test_durations.json"  # in the build folder: the seconds that tests took here
ROUGH = ROOT / "tests" / "durations.json"  # elsewhere, for a start
FOLDER = "USP_PROGRESS"  # long tests write into files there, by their names, how far they are
START = re.compile(r"\s*Start\s+\d+: (\S+)")
END = re.compile(r"\s*\d+/\d+ Test\s+#\d+: (\S+) \.*.*?([\d.]+) sec\s*$")
COUNT = re.compile(r"\s*\d+/(\d+) Test\s+#|\d+% tests passed.* out of (\d+)\s*$")
TERMINAL_S, LOG_S = 1.0, 30.0


def writer(name):
    """A function that notes how far this process is, if a ./book test above it wants to know."""
    folder = os.environ.get(FOLDER)
    if not folder or not name:
        return lambda _text: None
    return lambda text: _write(Path(folder) / name, text.strip()[:60] + "\n")


def is_below_another():
    """Whether this process is a test of a ./book test above it."""
    return bool(os.environ.get(FOLDER))


def _write(path, text):
    try:
        write_whole(path, text)
    except OSError:
        pass


def read_durations(path):
    """{test: seconds}, empty if there is no such file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in fields.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def durations(folder):
    """{test: seconds} as they took here, or else where tests/durations.json was written."""
    return {**read_durations(ROUGH), **read_durations(folder / HISTORY)}


def note_seconds(folder, name, seconds):
    """For the next time, how long something took here."""
    known = {**read_durations(folder / HISTORY), name: round(seconds, 2)}
    _write(folder / HISTORY, json.dumps(known, indent=1, sort_keys=True) + "\n")


def record(folder, tests):
    """Writes to tests/durations.json how long these tests take here, their turns, a fault, and what is
    built for them; what has not run here stays as it was, and what is no test any more goes."""
    targets = {f"build.{target}" for test in tests.values() for target in test.targets}
    known = {*tests, *targets, "build", "fault"}
    found = {name: round(seconds, 1) for name, seconds in durations(folder).items()
             if name.partition("@")[0] in known}
    write_whole(ROUGH, json.dumps(found, indent=1, sort_keys=True) + "\n")


def seconds_left(waiting, running, jobs):
    """waiting: [(seconds, whether alone)]; running: the seconds that each still needs."""
    alone = sum(seconds for seconds, is_alone in waiting if is_alone)
    together = sum(seconds for seconds, is_alone in waiting if not is_alone)
    return alone + max([(sum(running) + together) / jobs, *running])


class Progress:
    """Reads what ctest prints, and says between its lines what is going on."""

    def __init__(self, folder, tests, note, jobs, summary=None, turn_of=None):
        """summary: keeps back the lines with which ctest ends. turn_of: {test: which of its turns}."""
        self.folder, self.summary = folder, summary
        self.notes = folder / "progress"
        self.note, self.jobs = note, jobs
        self.seconds, self.turn_of = durations(folder), turn_of or {}
        self.waiting = {test.name: test.is_serial for test in tests}
        self.running, self.passed = {}, set()
        self.total, self.done = len(tests), 0
        self.count = None  # of tests, as this ctest says it
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.is_terminal = sys.stderr.isatty()
        self.environment = {FOLDER: str(self.notes)}

    def __enter__(self):
        self.notes.mkdir(parents=True, exist_ok=True)
        for old in self.notes.iterdir():
            old.unlink()
        self.thread = threading.Thread(target=self._speak, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self._clear()

    def read_line(self, line):
        """One line of ctest. What a test has printed follows its line, and may be of a ctest too."""
        with self.lock:
            is_ours = self._is_ours(line)
            start, end = START.match(line), END.match(line) if is_ours else None
            if start and start[1] in self.waiting:
                self.waiting.pop(start[1])
                self.running[start[1]] = time.monotonic()
                return
            self._clear()
            if is_ours and self.summary and self.summary.keeps_back(line):
                return
            if end:
                self.passed.update({end[1]} if " Passed " in line else ())
                self._end(end[1], float(end[2]))
                line = f"{line.rstrip()}{self._left(', ')}\n"
            sys.stdout.write(line)
            sys.stdout.flush()

    def _is_ours(self, line):
        """Whether a line that counts tests counts ours: the first one of a run is ours."""
        count = COUNT.match(line)
        if count and self.count is None:
            self.count = count[1] or count[2]
        return not count or self.count in count.groups()

    def _end(self, name, seconds):
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.done += 1
        entry = turns.entry(name, self.turn_of.get(name))
        self.seconds[entry] = seconds
        note_seconds(self.folder, entry, seconds)
        self.note(f"{self.done} of {self.total} tests{self._left(', ')}")

    def _left(self, before):
        """How long the rest will take, in words; nothing when nothing is left."""
        if not self.waiting and not self.running:
            return ""
        now = time.monotonic()
        seconds = seconds_left(
            [(self._expected(name), alone) for name, alone in self.waiting.items()],
            [max(0, self._expected(name) - now + since) for name, since in self.running.items()],
            self.jobs)
        return f"{before}about {in_words(seconds)} left"

    def _expected(self, name):
        return turns.seconds_of(self.seconds, name, self.turn_of.get(name))

    def _speak(self):
        while not self.ended.wait(TERMINAL_S if self.is_terminal else LOG_S):
            with self.lock:
                if self.running:
                    self._say(self.status())

    def status(self):
        """What is running, since when, what it says of itself, and how long the rest will take."""
        now = time.monotonic()
        parts = []
        for name, since in self.running.items():
            part = f"{name} {in_words(now - since)}"
            try:
                part += f" ({(self.notes / name).read_text(encoding='utf-8').strip()})"
            except OSError:
                pass
            parts.append(part)
        return f"book: {self.done} of {self.total}; running {', '.join(parts)}{self._left('; ')}"

    def _say(self, text):
        if not self.is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write(f"\r\033[K{text[:width - 1]}")
        sys.stderr.flush()

    def _clear(self):
        if self.is_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


if __name__ == "__main__":
    from tools.run import build
    from tools.test import testing
    here = build.build_dir(build.RELEASE)
    record(here, testing.read_tests(here))
