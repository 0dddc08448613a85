"""Draws the load of the fullest expert, and losses, over steps.    arguments: BALANCE.json STEM"""
import json
import statistics
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import balance

COLORS = dict(zip(balance.BALANCES, (style.INK, style.BLUE, style.GREEN, style.ORANGE)))
NAMES = {"none": "none", "sample": "sample, a loss", "batch": "batch, a loss", "bias": "bias"}
SMOOTH = 20  # steps, of the losses
FIRST = 40   # the first step whose loss is drawn


def smoothed(values):
    """Means over the last steps, from FIRST on."""
    return [statistics.fmean(values[at - SMOOTH:at]) for at in range(FIRST, len(values) + 1)]


def draw(found):
    """Two panels: load above, loss below."""
    fig, (above, below) = style.figure(2, (1, 1), size=(style.WIDTH, 6.2))
    for name, color in COLORS.items():
        own = balance.runs_of(found, name)[0]
        steps = range(found["every"], found["steps"] + 1, found["every"])
        above.plot(steps, own["load"], color=color, linewidth=1.4)
        below.plot(range(FIRST, found["steps"] + 1), smoothed(own["loss"]), color=color,
                   linewidth=1.4)
    above.axhline(1, color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    above.annotate("all experts alike", (0, 1), xytext=(4, 4), xycoords=("axes fraction", "data"),
                   textcoords="offset points", va="bottom", color=style.MUTED, fontsize=style.SMALL)
    above.set_ylim(bottom=0.8)
    above.set_ylabel("fullest expert over the mean")
    below.set_ylabel(f"loss, mean of {SMOOTH} steps")
    below.set_xlabel("step")
    style.legend(below, [Line2D([], [], color=color, linewidth=1.4, label=NAMES[name])
                         for name, color in COLORS.items()], 48)
    style.title(above, "What evens out the load of experts",
                f"{balance.MIXTURE['num_experts']} experts, two for each token; the same samples")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: BALANCE.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
