"""Draws the demo's loss, and how far it is from the same batch's on one rank.

    arguments: DEMO.json STEM
"""
import json
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from tools.base import BookError
from tools.plot import compare, loss, style


def draw(record):
    """The figure: losses over each other, their difference below. A record that holds no losses of
    one rank has the gradient norm there."""
    steps = record["steps"]
    if "losses_alone" not in record:
        return loss.draw(steps, record)
    fig, (upper, lower) = style.figure(rows=2, heights=(2.2, 1), size=(style.WIDTH, 5.4))
    ranks = record["machine"]["ranks"]
    loss.draw_loss(upper, steps, record)
    alone = dict(zip((int(each["step"]) for each in steps), record["losses_alone"]))
    window = max(5, len(alone) // loss.SMOOTH_SHARE) | 1
    upper.plot(list(alone), loss.smooth(loss.np.array(list(alone.values())), window),
               color=style.INK, linewidth=1.0, dashes=(4, 3), label="the same batch on 1 rank")
    upper.legend(loc="upper right")
    compare.draw_difference(lower, alone, {int(each["step"]): each["loss"] for each in steps})
    lower.set_ylabel(f"|{ranks} ranks − 1| / 1")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.title(upper, *loss.heading(steps, record))
    fig.align_ylabels()
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: DEMO.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
