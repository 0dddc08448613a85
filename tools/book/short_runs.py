"""Runs of a few steps of a chapter's trainer, and Markdown tables, for the chapters' figures."""
import json
import tempfile
import textwrap
from pathlib import Path

from tools.book.showcase import output_of
from tools.look import runs
from tools.run import estimates

QUIET = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}


def run(program, ranks, **flags):
    """(records of metrics.jsonl, ledger.json of rank 0) of a run on so many ranks."""
    return look_into(program, ranks, lambda run_dir: (
        runs.read_metrics(run_dir)[0],
        json.loads((run_dir / "ledger.json").read_text(encoding="utf-8"))), **flags)


def look_into(program, ranks, look, **flags):
    """look(run directory) of a run on so many ranks, while the directory exists."""
    with tempfile.TemporaryDirectory(prefix="book_short_") as scratch:
        run_dir = Path(scratch) / "run"
        output_of(program, estimates.words_of({**QUIET, **flags, "run_dir": run_dir}), ranks)
        return look(run_dir)


def table(head, rows, lesson=""):
    """Markdown of a table, and a paragraph below it in lines that a page may have."""
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(row) for row in rows)]
    text = "".join(f"| {line} |\n" if number != 1 else f"|{line}|\n"
                   for number, line in enumerate(lines))
    return text + (f"\n{textwrap.fill(lesson, 116, break_long_words=False, break_on_hyphens=False)}"
                   "\n" if lesson else "")
