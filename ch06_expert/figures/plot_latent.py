"""Draws the operations of absorbed attention over those of keys and values made again, over the number of
new tokens.    arguments: LATENT.json STEM"""
import json
from pathlib import Path

from matplotlib.lines import Line2D

from tools.base import BookError
from tools.plot import style

from . import latent

COLORS = dict(zip(latent.CURVES, (style.GREEN, style.ORANGE, style.BLUE)))


def draw(found):
    """A line by formula for each number of positions, with the counted points on it."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.2))
    for keys, color in COLORS.items():
        steps = sorted({round(2 ** (i / 8)) for i in range(81)})
        axes.plot(steps, [latent.absorbed(new, keys) / latent.expanded(new, keys) for new in steps],
                  color=color, linewidth=1.4)
        own = [case for case in found["curves"] if case["keys"] == keys]
        axes.plot([case["new"] for case in own],
                  [case["absorbed"] / case["expanded"] for case in own], color=color, marker="o",
                  markersize=4.5, linestyle="none")
    axes.axhline(1, color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate("as many operations", (0, 1), xytext=(6, 4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", va="bottom", color=style.MUTED, fontsize=style.SMALL)
    axes.set_xscale("log", base=2)
    style.log_axis(axes)
    axes.minorticks_off()
    axes.set_xticks(latent.CURVE_NEW[::2], [str(new) for new in latent.CURVE_NEW[::2]])
    axes.set_xlabel("new tokens of a pass")
    axes.set_ylabel("absorbed over made again")
    style.legend(axes, [Line2D([], [], color=color, marker="o", markersize=4.5, linewidth=1.4,
                               label=f"{keys:,} positions") for keys, color in COLORS.items()], 48)
    style.title(axes, "When it costs less to attend to latents themselves",
                "Operations of a layer of DeepSeek-V3; lines by formula, points counted")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: LATENT.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
