"""Draws what a rank holds of 8B without and with context parallelism, beside the book's figure.

    arguments: MEMORY.json STEM
"""
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tools.base import BookError
from tools.plot import style
from tools.plot.panels import heading, legend, limit, panels, thousands, total

from . import memory

PARTS = (*memory.STATES, "activations")
OURS, BOOK = 0.44, 0.3  # widths, of a sequence's place


def draw(record):
    """A panel for each layout: sequences, ours beside the book's, and the device's limit."""
    names = [f"tp = {tp}, cp = {cp}" if tp > 1 else "no parallelism" for tp, cp in memory.LAYOUTS]
    fig, axes = panels(names, sharex=True)
    for panel, (tp, cp) in zip(axes, memory.LAYOUTS):
        for place, seq_len in enumerate(memory.SEQ_LENS):
            held = memory.find(record["cases"], tp, cp, seq_len)
            ours, formula = ([held[how][part] / memory.GIB for part in PARTS]
                             for how in ("simulated", "predicted"))
            draw_stack(panel, place - BOOK / 2, ours,
                       [{"color": style.CATEGORIES[part], "linewidth": 0} for part in PARTS], OURS)
            theirs = [*memory.BOOK_STATES[tp], memory.BOOK_ACTIVATIONS[tp, cp][place]]
            draw_stack(panel, place + OURS / 2, theirs, [
                {"facecolor": "white", "edgecolor": style.INK, "linewidth": 0.7}] * len(theirs), BOOK)
            left = place - (BOOK + OURS) / 2
            panel.plot([left, left + OURS], [sum(formula)] * 2, color=style.INK, linewidth=1.6)
        panel.annotate("80 GiB", (1, memory.DEVICE / memory.GIB), xytext=(3, 0), va="center",
                       textcoords="offset points", xycoords=("axes fraction", "data"),
                       fontsize=style.SMALL)
        panel.set_xticks(range(len(memory.SEQ_LENS)), map(thousands, memory.SEQ_LENS))
        panel.tick_params(axis="x", length=0, labelbottom=panel is axes[-1])
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.6, len(memory.SEQ_LENS) - 0.3)
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.margins(y=0.14)
        limit(panel, memory.DEVICE / memory.GIB)
    axes[1].set_ylabel("GiB of a rank")
    axes[-1].set_xlabel("tokens of the sample")
    heading(fig, "8B on ranks that share its samples", "bf16 with gradients in f32, one sample, "
            "dry runs; every panel has a scale of its own")
    legend(fig, [Patch(facecolor=style.CATEGORIES[part], label=part) for part in PARTS]
           + [Line2D([], [], color=style.INK, linewidth=1.6, label="all of them, by formula"),
              Patch(facecolor="white", edgecolor=style.INK, linewidth=0.7,
                    label="the book, in the same order")], 54)
    return fig


def draw_stack(axes, x, sizes, looks, width):
    """Parts on top of each other, and their sum above them."""
    base = 0.0
    for size, look in zip(sizes, looks):
        axes.bar(x, size, width, bottom=base, **look)
        base += size
    total(axes, x, base)


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: MEMORY.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(draw(record["large"]), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
