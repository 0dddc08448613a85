"""What pages show "In PyTorch": run on ranks of gloo, compared with what this project computes, recorded.

    python3 -m tools.book.in_pytorch [ch06 ...]     without an argument: every chapter that has such lines

A chapter's examples/in_pytorch.py holds the lines, runs them on ranks of its own, and prints {"difference",
"compared", "ranks", "torch"}. The record, figures/in_pytorch.json, adds the script's digest: a script that has
changed since it ran, or that differs too much, fails tests/course/test_form.py. Runs under the first Python
that has torch: that of $USP_TORCH_PYTHON, or this one.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile

from tools import chapters
from tools.base import BookError, say, write_whole

SCRIPT, RECORD = "examples/in_pytorch.py", "figures/in_pytorch.json"
TOLERANCE = 1e-6
TIMEOUT_S = 300


def digest(folder):
    """Of a chapter's script."""
    return hashlib.sha256((folder / SCRIPT).read_bytes()).hexdigest()


def problem(folder):
    """What is wrong with a chapter's record, "" if nothing is or where there is no script."""
    if not (folder / SCRIPT).exists():
        return ""
    again = f"python3 -m tools.book.in_pytorch {folder.name[:4]}"
    if not (folder / RECORD).exists():
        return f"{SCRIPT} has not run: {again}"
    found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if found["digest"] != digest(folder):
        return f"{SCRIPT} has changed since it ran: {again}"
    if not (found["compared"] > 0 and found["difference"] <= TOLERANCE):
        return f"{SCRIPT} is {found['difference']:g} apart, at most {TOLERANCE:g}"
    return ""


def python_with_torch():
    """The path of a Python; BookError if none has torch."""
    for python in filter(None, (os.environ.get("USP_TORCH_PYTHON"), sys.executable)):
        tried = subprocess.run([python, "-c", "import torch.distributed"], capture_output=True, check=False)
        if tried.returncode == 0:
            return python
    raise BookError("no torch here; install it, or name a Python that has it: "
                    "USP_TORCH_PYTHON=/tmp/venv/bin/python")


def record(chapter, python):
    """Runs a chapter's script and writes what it found."""
    folder = chapter.folder
    with tempfile.TemporaryDirectory(prefix="book_torch_") as scratch:
        ran = subprocess.run([python, str(folder / SCRIPT), scratch], capture_output=True, text=True,
                             timeout=TIMEOUT_S, check=False)
    if ran.returncode != 0:
        raise BookError(f"{chapter.short}: {SCRIPT} ended with exit code {ran.returncode}:\n{ran.stderr}")
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    write_whole(folder / RECORD, json.dumps({**found, "digest": digest(folder)}, indent=1) + "\n")
    wrong = problem(folder)
    if wrong:
        raise BookError(f"{chapter.short}: {wrong}")
    say(f"book: {chapter.short}: {found['compared']} tensors, at most {found['difference']:.1e} apart")


def main(arguments):
    """Runs them; the exit code."""
    wanted = [chapters.resolve(name) for name in arguments] or chapters.find_chapters()
    python = python_with_torch()
    for chapter in wanted:
        if (chapter.folder / SCRIPT).exists():
            record(chapter, python)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BookError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
