"""Programs that are timed in turns: all of them run, and all but one are stopped.

What else a machine does changes within a minute. Programs timed one after the other meet different
machines; in turns of a few seconds they meet the same one.
"""
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tools.base import BookError
from tools.process import die_with_parent

WARM_UP_STEPS = 6  # compiled and allocated in them
MIN_STEPS = 2  # of a turn
POLL_S = 0.01


class Program:
    """A child process that appends a line of JSON to a file after every step, its `step_ms` among
    what the line says. `with` waits for its first steps and stops it, and ends it at last."""

    def __init__(self, command, env, folder, log=None):
        """folder: of this program alone. log: what it appends to, its standard output if None."""
        folder.mkdir()
        output, self._errors = folder / "output", folder / "errors"
        self._log = Path(log or output)
        with open(output, "wb") as out, open(self._errors, "wb") as errors:
            # In a process group of its own, whose processes are stopped together.
            self._child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                           stderr=errors, start_new_session=True,
                                           preexec_fn=die_with_parent)

    def __enter__(self):
        try:
            self._wait_for(WARM_UP_STEPS, 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self._child.poll() is None:
            self._signal(signal.SIGKILL)
            self._child.wait()

    def turn(self, seconds):
        """What its steps say of a turn of so many seconds, or of more where steps are long."""
        # The step that the last turn's end interrupted does not count.
        before = len(self.lines()) + 1
        self._signal(signal.SIGCONT)
        return self._wait_for(before + MIN_STEPS, seconds)[before:]

    def lines(self):
        """What all its steps so far say."""
        try:
            text = self._log.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        said = (json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines())
        return [line for line in said if "step_ms" in line]

    def _wait_for(self, steps, seconds):
        begin = time.monotonic()
        while True:
            lines = self.lines()
            if len(lines) >= steps and time.monotonic() - begin >= seconds:
                self._signal(signal.SIGSTOP)
                return lines
            if self._child.poll() is not None:
                raise BookError(f"{self._child.args[0]} ended with exit code "
                                f"{self._child.returncode} before it was told to:\n"
                                f"{self._errors.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)

    def _signal(self, number):
        os.killpg(self._child.pid, number)


def take(programs, seconds, turns):
    """Of every turn: {name: what the steps say}. programs: {name: Program}."""
    return [{name: program.turn(seconds) for name, program in programs.items()}
            for _ in range(turns)]
