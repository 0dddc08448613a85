"""A figure of one step of each way of doing something, on one time axis: what the chapters'
plot_timelines.py draw, from a file that tools/look/timelines.py describes."""
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox, TransformedBbox

from tools.look import timelines
from tools.plot import style, timeline

TITLE_INCHES = 0.34  # above each panel
WIDTH_INCHES = 5.3


def circumstances(record, titles):
    """Where the steps come from: once, if they all say the same."""
    said = {}
    for way in record["ways"]:
        said.setdefault(way["circumstances"], []).append(titles[way["way"]].split(":")[0])
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(ways)}: {text}" for text, ways in said.items())


def draw(record, titles):
    """The figure: a panel for each way; titles: {way: its name: what it is}."""
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
        panel.annotate(f"{titles[way['way']]}: {way.get('whole_ms', way['ms']):.0f} ms", (0, 1),
                       xytext=(0, 5), xycoords="axes fraction", textcoords="offset points",
                       fontsize=11)
        panel.set_xlim(0, 1.01 * longest)
        # What was begun in the step and ended in the next one is cut off where the step ends.
        step = TransformedBbox(Bbox(list(zip((0, way["ms"]), sorted(panel.get_ylim())))),
                               panel.transData)
        for drawn in panel.collections:
            drawn.set_clip_box(step)
        if panel is not axes[-1]:
            panel.spines["bottom"].set_visible(False)
            panel.tick_params(axis="x", labelbottom=False, length=0)
    axes[-1].xaxis.set_major_locator(MaxNLocator(7))
    parts = any("whole_ms" in way for way in ways)
    axes[-1].set_xlabel("ms" if parts else "ms since the step began")
    done = timeline.in_order(seen)
    waits = {name: done.pop(name) for name in timeline.WAITS if name in done}
    below = 44
    for row in (done, waits, timeline.collectives(
            [rank.communications for of_way in ranks for rank in of_way], colors)):
        below = style.legend(axes[-1], style.patches(row), below)
    what = "A part of a step of each way" if parts else "One step of each way, on one time axis"
    style.heading(axes[0], what, circumstances(record, titles), 26)
    return fig
