"""Draws the bandwidth that hides half of a ring's messages, over the tokens of a rank.

    arguments: METHODS.json STEM
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style

from . import crossover


def draw(measured):
    """The formula as a line, what replays found as points, the link of the table."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.0))
    tokens = [entry["seq_len"] // crossover.RANKS for entry in measured["lengths"]]
    half = [crossover.half_hidden(entry["seq_len"], entry["gflops"])
            for entry in measured["lengths"]]
    found = [entry["half_gb_per_s"] for entry in measured["lengths"]]
    axes.plot(tokens, half, color=style.BLUE, label="t_comm = 2 t_compute")
    axes.plot(tokens, found, color=style.ORANGE, linestyle="none", marker="o", markersize=6,
              label="found by replays on other links")
    axes.axhline(measured["gb_per_s"], color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate(f"{measured['gb_per_s']:.3g} GB/s: the link of the table",
                  (1, measured["gb_per_s"]), xytext=(-2, -4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", va="top", color=style.MUTED,
                  fontsize=style.SMALL)
    axes.annotate("more is hidden", (0.66, 0.55), xycoords="axes fraction", color=style.MUTED)
    axes.annotate("more is exposed", (0.06, 0.12), xycoords="axes fraction", color=style.MUTED)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    style.log_axis(axes)
    axes.set_xlim(0.85 * tokens[0], 1.2 * tokens[-1])
    axes.set_xlabel("tokens of a rank, s/cp")
    axes.set_ylabel("GB/s of the link")
    axes.legend(loc="upper right")
    style.title(axes, "The link on which a block hides half of a message",
                f"a ring of {crossover.RANKS} ranks, forward")
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: METHODS.json STEM", 2)
    measured = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["crossover"]
    style.save(draw(measured), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
