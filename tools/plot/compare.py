"""Draws two runs over each other.    usage: python3 tools/plot/compare.py RUN_A RUN_B OUT.png"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from tools.base import BookError  # noqa: E402
from tools.look.compare import relative_difference  # noqa: E402
from tools.look.runs import read_metrics  # noqa: E402
from tools.plot import style  # noqa: E402


def losses(run_dir):
    """{step: loss} of a run."""
    return {int(record["step"]): record["loss"] for record in read_metrics(run_dir)[0]}


def names(dir_a, dir_b):
    """Short and different names of two run directories for the legend."""
    a, b = Path(dir_a).resolve(), Path(dir_b).resolve()
    if a.name != b.name:
        return a.name, b.name
    return f"{a.parent.name}/{a.name}", f"{b.parent.name}/{b.name}"


def draw_difference(axes, a, b):
    """|A - B| / |A| of the loss per step, on a logarithmic axis; zeros cannot be drawn there."""
    steps = sorted(set(a) & set(b))
    relative = np.array([relative_difference(a[step], b[step]) for step in steps])
    drawn = np.where((relative > 0) & np.isfinite(relative), relative, math.nan)
    axes.set_ylabel("|A − B| / |A|")
    axes.set_xlabel("step")
    if np.isnan(drawn).all():
        equal = bool((relative == 0).all())
        axes.set_yticks([])
        axes.grid(False)
        axes.annotate("equal at every step" if equal else "no finite difference", (0.5, 0.5),
                      xycoords="axes fraction", ha="center", va="center", color=style.MUTED)
        return
    axes.set_yscale("log")
    axes.plot(steps, drawn, color=style.GREEN, linewidth=1.1, marker=".", markersize=1.5)
    low, high = math.log10(np.nanmin(drawn)), math.log10(np.nanmax(drawn))
    axes.set_ylim(10.0 ** (math.floor(low) - 0.2), 10.0 ** (math.ceil(high) + 0.2))
    zeros = int((relative == 0).sum())
    if zeros:
        axes.annotate(f"{zeros} of {len(steps)} steps are equal", (0.01, 0.9),
                      xycoords="axes fraction", va="top", color=style.MUTED, fontsize=style.SMALL)


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 4:
        raise BookError("usage: python3 tools/plot/compare.py RUN_A RUN_B OUT.png", 2)
    dir_a, dir_b, out = argv[1:]
    a, b = losses(dir_a), losses(dir_b)
    name_a, name_b = names(dir_a, dir_b)
    fig, (upper, lower) = style.figure(rows=2, heights=(2.4, 1), size=(style.WIDTH, 5.2))
    for run, label, look in (
            (a, f"A  {name_a}", {"color": style.BLUE, "linewidth": 2.6, "alpha": 0.55}),
            (b, f"B  {name_b}", {"color": style.ORANGE, "linewidth": 1.1})):
        upper.plot(list(run), list(run.values()), label=style.plain(label), **look)
    upper.set_ylabel("loss, nats per token")
    upper.legend(loc="upper right")
    style.title(upper, f"Training loss of {name_a} and {name_b}")
    draw_difference(lower, a, b)
    fig.align_ylabels()
    try:
        style.save(fig, out)
    except (OSError, ValueError) as error:
        raise BookError(f"cannot write {out}: {error}")
    return 0


if __name__ == "__main__":
    style.run(main)
