"""What a build shows of itself: how many of its steps are done, and how long the rest will take."""
import os
import re
import sys
import time

from tools.base import say

STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")
# Seconds of a core that a step takes, by the first of these words in it, where this folder has no
# record of it. What they come to is corrected as soon as steps are done.
ROUGH_S = ((".gch", 3.0), ("Unity", 6.0), ("Linking", 0.5), ("Building", 2.0), ("", 0.2))
ANNOUNCED_S = 20.0  # a build that takes longer says so before it begins
TERMINAL_S, LOG_S = 0.2, 15.0


def in_words(seconds):
    """`40 s`, `7 min`, `1 h 5 min`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def read_log(folder):
    """{what a step makes: the seconds that it took} of the builds in a folder."""
    found = {}
    try:
        lines = (folder / ".ninja_log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split("\t")
        if len(fields) == 5 and fields[0].isdigit() and fields[1].isdigit():
            found[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return found


class Steps:
    """Reads what Ninja prints of steps that are `pending`, and says between how far it is."""

    def __init__(self, pending, folder, jobs, live, clock=time.monotonic):
        known = read_log(folder)
        self.seconds = {step: self._expected(step, known) for step in pending}
        self.total, self.left = sum(self.seconds.values()), sum(self.seconds.values())
        self.jobs, self.live, self.clock = jobs, live and sys.stderr.isatty(), clock
        self.begin = self.spoke = clock()
        if self.total / jobs > ANNOUNCED_S:
            say(f"book: {len(pending)} steps to build, about {in_words(self.total / jobs)}")

    @staticmethod
    def _expected(step, known):
        made = step.rpartition(" ")[2]
        return known.get(made) or next(s for word, s in ROUGH_S if word in step)

    def read_line(self, line):
        """One line of Ninja; says how far it is where that has not been said for a while."""
        found = STATUS.match(line)
        if not found:
            return
        now = self.clock()
        self.left -= self.seconds.pop(found[3].strip(), 0)
        if now - self.spoke < (TERMINAL_S if self.live else LOG_S):
            return
        self.spoke = now
        self._say(f"book: built {found[1]} of {found[2]}{self.left_in_words(now)}: {found[3]}")

    def left_in_words(self, now):
        """`, about 40 s left`, by what the steps until now took beside what was expected of them."""
        done = self.total - self.left
        if done <= 0:
            return ""
        return f", about {in_words((now - self.begin) * self.left / done)} left"

    def _say(self, text):
        if not self.live:
            say(text[:110])
            return
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write(f"\r\033[K{text[:width - 1]}")
        sys.stderr.flush()

    def end(self):
        """Clears what stands on the terminal."""
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
