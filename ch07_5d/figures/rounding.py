"""How far layouts in bf16 are from one process, and orders of one process from each other.

    python3 -m ch07_5d.figures.rounding     asks ./book prove --dtype bf16 of each of them, and writes rounding.json

It takes a minute or two on two cores. bf16 rounds otherwise on other CPUs, so the record is of one machine.
"""
import re
import shlex
from pathlib import Path

from tools import chapters
from tools.base import BookError, say
from tools.book.short_runs import table
from tools.book.showcase import origin, write_json
from tools.look import provenance
from tools.process import git_commit
from tools.run import build, estimates

from . import museum_bf16

FOLDER = Path(__file__).resolve().parent
SIZES = "--num_layers 2 --seq_len 64 --micro_batch_size 2 --grad_acc_steps 4"
# Layouts of the reader's kind: (what, its flags). The first is shown whole.
LAYOUTS = (("`tp` 2", "--tp_size 2"), ("`tp` 2, sequence parallelism", "--tp_size 2 --sequence_parallel"),
           ("`dp` 2, ZeRO-3", "--dp_size 2 --zero_stage 3"), ("`cp` 2", "--cp_size 2"),
           ("`pp` 2, tied ends", "--pp_size 2 --tie_word_embeddings"),
           ("`dp` 2, `ep` 2, 4 experts", "--dp_size 2 --ep_size 2 --num_experts 4"),
           ("`tp` 2, `cp` 2", "--tp_size 2 --cp_size 2"))
APART = re.compile(r"^ *(losses|gradient norms): (\S+) from the nearest order; two orders are up to (\S+) apart$", re.M)
TIMES = re.compile(r" \(([\d.]+) times\), in [\d.]+ s$", re.M)


def proof(program, flags):
    """What the program prints of these flags; a layout that differs is an error here."""
    words = ["--prove", "16", "--prove_dtype", "bf16", *shlex.split(f"{SIZES} {flags}")]
    return estimates.output_of([str(program), *words])


def measure(path=FOLDER / "rounding.json"):
    chapter, found = chapters.resolve("ch07"), {}
    program = build.binary(build.RELEASE, chapter.name)
    for what, flags in LAYOUTS:
        say(f"book: {what} in bf16, beside one process")
        text = proof(program, flags)
        if len(APART.findall(text)) != 2:
            raise BookError(f"{flags}: one twin is needed here:\n{text}")
        found[flags] = text
    write_json(path, {**origin(chapter, git_commit()), "command": "python3 -m ch07_5d.figures.rounding",
                      "printed": found})


def shown(record):
    """The first layout's runs, as they are printed."""
    text = TIMES.sub(r" (\1 times)", record["printed"][LAYOUTS[0][1]])
    lines = [line for line in text.splitlines() if line.startswith(" ") and not line.startswith("  --")]
    return f"$ ./book prove ch07 --dtype bf16 -- {SIZES} \\\n    {LAYOUTS[0][1]}\n" + "\n".join(
        line[2:] for line in lines) + "\n"


def rounding_table(record):
    rows = []
    for what, flags in LAYOUTS:
        text = record["printed"][flags]
        cells = [cell for _, layout, orders in APART.findall(text) for cell in (layout, orders)]
        rows.append([what, *cells, TIMES.search(text)[1]])
    return table(["layout", "losses: layout", "losses: orders", "norms: layout", "norms: orders", "ratio"], rows,
                 "Layout: distance from the nearest of five orders of one process. Orders: the largest distance between "
                 "two of the five. Ratio: the larger of the two quotients. A twin of each layout, in bf16, 40 steps.")


def texts(record, of_museum):
    """of_museum: the record of museum_bf16."""
    records = {"rounding": record, "museum_bf16": of_museum}
    made = " and ".join(f"`{own['command']}`" for own in records.values())
    return {"rounding.txt": shown(record), "rounding.md": rounding_table(record),
            "museum_bf16.md": museum_bf16.bf16_table(of_museum),
            "rounding_provenance.md": f"{provenance.measured(records)}{made} measure them.\n"}


if __name__ == "__main__":
    measure()
