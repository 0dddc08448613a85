"""What every module behind ./book shares: where the project lies, how it speaks, how it fails."""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class BookError(Exception):
    """Ends the launcher with one message: the rule, the value, a value that works.

    code: 1 = something went wrong while running, 2 = the command or its input was wrong.
    """

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


def say(message):
    """Says what the launcher itself is doing; stderr, so that a pipe holds results only."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)


def show_path(path):
    """The path as the user would type it: relative where it lies below the working directory."""
    path = Path(os.path.abspath(path))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
