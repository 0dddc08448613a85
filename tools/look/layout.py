"""`./book layout RUN_DIR`: what each dimension of a run's layout sent, over which links, and what was waited for.

The messages are those of rank 0 in the steps that trace.json holds, but for the last one: what it sends may be waited for,
and recorded, in the step after it. Which of their bytes go to other nodes says
ledger.json, by group and kind of operation; what a formula says of a step stands in report.md.
"""
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tools.base import BookError, show_path
from tools.look import trace as traces

# The dimension that a group belongs to, by the first word of its name; others are all ranks of a stage or of the run.
DIMENSION = {"tp": "tp", "cp": "cp", "dp": "dp", "edp": "dp", "shard": "dp", "ep": "ep", "pp": "pp",
             "embedding": "pp", "mirror": "pp"}
OTHERS = "all"
ORDER = ("dp", "tp", "cp", "pp", "ep", OTHERS)
DECLARED = re.compile(r"^\| (?:gradients(?:, weights)? sent|\w+ sent over (\w+)) \| (\d+) bytes a step by rank 0, "
                      r".*?(?:by formula|with even load) (\d+)", re.M)


class Row(NamedTuple):
    """A dimension in a step: bytes and messages of rank 0, microseconds of exposed communication of all ranks."""

    dimension: str
    messages: float
    inside: float  # bytes to ranks of its node
    outside: float  # bytes to other nodes
    exposed_mean: float
    exposed_most: float
    declared: tuple  # (bytes that the report counts, bytes by its formula), None where it has no row


def dimension_of(group):
    """Of a group, by its name in the ledger, such as "cp_ring"."""
    return DIMENSION.get(group.split("_")[0], OTHERS)


def declared(report):
    """{dimension: (counted, by formula)} of report.md: bytes that rank 0 sends in a step."""
    return {match[1] or "dp": (int(match[2]), int(match[3])) for match in DECLARED.finditer(report)}


def shares_outside(ledger):
    """{"dp.all_reduce": the share of its bytes that goes to other nodes}."""
    return {name: entry["net_bytes"] / entry["wire_bytes"] if entry["wire_bytes"] else 0.0
            for name, entry in ledger.items()}


def rows_of(recorded, ledger, report, waited=None):
    """A Row for each dimension that sent or waited. recorded: the run's trace; waited: that of which the exposed times
    are, such as a replay, if it is another. BookError (2) where fewer than two steps are in it."""
    steps = dict(list(traces.steps(recorded).items())[:-1])
    if not steps:
        raise BookError("the trace holds fewer than two steps: run it with --trace_steps 3", 2)
    outside = shares_outside(ledger)
    messages, sent = defaultdict(int), defaultdict(lambda: [0.0, 0.0])
    for shares in steps.values():
        for item in recorded.ranks[0].communications:
            if not shares[0].begin <= item.submitted < shares[0].end:
                continue  # a validation, or the report of the step
            name = dimension_of(item.dimension)
            away = item.wire_bytes * outside[f"{item.dimension}.{item.kind}"]
            messages[name] += 1
            sent[name][0] += item.wire_bytes - away
            sent[name][1] += away
    exposed = exposed_of(waited or recorded, steps)
    formulas = declared(report)
    return [Row(name, messages[name] / len(steps), *(part / len(steps) for part in sent[name]),
                *exposed.get(name, (0.0, 0.0)), formulas.get(name))
            for name in ORDER if messages[name]]


def exposed_of(trace, steps):
    """{dimension: (mean, most)} of the ranks' exposed microseconds in one of these steps."""
    of_steps = defaultdict(list)
    for groups in (groups for step, groups in traces.exposed_by_group(trace).items() if step in steps):
        ranks = defaultdict(lambda: [0.0] * len(trace.ranks))
        for group, times in groups.items():
            of = ranks[dimension_of(group)]
            of[:] = [one + other for one, other in zip(of, times)]
        for name, times in ranks.items():
            of_steps[name].append((fmean(times), max(times)))
    return {name: tuple(fmean(part) for part in zip(*found)) for name, found in of_steps.items()}


def read(run_dir, source=None):
    """The Rows of a run, and the circumstances of the exposed times. source: a file of the run with other times, such as
    replay.json. BookError (2) where a file is missing."""
    run_dir = Path(run_dir)
    texts = []
    for name in ("ledger.json", "report.md"):
        path = run_dir / name
        if not path.is_file():
            raise BookError(f"{show_path(path)} is missing: a run of several ranks writes it at its end", 2)
        texts.append(path.read_text(encoding="utf-8"))
    recorded = traces.load(run_dir / traces.RECORDED)
    waited = traces.load(run_dir / source) if source else recorded
    return rows_of(recorded, json.loads(texts[0]), texts[1], waited), traces.circumstances(waited)


def table(rows):
    """Text: a line for each dimension."""
    lines = [f"{'':<4}{'messages':>9}{'in the node':>14}{'other nodes':>13}{'exposed ms':>12}{'most':>9}"
             f"{'reported':>12}{'formula':>12}{'ratio':>8}"]
    for row in rows:
        line = (f"{row.dimension:<4}{row.messages:>9.0f}{row.inside:>14,.0f}{row.outside:>13,.0f}"
                f"{1e-3 * row.exposed_mean:>12.3f}{1e-3 * row.exposed_most:>9.3f}")
        if row.declared:
            counted, formula = row.declared
            line += f"{counted:>12,}{formula:>12,}" + (f"{counted / formula:>8.4f}" if formula else "")
        lines.append(line)
    return "\n".join(lines)


def show(run_dir, source=None):
    """Prints the table; returns the exit code."""
    rows, circumstances = read(run_dir, source)
    if not rows:
        print(f"{circumstances}\n\nThis run had one rank, which sends nothing; `./book run ch07` makes a run of several ranks.")
        return 0
    print(f"{circumstances}\n\n{table(rows)}\n\n"
          "bytes and messages of rank 0 in a step; exposed: waits of all ranks for messages; reported: bytes that the "
          "formula is\nabout, by the run's report")
    return 0
