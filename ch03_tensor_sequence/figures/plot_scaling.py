"""Draws how tensor parallelism scales: tokens/s of a rank over tp.    arguments: DATA.json STEM"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style

from . import scaling

LOOKS = {"tensor": (style.BLUE, "o", "tensor parallelism"),
         "again": (style.ORANGE, "D", "with sequence parallelism")}


def draw_way(axes, measured, way):
    """The points of a way, and the book's in units of ours on one full node."""
    color, marker, label = LOOKS[way]
    points = scaling.points(measured, way)
    axes.plot([tp for tp, _ in points], [rate for _, rate in points], color=color, marker=marker,
              markersize=5, label=label)
    here = dict(points)[measured["node_size"]]
    there = dict(zip(scaling.BOOK_TP, scaling.BOOK[way]))[measured["node_size"]]
    axes.plot(scaling.BOOK_TP, [here * rate / there for rate in scaling.BOOK[way]], color=color, marker="s",
              markersize=3.5, linewidth=1.0, dashes=(4, 2), alpha=0.7,
              label="the book's 3B (scaled to match at 8)")


def draw_drops(axes, points):
    """What each doubling costs, below its point."""
    lost = scaling.drops([rate for _, rate in points])
    for (tp, rate), drop in zip(points[1:], lost):
        axes.annotate(f"{drop:+.1f} %", (tp, rate), xytext=(-7, -13), textcoords="offset points",
                      ha="right", color=style.BLUE, fontsize=style.SMALL,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: DATA.json STEM", 2)
    measured = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["scaling"]
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.6))
    for way in scaling.WAYS:
        draw_way(axes, measured, way)
    draw_drops(axes, scaling.points(measured, scaling.WAYS[0]))
    node = measured["node_size"] * 2**0.5
    axes.axvline(node, color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate("one node", (node, 0.95), xycoords=("data", "axes fraction"), xytext=(-6, 0),
                  textcoords="offset points", ha="right", color=style.MUTED, fontsize=style.SMALL)
    axes.set_xscale("log", base=2)
    places = sorted({tp for way in scaling.WAYS for tp, _ in scaling.points(measured, way)}
                    | set(scaling.BOOK_TP))
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_xlim(0.85, 1.25 * max(places))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tensor-parallel ranks")
    axes.set_ylabel("tokens/s of each rank")
    axes.legend(loc="lower left", bbox_to_anchor=(0.02, 0.04))
    links = ", ".join("{} {} us {} GB/s".format(*link.replace("=", ",").split(","))
                      for link in measured["links"])
    style.title(axes, "Tensor parallelism: the same batch on more ranks",
                f"replayed on nodes of {measured['node_size']}: {links}")
    style.save(fig, argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
