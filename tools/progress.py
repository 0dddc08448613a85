"""What `./book test` shows of a run of ctest: what is running, and how long the rest will take."""
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

from tools.base import ROOT

HISTORY = "test_durations.json"  # in the build folder: the seconds that tests took here
ROUGH = ROOT / "tests" / "durations.json"  # elsewhere, for a start
UNKNOWN_S = 10.0
FOLDER = "USP_PROGRESS"  # long tests write into files there, by their names, how far they are
START = re.compile(r"\s*Start\s+\d+: (\S+)")
END = re.compile(r"\s*\d+/\d+ Test\s+#\d+: (\S+) \.*.*?([\d.]+) sec\s*$")
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
        path.write_text(text, encoding="utf-8")
    except OSError:
        pass


def read_durations(path):
    """{test: seconds}, empty if there is no such file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in fields.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def in_words(seconds):
    """`40 s`, `7 min`, `1 h 5 min`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def seconds_left(waiting, running, jobs):
    """waiting: [(seconds, whether alone)]; running: the seconds that each still needs."""
    alone = sum(seconds for seconds, is_alone in waiting if is_alone)
    together = sum(seconds for seconds, is_alone in waiting if not is_alone)
    return alone + max([(sum(running) + together) / jobs, *running])


class Progress:
    """Reads what ctest prints, and says between its lines what is going on."""

    def __init__(self, folder, tests, note, jobs):
        self.history = folder / HISTORY
        self.notes = folder / "progress"
        self.note, self.jobs = note, jobs
        self.seconds = {**read_durations(ROUGH), **read_durations(self.history)}
        self.waiting = {test.name: test.is_serial for test in tests}
        self.running = {}
        self.total, self.done = len(tests), 0
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
        """One line of ctest."""
        start, end = START.match(line), END.match(line)
        with self.lock:
            if start:
                self.waiting.pop(start[1], None)
                self.running[start[1]] = time.monotonic()
                return
            self._clear()
            if end:
                self._end(end[1], float(end[2]))
                line = f"{line.rstrip()}{self._left(', ')}\n"
            sys.stdout.write(line)
            sys.stdout.flush()

    def _end(self, name, seconds):
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.done += 1
        known = read_durations(self.history)
        self.seconds[name] = known[name] = seconds
        _write(self.history, json.dumps(known, indent=1, sort_keys=True) + "\n")
        self.note(f"{self.done} of {self.total} tests{self._left(', ')}")

    def _left(self, before):
        """How long the rest will take, in words; nothing when nothing is left."""
        if not self.waiting and not self.running:
            return ""
        now = time.monotonic()
        seconds = seconds_left(
            [(self.seconds.get(name, UNKNOWN_S), alone) for name, alone in self.waiting.items()],
            [max(0, self.seconds.get(name, UNKNOWN_S) - now + since)
             for name, since in self.running.items()], self.jobs)
        return f"{before}about {in_words(seconds)} left"

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
