"""Draws bubbles over micro-batches and stages of a rank.    arguments: SCHEDULES.json STEM"""
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tools.base import BookError
from tools.plot import style

from . import planned

COLORS = dict(zip(planned.BOOK_CHUNKS, (style.INK, style.BLUE, style.ORANGE, style.GREEN)))


def draw(found):
    """Lines: the book's formula; marks: the simulator."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.4))
    ms = planned.BOOK_MICRO_BATCHES
    for v, color in COLORS.items():
        book = [planned.book_bubble(planned.BOOK_RANKS, m, v) for m in ms]
        own = [next(case["bubble"] for case in found if (case["m"], case["v"]) == (m, v)) for m in ms]
        axes.plot(ms, book, color=color, linewidth=1.2, dashes=(4, 2))
        axes.plot(ms, own, color=color, linewidth=0, marker="o", markersize=6)
        axes.annotate(f"v = {v}", (ms[-1], own[-1]), xytext=(8, 0), va="center", color=color,
                      textcoords="offset points", fontsize=style.SMALL)
    axes.axvline(planned.BOOK_RANKS, color=style.MUTED, linewidth=0.9)
    axes.annotate("m = p", (planned.BOOK_RANKS, 8), xytext=(4, 0), color=style.MUTED,
                  textcoords="offset points", fontsize=style.SMALL, va="top")
    axes.set_xscale("log", base=2)
    style.log_axis(axes)
    axes.xaxis.set_major_locator(FixedLocator(ms))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(0.9, 46)
    axes.set_ylim(0.02, 9)
    axes.set_xlabel("micro-batches m")
    axes.set_ylabel("idle time over work")
    style.legend(axes, [
        Line2D([], [], color=style.MUTED, linewidth=1.2, dashes=(4, 2), label="(p-1)/(v m)"),
        Line2D([], [], color=style.MUTED, linewidth=0, marker="o", label="simulated")], 48)
    style.title(axes, "Bubble over micro-batches and stages of a rank",
                f"p = {planned.BOOK_RANKS}, 1F1B; interleaved where v is above 1")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: SCHEDULES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(draw(record["bubbles"]), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
