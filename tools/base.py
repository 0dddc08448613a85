"""What every module behind ./book shares: where the project lies, how it speaks, how it fails."""
import contextlib
import os
import shutil
import signal
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
    flush(sys.stdout)
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError as error:
        drop(sys.stderr, error)


_dropped = {}  # {stream: why it could not be written}


def drop(stream, error):
    """What is written to this stream from now on goes nowhere: its reader has gone, its disk is
    full. The work goes on, and end_output() tells of it."""
    _dropped.setdefault(stream, error)
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def is_dropped(stream):
    return stream in _dropped


def has_no_reader(stream):
    """Is it a pipe that somebody has closed at its other end?"""
    return isinstance(_dropped.get(stream), BrokenPipeError)


def watch(stream):
    """From now on a stream that cannot be written is dropped; who wrote gets the OSError."""
    def guarded(method):
        def call(*arguments):
            try:
                return method(*arguments)
            except OSError as error:
                drop(stream, error)
                raise
        return call
    stream.write, stream.flush = guarded(stream.write), guarded(stream.flush)


def flush(stream):
    """Writes what is in the stream's buffer, or drops the stream."""
    try:
        stream.flush()
    except OSError as error:
        drop(stream, error)


def end_output(code):
    """The exit code of a command that would end with this one, once all is written. Who closed the
    pipe has seen enough; anything else that keeps results from their reader is an error."""
    flush(sys.stdout)
    error = _dropped.get(sys.stdout)
    if error is None:
        return code
    if isinstance(error, BrokenPipeError):
        return code or 128 + signal.SIGPIPE
    say(f"error: standard output could not be written: {error.strerror}")
    return code or 1


def show_path(path):
    """The path as the user would type it: relative where it lies below the working directory."""
    path = Path(os.path.abspath(path))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@contextlib.contextmanager
def beside(path):
    """The path of a file or folder to make beside this one, which it replaces once all is well.
    Until then, and after an error or Ctrl-C, what was there is there."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path  # a pipe or a device takes what is written to it
        return
    path = Path(os.path.realpath(path))
    new, old = (path.with_name(f".{path.stem}.{word}{path.suffix}") for word in ("new", "old"))
    _remove(new)  # of somebody who was killed
    if old.exists() and not path.exists():
        os.rename(old, path)
    try:
        yield new
        if path.is_dir() and not new.is_dir():
            raise BookError(f"{show_path(path)} is a directory, and what is to be written there is "
                            "a file; name a file in it", 2)
        if path.is_dir():
            _remove(old)
            os.rename(path, old)
        elif path.is_file():
            shutil.copymode(path, new)
        os.replace(new, path)
        _remove(old)
    finally:
        _remove(new)


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path, content):
    """Writes text or bytes; a file that was there is replaced whole or not at all."""
    with beside(path) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
