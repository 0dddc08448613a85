"""What each dimension costs in a run with all of them, beside what the book says that it shards.

    python3 -m ch07_5d.figures.dimensions     trains a small model for three steps on 16 ranks, replays it, and writes
                                              dimensions.json

It takes a few seconds. Waits are those of a replay in which every rank owns a core: 16 ranks have no 16 cores here.
"""
import contextlib
import io
import json
from pathlib import Path

from tools import chapters
from tools.base import say
from tools.book import delta, diff
from tools.book.short_runs import look_into, table
from tools.book.showcase import origin, write_json
from tools.look import layout, provenance
from tools.process import git_commit
from tools.run import build, estimates, replay

FOLDER = Path(__file__).resolve().parent
COMMAND = "python3 -m ch07_5d.figures.dimensions"
RANKS, STEPS = 16, 3
FLAGS = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_layers": 2, "seq_len": 128,
         "micro_batch_size": 2, "grad_acc_steps": 4, "num_experts": 8, "ep_size": 4, "dp_size": 2, "cp_size": 2,
         "pp_size": 2, "tp_size": 2, "sequence_parallel": None, "zero_stage": 1, "node_size": 4, "dtype": "f32"}
LINKS = ("node=10,10", "net=50,1")
# What each of them shards, as the book's summary says it, and the group over which --mesh_show json has a weight
# sharded.
SHARDED = {"dp": ("batch; optimizer states by ZeRO-1", None), "tp": ("hidden and sequence", "tp"),
           "cp": ("sequence", None), "pp": ("layers", "pp"), "ep": ("experts", "ep")}
# The chapter that brings each of them, and its folder there.
ROOMS = {"dp": ("ch02", "data_parallel"), "tp": ("ch03", "tensor_parallel"), "cp": ("ch04", "context_parallel"),
         "pp": ("ch05", "pipeline_parallel"), "ep": ("ch06", "expert_parallel")}


def numel(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def sharded(program):
    """{dimension: the share of the model's elements that it shards}, by --mesh_show json."""
    text = estimates.output_of([str(program), *estimates.words_of({**FLAGS, "mesh_show": "json"})])
    parts = {}
    for part in json.loads(text)["parameters"]:
        parts.setdefault(part["name"], part)
    total = sum(numel(part["shape"]) for part in parts.values())
    return {name: sum(numel(part["shape"]) for part in parts.values() if group in part["sharded_over"]) / total
            for name, (_, group) in SHARDED.items()}


def lines_of(chapter, room):
    """(lines of the technique's folder, edited lines) of a chapter beside its parent, as its CHANGES.md has them. The
    table asks the sources, not the record of a run: they change without another run."""
    old, new, _ = delta.pair(chapter)
    changes = diff.compare(old, new)
    return (sum(lines for file, lines in changes.added.items() if file.startswith(f"{room}/")), sum(changes.counts()))


def look(run_dir):
    """The rows of the run, with the waits of its replay."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        replay.run_replay(run_dir, links=LINKS)
    rows, circumstances = layout.read(run_dir, "replay.json")
    return {"waits": circumstances, "rows": [row._asdict() for row in rows]}


def measure(path=FOLDER / "dimensions.json"):
    chapter = chapters.resolve("ch07")
    program = build.binary(build.RELEASE, chapter.name)
    say("book: a run with every dimension, and its replay")
    record = {**origin(chapter, git_commit()), "command": COMMAND, "sharded": sharded(program),
              **look_into(program, RANKS, look, **FLAGS, steps=STEPS, trace_steps=STEPS)}
    write_json(path, record)


def dimensions_table(record):
    rows = []
    for row in record["rows"]:
        name = row["dimension"]
        if name not in SHARDED:
            continue
        counted, formula = row["declared"]
        new, edited = lines_of(*ROOMS[name])
        rows.append([f"`{name}`", SHARDED[name][0], f"{100 * record['sharded'][name]:.0f} %", f"{row['inside']:,.0f}",
                     f"{row['outside']:,.0f}", f"{row['messages']:.0f}", f"{1e-3 * row['exposed_mean']:.2f}",
                     f"{counted / formula:.4f}", f"{new:,} + {edited}"])
    return table(["", "shards", "of the weights", "bytes in the node", "bytes to other nodes", "operations", "exposed, ms",
                  "over formula", "lines of code"], rows,
                 "Of rank 0 in a step; exposed: mean of the ranks. Over formula: the bytes that the run's report counts, "
                 "over those of its formula, which takes the mean of all stages for `tp` and `cp` and an even load for "
                 "`ep`. Lines of code: in the folder that the dimension's chapter brings, and edited in other files there.")


def texts(record):
    return {"dimensions.md": dimensions_table(record),
            "dimensions_provenance.md": provenance.measured({"dimensions": record})
            + f"`{record['command']}` measures them. Waits are\n{record['waits']}.\n"}


if __name__ == "__main__":
    measure()
