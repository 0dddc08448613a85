"""`--with exercises`: a copy of the sources in which chapters call what a reader has written.

An exercise that stands for something in its chapter has exN_name.patch beside it: a diff that lets
the chapter include the reader's file and call its functions. The copy lies in build/exercises/copy
and is a checkout like any other: the same ./book runs and tests it.
"""
import functools
import importlib.util
import os
import sys

from tools.base import ROOT, BookError, say
from tools.exercise import exercises
from tools.process import wait_for

COPY = ROOT / "build" / "exercises" / "copy"


def load_module(name, path):
    """A Python file that lies in no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=None)
def fault_runner():
    """tests/faults/run.py: it copies the sources, and reads the kind of diff that patches are."""
    return load_module("usp_faults", ROOT / "tests" / "faults" / "run.py")


def run_in_copy(arguments):
    """Runs ./book with these arguments in a copy where the reader's code is in place; returns its
    exit code. BookError (2) where no exercise is solved that a chapter could call."""
    chosen = replaceable()
    taken = [exercise for exercise in chosen if not exercise.is_unsolved()]
    if not taken:
        names = ", ".join(exercise.name for exercise in chosen) or "none"
        raise BookError("no exercise is begun whose code a chapter could call; there are: "
                        + names, 2)
    write_copy(taken)
    for exercise in taken:
        say(f"book: {exercise.name}: {exercise.chapter.short} calls your "
            f"{', '.join(exercise.functions())}")
    return run_book(arguments)


def run_book(arguments):
    """Runs the copy's ./book; returns its exit code."""
    code, _ = wait_for([sys.executable, str(COPY / "book"), *arguments],
                       {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    return code if code >= 0 else 128 - code


def replaceable(root=ROOT):
    """The exercises that have a patch."""
    return [exercise for exercise in exercises.find_exercises(root)
            if exercise.beside(".patch").is_file()]


def patched_texts(taken, root=ROOT):
    """{path: its text} of the files in which chapters call these exercises. BookError if a patch no
    longer fits."""
    faults, texts = fault_runner(), {}
    for exercise in taken:
        path = exercise.beside(".patch")
        try:
            hunks = faults.parse_diff(path.read_text(encoding="utf-8"), path.name)
        except faults.FaultError as error:
            raise BookError(str(error))
        for name, before, after in hunks:
            text = texts.get(name) or (root / name).read_text(encoding="utf-8")
            if ("\n" + text).count("\n" + before) != 1:
                raise BookError(f"{path}: {name} does not hold these lines once:\n{before}")
            texts[name] = ("\n" + text).replace("\n" + before, "\n" + after)[1:]
    return texts


def write_copy(taken, answers=None):
    """Brings the copy up to date; a file is written only where its content differs. answers:
    {the file of one: its text there} instead of the reader's."""
    faults, texts = fault_runner(), patched_texts(taken)
    texts.update({str(path.relative_to(ROOT)): text for path, text in (answers or {}).items()})
    files = faults.list_files(ROOT)
    for path in files:
        content = (texts[str(path)].encode() if str(path) in texts else (ROOT / path).read_bytes())
        copied = COPY / path
        if faults.read_if_there(copied) != content:
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(content)
            copied.chmod((ROOT / path).stat().st_mode)
    for path in set(faults.list_tree(COPY)) - set(files):
        (COPY / path).unlink()
