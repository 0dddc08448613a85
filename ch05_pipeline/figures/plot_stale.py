"""Draws validation losses of PipeDream beside those of 1F1B.    arguments: STALE.json STEM"""
import json
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import stale

COLORS = dict(zip((name for name, _, _ in stale.RUNS), (style.INK, style.BLUE, style.ORANGE)))
DASHES = dict(zip(stale.RATES, ((), (4, 2))))
MARKS = dict(zip(COLORS, ("s", "o", "^")))


def draw(found):
    """A line for each way and rate."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.4))
    for own in found["runs"]:
        steps, losses = zip(*own["val_loss"])
        lines = axes.plot(steps, losses, color=COLORS[own["name"]], marker=MARKS[own["name"]],
                          markersize=4.5, linewidth=1.3)
        if DASHES[own["lr"]]:
            lines[0].set_dashes(DASHES[own["lr"]])
    axes.set_xlabel(f"steps of {found['micro_batches']} micro-batches")
    axes.set_ylabel("validation loss, nats per token")
    style.legend(axes, [
        *(Line2D([], [], color=color, linewidth=1.3, marker=MARKS[name], markersize=4.5, label=name)
          for name, color in COLORS.items()),
        *(Line2D([], [], color=style.MUTED, linewidth=1.3, dashes=dashes or (1, 0),
                 label=f"rate {rate:g}") for rate, dashes in DASHES.items())], 48)
    style.title(axes, "Many small, late updates against one large one",
                "The demo's model; the same samples at the same step")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: STALE.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
