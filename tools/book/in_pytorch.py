"""What pages show "In PyTorch": run on ranks of gloo, compared with what this project computes, recorded.

    python3 -m tools.book.in_pytorch [ch06 ...]     without an argument: every chapter that has such lines

A chapter's examples/in_pytorch.py holds the lines, runs them on ranks of its own, and prints {"difference",
"compared", "ranks", "torch"}. Where the lines train a model, it prints {"steps": [[loss, gradient norm], ...],
"flags", "ranks", "torch"}, and the chapter's program, which must be built, trains the same model on the same
samples with these flags; the record has the program's ledger besides. The record, figures/in_pytorch.json, adds
the script's digest: a script that has changed since it ran, or that differs too much, fails
tests/course/test_form.py. Runs under the first Python that has torch: that of $USP_TORCH_PYTHON, or this one.
"""
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import chapters
from tools.base import ROOT, BookError, say, write_whole
from tools.book import short_runs
from tools.look import runs
from tools.run import build

SCRIPT, RECORD = "examples/in_pytorch.py", "figures/in_pytorch.json"
MODEL = ROOT / "tests/fixtures/llama_in_torch.py"  # what the scripts that train share
TOLERANCE = 1e-6
TIMEOUT_S = 300
# What both train: a tiny Llama of transformers' on made-up tokens.
FIXTURE = ROOT / "tests/data/llama/gqa"
SEQ_LEN, STEPS, WORDS = 16, 5, 64
FLAGS = {"dtype": "f64", "seq_len": SEQ_LEN, "steps": STEPS, "data_order": "sequential", "val_fraction": 0}


def digest(folder):
    """Of a chapter's script, and of what it shares with others."""
    text = (folder / SCRIPT).read_bytes()
    return hashlib.sha256(text + (MODEL.read_bytes() if MODEL.stem.encode() in text else b"")).hexdigest()


def tokens():
    """Ids below WORDS."""
    return [(7 * i * i + 3 * i + i // 5) % WORDS for i in range(2000)]


def trained(program, ranks, flags):
    """([[loss, gradient norm], ...] of the steps of a chapter's program, {message: what rank 0 sent})."""
    with tempfile.TemporaryDirectory(prefix="book_torch_") as scratch:
        data = Path(scratch) / "tokens.bin"
        data.write_bytes(struct.pack(f"<{len(tokens())}H", *tokens()))

        def look(run_dir):
            path = run_dir / "ledger.json"  # one rank alone has none
            sent = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            return ([[record["loss"], record["grad_norm"]] for record in runs.read_metrics(run_dir)[0]],
                    {name: {what: entry[what] for what in ("calls", "payload_bytes", "wire_bytes")}
                     for name, entry in sent.items()})
        return short_runs.look_into(program, ranks, look, model=FIXTURE, data=data, **FLAGS, **flags)


def apart(steps, others):
    """The largest relative difference of losses and gradient norms; infinite where one is missing or NaN."""
    if len(steps) != len(others):
        return float("inf")
    found = [abs(a - b) / abs(b) for step, other in zip(steps, others) for a, b in zip(step, other)]
    return max(found) if all(map(math.isfinite, found)) else float("inf")


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
    if "steps" in found:
        ours, ledger = trained(build.binary(build.RELEASE, chapter.name), found["ranks"], found["flags"])
        found.update({"difference": apart(found["steps"], ours), "compared": 2 * len(ours), "ledger": ledger})
    write_whole(folder / RECORD, json.dumps({**found, "digest": digest(folder)}, indent=1) + "\n")
    wrong = problem(folder)
    if wrong:
        raise BookError(f"{chapter.short}: {wrong}")
    say(f"book: {chapter.short}: {found['compared']} compared, at most {found['difference']:.1e} apart")


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
