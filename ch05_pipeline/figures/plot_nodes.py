"""Draws bandwidths of collectives over nodes: medians, a band, the formula. The medians hardly differ, so each
marker leaves the one below it in sight.

    arguments: NODES.json STEM
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style

from . import nodes

LOOKS = {"all_reduce": (style.BLUE, "o", 15), "all_gather": (style.ORANGE, "s", 9),
         "reduce_scatter": (style.GREEN, "D", 4)}  # the last: the marker's size


def draw(measured):
    """A line and a band for each collective."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.2))
    places = [case["nodes"] for case in measured["found"]]
    for kind, (color, marker, size) in LOOKS.items():
        low, median, high = (
            [1000 * value for value in values]
            for values in zip(*(nodes.spread(case, kind) for case in measured["found"])))
        axes.fill_between(places, low, high, color=color, alpha=0.25, linewidth=0)
        axes.plot(places, median, color=color, marker=marker, markersize=size, label=nodes.KINDS[kind],
                  clip_on=False)
    by_formula = [1000 * nodes.formula(case, "all_gather", measured["node_size"], measured["links"])
                  for case in measured["found"]]
    axes.plot(places, by_formula, color=style.MUTED, linewidth=1.0, dashes=(5, 3),
              label="by the links' bandwidths")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    style.log_axis(axes)
    axes.set_xlabel(f"nodes of {measured['node_size']} ranks")
    axes.set_ylabel("MB/s that a rank sends")
    axes.legend(loc="upper right")
    style.title(axes, "Bandwidth of collectives beyond the node",
                f"{measured['found'][0]['bytes'] >> 20} MiB on emulated links, "
                "medians; bands: 5 to 95 %")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: NODES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(draw(record["nodes"]), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
