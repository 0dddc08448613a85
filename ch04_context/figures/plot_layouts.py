"""Draws how evenly ranks share attention: counted cells beside times.    arguments: DATA.json STEM"""
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tools.base import BookError
from tools.plot import style

from . import workload

LOOKS = {"contiguous": (style.BLUE, "contiguous shares"), "zigzag": (style.ORANGE, "zig-zag")}
WIDTH = 0.36  # of a bar, of a rank's place


def draw(measured):
    """Bars: time of attention on each rank; marks: what the cells of the mask lead to expect."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.0))
    for side, layout in zip((-0.5, 0.5), workload.LAYOUTS):
        color, _ = LOOKS[layout]
        times = [workload.time_of(rank) for rank in
                 workload.found_layout(measured, layout)["ranks"]]
        cells = workload.cells(layout)
        for rank, (time, own) in enumerate(zip(times, cells)):
            x = rank + side * WIDTH * 1.1
            axes.bar(x, time, WIDTH, color=color, linewidth=0)
            expected = sum(times) * own / sum(cells)
            axes.plot([x - WIDTH / 2, x + WIDTH / 2], [expected] * 2, color=style.INK, linewidth=1.6)
            axes.annotate(f"{time:.0f}", (x, max(time, expected)), xytext=(0, 4), ha="center",
                          textcoords="offset points", fontsize=style.SMALL)
    axes.set_xticks(range(workload.RANKS), [f"rank {rank}" for rank in range(workload.RANKS)])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
    axes.set_ylabel("ms of attention in a step")
    style.legend(axes, [Patch(facecolor=color, label=name) for color, name in LOOKS.values()]
                 + [Line2D([], [], color=style.INK, linewidth=1.6,
                           label="the ranks' time, in proportion to the cells of the mask")], 30)
    style.title(axes, "Attention by rank",
                f"{workload.SHAPE['seq_len']:,} tokens on {workload.RANKS} ranks, forward and "
                "backward, CPU time")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: DATA.json STEM", 2)
    measured = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["layouts"]
    style.save(draw(measured), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
