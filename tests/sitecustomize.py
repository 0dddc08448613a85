"""Holds the traces that tests have programs write to the rule of trace_format.py.

Python imports a module of this name at its start where PYTHONPATH has its folder, as in all tests,
and so in the ./book that they start. A run that a test makes lies in a temporary folder: as that is
removed, the traces in it are checked.
"""
import json
import tempfile
from pathlib import Path

import trace_format

remove = tempfile.TemporaryDirectory.cleanup


def hold_traces(folder):
    """AssertionError where a trace breaks the rule that a program has written, which writes
    start.json as well. One that was cut off is none."""
    for name in ("trace.json", "replay.json"):
        for path in Path(folder).rglob(name):
            if (path.parent / "start.json").is_file():
                try:
                    trace_format.check(path)
                except json.JSONDecodeError:
                    continue


def cleanup(self):
    try:
        hold_traces(self.name)
    finally:
        remove(self)


tempfile.TemporaryDirectory.cleanup = cleanup
