"""Draws what the stages of ZeRO hold.    arguments: ZERO.json FOLDER

FOLDER/zero_memory.svg: bytes of every rank, measured, beside the formulas;
FOLDER/zero_8b.svg: a large model on 8 ranks, estimated, beside the book's figure.
"""
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tools.base import BookError
from tools.plot import style
from tools.plot.panels import DEVICE, heading, legend, limit, panels, thousands, total

from . import zero

MIB = 2**20
COLORS = {**style.CATEGORIES, "gathered weights": style.tint(style.BLUE),
          "gradients to reduce": style.tint(style.GREEN),
          "reduced gradients": style.CATEGORIES["workspace"],
          "scratch of reductions": style.CATEGORIES["communication"]}
HELD = (*zero.STATES, *zero.BUFFERS)
LARGE = (*zero.STATES, "activations", *zero.BUFFERS)
BAR, MARK = 0.62, 0.14   # widths, of a rank's place
OURS, BOOK = 0.46, 0.26  # of a stage's place


def draw_bar(axes, x, width, parts, name):
    """Parts {what: bytes in the panel's unit} on top of each other."""
    base = 0.0
    for what, size in parts.items():
        if size > 0:
            bar, = axes.bar(x, size, width, bottom=base, color=COLORS[what], linewidth=0)
            bar.set_gid(f"{name}_{what.replace(' ', '_')}")
            base += size


def draw_formula(axes, x, parts, name):
    """A mark to the right of a bar for every part's upper end."""
    level, levels = 0.0, []
    for size in parts.values():
        level += size
        levels += [level] if size > 0 else []
    marks = axes.hlines(levels, x + BAR / 2 + 0.02, x + BAR / 2 + 0.02 + MARK, color=style.INK,
                        linewidth=1.3)
    marks.set_gid(f"{name}_formula")


def draw_held(record):
    """Every rank of every stage, measured, with the formulas' values as marks."""
    held = record["zero"]["held"]
    fig, axes = panels([zero.NAMES[stage["stage"]] for stage in held["stages"]],
                       columns=2, height=1.9, sharey=True)
    for panel, stage in zip(axes, held["stages"]):
        for number, rank in enumerate(stage["ranks"]):
            name = f"stage_{stage['stage']}_rank_{number}"
            draw_bar(panel, number, BAR, {what: rank.get(what, 0) / MIB for what in HELD}, name)
            draw_formula(panel, number, {what: stage["predicted"].get(what, 0) / MIB
                                         for what in HELD}, name)
        ranks = len(stage["ranks"])
        panel.set_xticks(range(ranks), [f"rank {number}" for number in range(ranks)])
        panel.tick_params(axis="x", length=0, labelsize=style.SMALL)
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.55, ranks - 0.35)
    for panel in axes[::2]:
        panel.set_ylabel("MiB")
    layers = held["flags"]["num_layers"]
    heading(fig, f"What {ranks} ranks hold", f"{style.human(held['parameters'])} parameters in "
            f"{layers} blocks, bf16 with gradients in f32: 18 bytes each; buffers at their peaks")
    shown = [what for what in HELD if any(rank.get(what) for stage in held["stages"]
                                          for rank in stage["ranks"])]
    legend(fig, [Patch(facecolor=COLORS[what], label=what) for what in shown]
           + [Line2D([], [], color=style.INK, linewidth=1.3, label="formula")], 27)
    return fig


def draw_large(record):
    """Every stage and sequence, ours beside the book's, and the device's limit."""
    cases = record["zero"]["large"]
    fig, axes = panels([f"{thousands(seq_len)} tokens" for seq_len in zero.LARGE_SEQ_LENS],
                       sharey=True)
    for panel, seq_len in zip(axes, zero.LARGE_SEQ_LENS):
        for case in (case for case in cases if case["seq_len"] == seq_len):
            stage = case["stage"]
            sizes = {**{what: case["simulated"].get(what, 0) for what in LARGE},
                     **{what: sizes["bytes"] for what, sizes in case["buffers"].items()}}
            draw_bar(panel, stage - OURS / 2 + 0.06, OURS,
                     {what: sizes[what] / zero.GIB for what in LARGE}, f"{seq_len}_{stage}")
            total(panel, stage - OURS / 2 + 0.06, sum(sizes.values()) / zero.GIB)
            total(panel, stage + BOOK / 2 + 0.1, draw_book(
                panel, stage + BOOK / 2 + 0.1, stage, seq_len))
        panel.set_xticks(zero.STAGES)
        panel.tick_params(axis="x", length=0)
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.6, len(zero.STAGES) - 0.4)
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.margins(y=0.14)
    for panel in axes:
        limit(panel, DEVICE / zero.GIB)
    axes[0].annotate("80 GiB", (1, DEVICE / zero.GIB), xytext=(-2, 3), ha="right",
                     textcoords="offset points", xycoords=("axes fraction", "data"),
                     fontsize=style.SMALL)
    axes[1].set_ylabel("GiB of a rank")
    axes[-1].set_xlabel("stage of ZeRO")
    heading(fig, "8B on 8 ranks", "bf16 with gradients in f32, one sequence a rank, by dry runs; "
            "buffers at their peaks")
    shown = [what for what in LARGE if any(case["simulated"].get(what) or what in case["buffers"]
                                           for case in cases)]
    legend(fig, [Patch(facecolor=COLORS[what], label=what) for what in shown]
           + [Patch(facecolor="white", edgecolor=style.INK, linewidth=0.7,
                    label="the book, in the same order")], 42)
    return fig


def draw_book(axes, x, stage, seq_len):
    """The book's bar, without colours: its parts in our order; its height."""
    base = 0.0
    for size in (*zero.BOOK_STATES[stage], zero.BOOK_ACTIVATIONS[seq_len]):
        axes.bar(x, size, BOOK, bottom=base, facecolor="white", edgecolor=style.INK, linewidth=0.7)
        base += size
    return base


def main(argv):
    """Draws both figures; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: ZERO.json FOLDER", 2)
    record, folder = json.loads(Path(argv[1]).read_text(encoding="utf-8")), Path(argv[2])
    for name, draw in (("zero_memory", draw_held), ("zero_8b", draw_large)):
        style.save(draw(record), folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    style.run(main)
