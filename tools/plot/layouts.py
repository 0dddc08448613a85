"""Draws all layouts of a search as lines over parallel axes: one axis for each choice, the last for MFU.

usage: python3 tools/plot/layouts.py LAYOUTS.json OUT.png

LAYOUTS.json is as tools/bench/plan_plot.py says. Choices that no layout makes otherwise have no axis.
"""
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.lines import Line2D  # noqa: E402

from tools.look import layouts  # noqa: E402
from tools.plot import heatmap, style  # noqa: E402

FASTEST = 10    # layouts whose lines stand out
BAND = 0.66     # of the way from one value to the next, over which its lines lie side by side
LOWER = 0.25    # of a band, from its middle down to its label
PERCENT = (1, 2, 5, 10, 20, 50)  # from one label of MFU to the next
# {axis: (its text, what a layout has there, by its flags)}
AXES = {**{name: (name, lambda flags, name=name: layouts.degrees_of(flags)[name]) for name in layouts.DEGREES},
        "zero": ("ZeRO", layouts.stage_of),
        "micro_batch": ("micro-\nbatch", lambda flags: layouts.values_of(flags)["micro_batch_size"]),
        "recompute": ("recom-\npute", lambda flags: layouts.values_of(flags).get("recompute", "none"))}
ORDER = ("none", "selective", "full")


def values_on(axis, rows):
    """Each layout's value on an axis."""
    return [AXES[axis][1](row["flags"]) for row in rows]


def places(values):
    """(the axis' values from bottom to top, each layout's height in 0 to 1). Layouts come the fastest
    first; those of one value lie side by side in that order, the fastest on top."""
    ticks = sorted(set(values), key=lambda value: ORDER.index(value) if value in ORDER else value)
    heights = []
    for number, value in enumerate(values):
        before, alike = values[:number].count(value), values.count(value)
        beside = 0.5 - (before + 0.5) / alike
        heights.append((ticks.index(value) + 0.5 + BAND * beside) / len(ticks))
    return ticks, heights


def draw(record):
    """A line for each layout."""
    rows = sorted(record["layouts"], key=lambda row: row["step_s"])
    names = [axis for axis in AXES if len(set(values_on(axis, rows))) > 1]
    same = [f"{AXES[axis][0]} {values_on(axis, rows)[0]}" for axis in layouts.DEGREES if axis not in names]
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.4))
    columns = []
    for x, axis in enumerate(names):
        ticks, heights = places(values_on(axis, rows))
        columns.append(heights)
        for number, tick in enumerate(ticks):
            ends = [(number + 0.5 + side * BAND / 2) / len(ticks) for side in (-1, 1)]
            axes.plot([x, x], ends, color=style.INK, linewidth=2.2, zorder=4)
            label(axes, x, (number + 0.5 - LOWER * BAND) / len(ticks), str(tick), left=True)  # the fastest are above
    columns.append(mfu_axis(axes, len(names), rows))
    for number in reversed(range(len(rows))):
        fast = number < FASTEST
        axes.plot(range(len(columns)), [heights[number] for heights in columns], gid=f"layout_{number + 1}",
                  color=style.ORANGE if fast else style.BLUE, alpha=1 if fast else 0.25,
                  linewidth=1.3 if fast else 0.7, zorder=3 if fast else 2)
    axes.axvline(len(names), color=style.INK, linewidth=0.9, zorder=4)
    axes.grid(False)
    axes.set_xlim(-0.4, len(names) + 0.5)
    axes.set_ylim(-0.01, 1.01)
    axes.set_xticks(range(len(columns)), [*(AXES[axis][0] for axis in names), "MFU"])
    axes.set_yticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    few = min(FASTEST, len(rows))
    style.legend(axes, [Line2D([], [], color=style.ORANGE, label=f"the {few} fastest"),
                        Line2D([], [], color=style.BLUE, alpha=0.5, label="the others")][:1 + (len(rows) > few)], 40)
    style.title(axes, "All layouts of a search that were laid out in time",
                "; ".join([*record.get("about", []), "of each value the fastest are on top",
                           *([f"all with {', '.join(same)}"] if same else [])]))
    return fig


def label(axes, x, height, text, left=False):
    """A value beside an axis, on paper that hides the lines behind it."""
    axes.annotate(text, (x, height), xytext=(-5 if left else 5, 0), ha="right" if left else "left", va="center",
                  textcoords="offset points", fontsize=style.SMALL, zorder=5,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})


def mfu_axis(axes, x, rows):
    """Labels of the last axis, which reaches from one of them to another; each layout's height there."""
    percent = [100 * row["mfu"] for row in rows]
    step = next((step for step in PERCENT if (max(percent) - min(percent)) / step <= 5), PERCENT[-1])
    low, high = math.floor(min(percent) / step), math.floor(max(percent) / step) + 1
    for place in range(low, high + 1):
        label(axes, x, (place - low) / (high - low), f"{step * place} %")
    return [(value / step - low) / (high - low) for value in percent]


def main(argv):
    """Draws the figure; the exit code."""
    return heatmap.main(argv, draw)


if __name__ == "__main__":
    style.run(main)
