"""Draws every schedule as a point: its bubble against the activations of its fullest rank.

    arguments: SCHEDULES.json STEM
"""
import json
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import planned

BOTH = ("zb_h1", "zb_h2", "auto", "zb_v", "dualpipe", "dualpipe_v")  # B and W apart
# {schedule: (points to the right, points up, where its name is anchored)}
MOVED = {"afab": (-8, 0, "right"), "breadth_first, v = 2": (12, 11, "right"),
         "zb_h2": (-8, 0, "right"), "interleaved, v = 2": (-2, 11, "right"),
         "auto": (-8, 4, "right"), "zb_h1": (-8, -1, "right"), "zb_v": (-8, -3, "right"),
         "dualpipe": (8, -4, "left"), "dualpipe_v": (8, 4, "left"), "1f1b": (-8, 0, "right")}


def draw(found):
    """Points with their names."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.6))
    for own in found:
        color = style.ORANGE if own["name"] in BOTH else style.BLUE
        x, y = max(own["held"]), own["bubble"]
        axes.plot([x], [y], marker="o", markersize=7, color=color)
        right, up, anchor = MOVED.get(own["name"], (8, 0, "left"))
        axes.annotate(own["name"], (x, y), xytext=(right, up), ha=anchor, va="center",
                      textcoords="offset points", fontsize=style.SMALL)
    style.log_axis(axes)
    axes.set_ylim(0.045, 10)
    axes.set_xlim(0, 2.15)
    axes.set_xlabel("activations of the fullest rank, in micro-batches")
    axes.set_ylabel("idle time over work")
    style.legend(axes, [
        Line2D([], [], color=style.BLUE, linewidth=0, marker="o", label="one backward, BW"),
        Line2D([], [], color=style.ORANGE, linewidth=0, marker="o", label="B and W apart")], 48)
    style.title(axes, "Bubble against memory",
                f"p = {planned.PLANE_RANKS}, m = {planned.PLANE_MICRO_BATCHES}, F = B = W")
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
