"""Reads what a run has written: run.json, metrics.jsonl and the `done` mark."""
import json
from pathlib import Path

from tools.base import ROOT, BookError, show_path

NON_FINITE = {"nan", "-nan", "inf", "-inf"}


class Value(float):
    """A number that remembers how it was written, because equal bits means equal text."""

    def __new__(cls, text):
        value = super().__new__(cls, text)
        value.text = text
        return value


def next_run_dir(chapter, root=ROOT):
    """The first runs/chNN/001, 002, ... that does not exist. Nothing is created."""
    folder = root / "runs" / chapter.short
    number = 1
    while (folder / f"{number:03d}").exists():
        number += 1
    return folder / f"{number:03d}"


def reserve_run_dir(chapter, root=ROOT):
    """Creates the next run directory; two launchers at the same time get two of them."""
    while True:
        path = next_run_dir(chapter, root)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise BookError(f"cannot create the run directory {show_path(path)}: {error.strerror}; "
                            "name another one with `-- --run_dir DIR`")


def existing(run_dir):
    """The run directory that was typed; BookError (2), which names those that are there, where
    there is none."""
    path = Path(run_dir)
    if path.is_dir():
        return run_dir
    try:
        found = sorted(entry.name for entry in path.parent.iterdir()
                       if entry.is_dir() and (entry / "run.json").is_file())
    except OSError:
        found = []
    there = (f"{show_path(path.parent)} has {found[0]}" + (
        f" to {found[-1]}" if len(found) > 1 else "")) if found else "./book run makes one"
    raise BookError(f"there is no run {show_path(path)}; {there}", 2)


def newest_checkpoint(run_dir):
    """The directory of a run's newest checkpoint, None if it has none."""
    return max(Path(run_dir).glob("checkpoints/step-*[0-9]"), default=None)


def newest_with_checkpoint(chapter, root=ROOT):
    """The run of a chapter whose newest checkpoint is the last that was written, or None."""
    found = {path: newest_checkpoint(path) for path in (root / "runs" / chapter.short).glob("*")}
    return max((path for path in found if found[path]),
               key=lambda path: found[path].stat().st_mtime_ns, default=None)


def ranks_of_checkpoint(run_dir):
    """How many ranks have written a run's newest checkpoint, None where it does not say."""
    newest = newest_checkpoint(run_dir) or Path(run_dir)
    try:
        return int(json.loads((newest / "checkpoint.json").read_text(encoding="utf-8"))["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_metrics(run_dir):
    """(records of metrics.jsonl, warnings). Every number in them is a Value.

    A last line without its end is what a killed run leaves: it is dropped with a warning. BookError
    (2) if the file is not there, is empty, or is broken anywhere else.
    """
    path = Path(run_dir) / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BookError(f"{show_path(run_dir)} holds no run that can be read: metrics.jsonl: "
                        f"{error.strerror}", 2)
    records, warnings = [], []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_parse_record(line))
        except ValueError as error:
            if number == len(lines):  # no newline after it
                warnings.append(f"{show_path(path)}:{number}: the last line is cut off and left "
                                "out; was the run killed?")
            else:
                raise BookError(f"{show_path(path)}:{number}: {error}", 2)
    if not records:
        raise BookError(f"{show_path(path)} holds no complete step", 2)
    return records, warnings


def _parse_record(line):
    """One line of metrics.jsonl; ValueError unless it is an object with a step and a loss."""
    record = json.loads(line, parse_float=Value, parse_int=Value, parse_constant=Value)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    record = {key: Value(value) if isinstance(value, str) and value in NON_FINITE else value
              for key, value in record.items()}
    for key in ("step", "loss"):
        if not isinstance(record.get(key), Value):
            raise ValueError(f"no number called {key!r}")
    return record


def read_run(run_dir):
    """run.json as a dictionary. BookError (2) if it is not there or broken."""
    path = Path(run_dir) / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BookError(f"{show_path(run_dir)} holds no run that can be read: run.json: "
                        f"{error.strerror}", 2)
    except ValueError as error:
        raise BookError(f"{show_path(path)}: {error}", 2)
    if not isinstance(run, dict):
        raise BookError(f"{show_path(path)}: not a JSON object", 2)
    return run


def done_stamp(run_dir):
    """What changes when a run writes its `done` mark anew; None while there is no mark."""
    try:
        status = (Path(run_dir) / "done").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def done_text(run_dir):
    """The line in the `done` mark, such as "finished"."""
    return (Path(run_dir) / "done").read_text(encoding="utf-8", errors="replace").strip()
