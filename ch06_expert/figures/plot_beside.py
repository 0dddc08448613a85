"""Draws validation losses of mixtures beside those of dense models.    arguments: BESIDE.json STEM"""
import json
import statistics
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import balance

COLORS = dict(zip(balance.BESIDE, (style.INK, style.ORANGE)))
NAMES = {"dense": "dense", "mixture": "8 experts, two for each token"}


def draw(found):
    """A line of medians for each model, and a band from the lowest to the highest."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.0))
    for name, color in COLORS.items():
        own = [dict(map(tuple, run["val_loss"])) for run in balance.runs_of(found, name)]
        steps = list(own[0])
        of_step = [[losses[step] for losses in own] for step in steps]
        axes.fill_between(steps, [min(losses) for losses in of_step],
                          [max(losses) for losses in of_step], color=color, alpha=0.18, linewidth=0)
        axes.plot(steps, [statistics.median(losses) for losses in of_step], color=color, marker="o",
                  markersize=4.5, linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats per token")
    style.legend(axes, [Line2D([], [], color=color, marker="o", markersize=4.5, linewidth=1.4,
                               label=NAMES[name]) for name, color in COLORS.items()], 48)
    style.title(axes, "A mixture of experts, and a dense model with as much work",
                f"Medians of {len(balance.BESIDE_SEEDS)} seeds; bands from the lowest to the highest")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: BESIDE.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
