"""Draws a step of every way of data parallelism and of ZeRO on one time axis.

    arguments: TIMELINES.json STEM
"""
import json
import textwrap
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from tools import timelines
from tools.base import BookError
from tools.plot import style, timeline

TITLES = {"naive": "naive: one all-reduce after backward",
          "overlapped": "overlapped: an all-reduce for each parameter, under backward",
          "bucketed": "bucketed: an all-reduce for each bucket, under backward",
          "zero1_forward": "ZeRO-1: reduce-scatter under backward, all-gather under forward",
          "zero2": "ZeRO-2: the same, and gradients are freed",
          "zero3": "ZeRO-3: all-gather before each use, reduce-scatter under backward"}
TITLE_INCHES = 0.34  # above each panel
WIDTH_INCHES = 6.4   # small, so that the text is large
WRAP = 74            # characters


def circumstances(record):
    """Where the steps come from: once, if they all say the same."""
    said = {}
    for way in record["ways"]:
        said.setdefault(way["circumstances"], []).append(TITLES[way["way"]].split(":")[0])
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(ways)}: {text}" for text, ways in said.items())


def draw(record):
    """The figure: a panel for each way."""
    ways = record["ways"]
    ranks = [timelines.ranks_of(way) for way in ways]
    colors = timeline.dimension_colors([rank.communications for of_way in ranks for rank in of_way])
    placed = [timeline.lay_rows([rank.communications for rank in of_way], colors)
              for of_way in ranks]
    lanes = [timeline.Lanes(len(of_way), timeline.count_rows(rows))
             for of_way, rows in zip(ranks, placed)]
    heights = [lane.height for lane in lanes]
    mean = sum(heights) / len(heights)
    fig, axes = style.figure(rows=len(ways), heights=heights,
                             size=(WIDTH_INCHES, sum(heights) + TITLE_INCHES * (len(ways) - 1)))
    axes[0].get_gridspec().update(hspace=TITLE_INCHES / mean, top=1, bottom=0)
    longest, seen = max(way["ms"] for way in ways), {}
    for panel, way, of_way, rows, lane in zip(axes, ways, ranks, placed, lanes):
        seen.update(timeline.draw_ranks(panel, lane, of_way, rows, colors, (0, 1000 * longest)))
        timeline.label_lanes(panel, lane, [rank["waited"] for rank in way["ranks"]])
        panel.annotate(f"{TITLES[way['way']]}: {way['ms']:.0f} ms", (0, 1), xytext=(0, 5),
                       xycoords="axes fraction", textcoords="offset points", fontsize=11.5)
        panel.set_xlim(0, 1.01 * longest)
        if panel is not axes[-1]:
            panel.spines["bottom"].set_visible(False)
            panel.tick_params(axis="x", labelbottom=False, length=0)
    axes[-1].xaxis.set_major_locator(MaxNLocator(8))
    axes[-1].set_xlabel("ms since the step began")
    done = timeline.in_order(seen)
    waits = {name: done.pop(name) for name in timeline.WAITS if name in done}
    for number, row in enumerate((done, waits, timeline.collectives(
            [rank.communications for of_way in ranks for rank in of_way], colors))):
        timeline.add_legend(axes[-1], row, 46 + 18 * number)
    said = textwrap.wrap(f"{circumstances(record)} · "
                         f"{timeline.short_cpu(record['machine']['cpu'])}", WRAP)
    for number, (text, look) in enumerate((("One step of each way, on one time axis",
                                            {"fontsize": 14}),
                                           ("\n".join(said), {"color": style.MUTED,
                                                              "fontsize": 10.5}))):
        axes[0].annotate(style.plain(text), (0, 1), xycoords="axes fraction",
                         xytext=(0, 26 if number else 32 + 13 * len(said)),
                         textcoords="offset points", **look)
    return fig


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: TIMELINES.json STEM", 2)
    style.save(draw(json.loads(Path(argv[1]).read_text(encoding="utf-8"))), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
