"""Draws what each rank keeps at most, by schedule.    arguments: SCHEDULES.json STEM"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style

from . import planned

# {schedule of the plane: (colour, marker, points by which its name is moved)}
DRAWN = {"afab": (style.INK, "s", 0), "zb_h2": (style.GREEN, "^", 0),
         "interleaved, v = 2": (style.ORANGE, "o", 0), "dualpipe": (style.GREEN, "D", 4),
         "zb_h1": (style.GREEN, "v", -4), "1f1b": (style.BLUE, "o", 6),
         "naive": (style.MUTED, "s", -6)}


def draw(found):
    """A line for each schedule."""
    fig, (axes,) = style.figure(size=(style.WIDTH * 0.82, 4.2))
    ranks = range(planned.PLANE_RANKS)
    for name, (color, marker, moved) in DRAWN.items():
        own = next(case["held"] for case in found if case["name"] == name)
        axes.plot(ranks, own, color=color, marker=marker, markersize=5, linewidth=1.4)
        axes.annotate(name, (ranks[-1], own[-1]), xytext=(9, moved), va="center", color=color,
                      textcoords="offset points", fontsize=style.SMALL)
    axes.set_ylim(0, 2.15)
    axes.set_xlabel("rank")
    axes.set_ylabel("activations, in micro-batches")
    style.title(axes, "What a rank keeps at most", f"p = {planned.PLANE_RANKS}, "
                f"m = {planned.PLANE_MICRO_BATCHES}; 1: what the whole model keeps of one micro-batch")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: SCHEDULES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(draw(record["plane"]), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
