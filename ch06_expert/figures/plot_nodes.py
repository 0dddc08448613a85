"""Draws what crosses nodes, and what stays inside, by the nodes that a token may go to.

    arguments: NODES.json STEM
"""
import json
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import nodes

LOOKS = {"direct": (style.BLUE, "o"), "by_node": (style.ORANGE, "s")}


def draw(measured):
    """For each way of dispatch a line of bytes between nodes, and a thin one of those inside."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.2))
    handles = []
    for dispatch, (color, marker) in LOOKS.items():
        cases = nodes.of_way(measured, dispatch)
        places = [case["route_nodes"] for case in cases]
        for link, look in (("between", {"marker": marker, "markersize": 5}),
                           ("inside", {"linewidth": 1.0, "dashes": (5, 3)})):
            axes.plot(places, [case[link] for case in cases], color=color, **look)
            handles.append(Line2D([], [], color=color, **look,
                                  label=f"{link} nodes, {dispatch}: {nodes.WAYS[dispatch]}"))
    axes.set_xticks(places)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes that a token may go to")
    axes.set_ylabel("KiB of a layer")
    style.legend(axes, handles, 48)
    style.title(axes, "A token's experts share its way between nodes",
                f"{measured['nodes']} nodes of {measured['node_size']} ranks, {measured['k']} of "
                f"{measured['experts']} experts")
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
