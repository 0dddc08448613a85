"""Draws one step of a trace.    usage: python3 tools/plot/timeline.py RUN_DIR TRACE STEM [STEP]

Every rank has a lane for what it computes and waits for, and one below it for its messages. Where a
device computes, the first lane is the device's, and copies for messages are among these.
"""
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.collections import LineCollection  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from tools.base import BookError  # noqa: E402
from tools.look import palette  # noqa: E402
from tools.look import trace as traces  # noqa: E402
from tools.plot import style  # noqa: E402

PHASES = {"forward": palette.FORWARD, "backward": palette.BACKWARD, "optimizer": palette.OPTIMIZER,
          traces.STEP: palette.OTHER}
LABELS = {traces.STEP: "anything else"}
EXPOSED, SKEW = palette.EXPOSED, palette.SKEW
WAITS = {"waits for messages": EXPOSED, "waits for a later rank": SKEW}
LIKE = {"dp_cp": "dp", "cp_ring": "cp"}  # a group in the colour of one that is like it
DIMENSIONS = {"dp": palette.DP, "tp": palette.TP, "cp": "#e69f00", "pp": "#882255", "ep": "#999933",
              "world": "#6b7280"}
GATHERS = "gathers"    # of a dimension in which there are other collectives, too: another shade
FREED, FREED_WIDTH = "weights freed", 0.0045  # of the width
COPIES = "copies"      # to and from devices, in the place of a dimension
MORE = ("#95603f", "#8f6f9f", "#b3a369", "#7c4d79")  # none of them like a phase's
PATH, UNREADY = "a message's way", "thin: the other end is not there yet"
THICK, THIN = 0.76, 0.16  # of a row: a bar of messages; one that waits for the other end
COMPUTE_INCHES, MESSAGES_INCHES, GAP_INCHES = 0.28, 0.14, 0.12
MOST_ROWS = 3          # of operations of one dimension that a rank is in at the same time
MOST_INCHES = 11.0     # of all lanes
MOST_MESSAGES = 600    # with a line each
NUMBER_INCHES, AXES_INCHES = 0.1, 4.1  # a digit on a bar; the axes' width, about
SEPARATED = 0.004      # of the width: bars from here on are set off against their neighbors


def choose_step(trace, wanted):
    """(step, shares of the ranks): the wanted one, or the last that was recorded."""
    found = traces.steps(trace)
    step = wanted if wanted is not None else list(found)[-1]
    if step not in found:
        raise BookError(f"step {step} is not in the trace; steps {', '.join(map(str, found))} are",
                        2)
    return step, found[step]


def inside(items, begin, end):
    """Those that last some time between begin and end."""
    return [item for item in items
            if item.begin < end and item.begin + item.duration > begin and item.duration > 0]


def spread(items):
    """[(row, communication)]: those that overlap lie in different rows, as far as there are any."""
    placed, free = [], []
    for item in items:
        row = next((i for i, end in enumerate(free) if end <= item.begin + 1e-3), len(free))
        row = min(row, MOST_ROWS - 1)
        free[row:row + 1] = [item.begin + item.duration]
        placed.append((row, item))
    return placed


def count_rows(ranks):
    return 1 + max([row for placed in ranks for row, _ in placed], default=-1)


def is_free(row, items):
    """Whether items fit among those that lie in a row."""
    both = sorted([*row, *items], key=lambda item: item.begin)
    return all(a.begin + a.duration <= b.begin + 1e-3 for a, b in zip(both, both[1:]))


def lay_rows(ranks, dimensions):
    """spread() for all ranks; dimensions that overlap each other lie in different rows."""
    together = [spread(items) for items in ranks]
    alone = [[spread([c for c in items if c.dimension == d]) for items in ranks]
             for d in dimensions]
    if count_rows(together) == max(map(count_rows, alone), default=0):
        return together
    rows = []  # of each, what every rank has in it
    for of_dimension in alone:
        for number in range(count_rows(of_dimension)):
            own = [[item for at, item in placed if at == number] for placed in of_dimension]
            row = next((row for row in rows if all(map(is_free, row, own))), None)
            if row is None:
                row = [[] for _ in ranks]
                rows.append(row)
            for items, more in zip(row, own):
                items += more
    return [[(number, item) for number, row in enumerate(rows) for item in row[rank]]
            for rank in range(len(ranks))]


class Lanes:
    """Where the lanes of the ranks are, in inches from the top; y grows downwards."""

    def __init__(self, ranks, rows):
        each = COMPUTE_INCHES + rows * MESSAGES_INCHES + GAP_INCHES
        shrink = min(1.0, MOST_INCHES / (ranks * each))
        self.ranks, self.rows = ranks, rows
        self.compute, self.messages = shrink * COMPUTE_INCHES, shrink * MESSAGES_INCHES
        self.pitch = shrink * each

    def top(self, rank):
        return rank * self.pitch

    def row(self, rank, row):
        return self.top(rank) + self.compute + row * self.messages

    @property
    def height(self):
        return self.ranks * self.pitch


def bars(axes, spans, y, height, color, name, window):
    """Bars [(begin, end)] of one colour in a lane, in ms from the step's begin; `name` is their id.

    A thin gap tells long ones from their neighbors of the same colour.
    """
    begin, gap = 1e-3 * window[0], SEPARATED * 1e-3 * (window[1] - window[0])
    boxes = [(1e-3 * a - begin, 1e-3 * (b - a)) for a, b in spans]
    drawn = axes.broken_barh(boxes, (y, height), facecolors=color, edgecolors="white",
                             linewidths=[0.7 if width > gap else 0 for _, width in boxes])
    drawn.set_gid(name)


class OfCopy(NamedTuple):
    """A device's copy for a message, drawn as messages are."""

    begin: float
    duration: float
    dimension: str
    kind: str


def messages_of(rank, begin, end):
    """What is drawn in a rank's lane of messages."""
    copies = [OfCopy(copy.begin, copy.duration, COPIES, copy.where_to.removeprefix("to the "))
              for copy in inside(rank.copies, begin, end)]
    return inside(rank.communications, begin, end) + copies


def draw_compute(axes, lanes, number, rank, window):
    """The main thread, or the device, of a rank: its phases, and over them its waits; {name:
    colour} of them. Of two phases that take turns the second one covers the lower half."""
    begin, end = window
    y, seen, waits = lanes.top(number), {}, inside(rank.stalls, begin, end)
    for span in inside(rank.work, begin, end):
        if span.category == "phase" and span.name in PHASES:
            covered = lanes.compute / 2 if span.turn else lanes.compute
            bars(axes, [(span.begin, span.begin + span.duration)], y + lanes.compute - covered,
                 covered, PHASES[span.name], f"rank_{number}_{span.name}", window)
            seen[LABELS.get(span.name, span.name)] = PHASES[span.name]
            number_bar(axes, span, waits, y + lanes.compute - covered, covered, window)
    parts = {"waits for a later rank": [(w.begin, w.begin + w.skew) for w in waits if w.skew > 0],
             "waits for messages": [(w.begin + w.duration - w.exposed, w.begin + w.duration)
                                    for w in waits if w.exposed > 0]}
    for label, spans in parts.items():
        if spans:
            bars(axes, spans, y, lanes.compute, WAITS[label],
                 f"rank_{number}_{label.replace(' ', '_')}", window)
            seen[label] = WAITS[label]
    freed = [(time, time + FREED_WIDTH * (end - begin)) for time in times_of_release(rank)
             if begin <= time < end]
    if freed:
        bars(axes, freed, y, lanes.compute, style.INK, f"rank_{number}_freed", window)
        seen[FREED] = style.INK
    return seen


def number_bar(axes, span, waits, y, height, window):
    """A phase's micro-batch on its bar, in the longest part without waits, if there is room."""
    number, end = str(getattr(span, "micro_batch", -1)), min(span.begin + span.duration, window[1])
    parts, at = [], max(span.begin, window[0])
    for wait in inside(waits, at, end):
        parts.append((wait.begin - at, at))
        at = wait.begin + wait.duration
    length, begin = max([*parts, (end - at, at)])
    room = length / (window[1] - window[0]) * AXES_INCHES
    if number != "-1" and height > 0.2 and room > NUMBER_INCHES * len(number):
        axes.text(1e-3 * (begin + length / 2 - window[0]), y + height / 2, number, zorder=3,
                  ha="center", va="center", fontsize=style.SMALL,
                  color=palette.text_on(PHASES[span.name]))


def times_of_release(rank):
    """When gathered weights became fewer."""
    gathered = [buffer for buffer in rank.buffers if buffer.name == "gathered weights"]
    return [after.time for before, after in zip(gathered, gathered[1:])
            if after.bytes < before.bytes]


def label_of(item, colors):
    """What an operation is called in the legend."""
    gathers = f"{item.dimension} {GATHERS}"
    return gathers if item.kind == "all_gather" and gathers in colors else item.dimension


def moves_from(trace):
    """{id of a send or recv: when both of its ends were there}; what a side had to wait until then
    is no transfer."""
    return {id(item): max(part.begin for _, part in parts)
            for key, parts in traces.match(trace).items() if key[-1] == "message"
            for _, item in parts}


def draw_messages(axes, lanes, number, placed, colors, window, moves):
    """The operations of a rank, each in its colour."""
    for label, color in colors.items():
        for row in range(lanes.rows):
            thin, thick = [], []
            for at, item in placed:
                if at == row and label_of(item, colors) == label:
                    begin, end = item.begin, item.begin + item.duration
                    moving = min(moves.get(id(item), begin), end)
                    thin += [(begin, moving)] if moving > begin else []
                    thick += [(moving, end)] if end > moving else []
            for spans, height in ((thin, THIN), (thick, THICK)):
                if spans:
                    bars(axes, spans, lanes.row(number, row) + (1 - height) / 2 * lanes.messages,
                         height * lanes.messages, color,
                         f"rank_{number}_{label.replace(' ', '_')}", window)


def draw_paths(axes, lanes, trace, begin, placed, moves):
    """A thin line from where a message leaves to where it arrives, behind the bars; how many."""
    rows = {(number, id(item)): row for number, items in enumerate(placed) for row, item in items}
    lines = []
    for key, parts in traces.match(trace).items():
        ends = [(number, id(item)) for number, item in parts]
        if key[-1] != "message" or not all(end in rows for end in ends):
            continue
        times = (moves[id(parts[0][1])], parts[1][1].begin + parts[1][1].duration)
        lines.append([(1e-3 * (time - begin), lanes.row(end[0], rows[end]) + lanes.messages / 2)
                      for time, end in zip(times, ends)])
    if len(lines) > MOST_MESSAGES:
        return 0
    axes.add_collection(LineCollection(lines, colors=style.INK, linewidths=0.6, zorder=0.9),
                        autolim=False)
    return len(lines)


def dimension_colors(ranks):
    """{label: colour} of what is drawn, in the order of DIMENSIONS."""
    names = {item.dimension for items in ranks for item in items}
    known = [name for name in DIMENSIONS if name in names]
    others = sorted(names - set(known))
    plain = {**{name: DIMENSIONS[name] for name in known},
             **{name: MORE[i % len(MORE)] for i, name in enumerate(others)}}
    for name in plain:
        like = LIKE.get(name)
        if like:
            plain[name] = style.other_shade(DIMENSIONS[like]) if like in plain else DIMENSIONS[like]
    colors = {}
    for name, color in plain.items():
        colors[name] = color
        kinds = {item.kind for items in ranks for item in items if item.dimension == name}
        if "all_gather" in kinds and len(kinds) > 1:
            colors[f"{name} {GATHERS}"] = style.other_shade(color)
    return colors


def collectives(messages, colors):
    """{"dp: all-reduce, reduce-scatter": colour}: what the legend says of messages."""
    kinds = {label: [] for label in colors}
    for item in (item for items in messages for item in items):
        own = kinds[label_of(item, colors)]
        if item.kind not in own:
            own.append(item.kind)
    return {f"{label.split()[0]}: {', '.join(kinds[label]).replace('_', '-')}": color
            for label, color in colors.items()}


def draw_ranks(axes, lanes, ranks, placed, colors, window, moves=None):
    """All lanes of a panel; {name: colour} of what the main threads did. moves: moves_from()."""
    seen = {}
    for number, rank in enumerate(ranks):
        seen.update(draw_compute(axes, lanes, number, rank, window))
        draw_messages(axes, lanes, number, placed[number], colors, window, moves or {})
    axes.set_ylim(lanes.height - GAP_INCHES / 4, -GAP_INCHES / 2)
    axes.grid(axis="y", visible=False)
    return seen


def in_order(seen):
    """The same, in the order of a legend."""
    order = [*(LABELS.get(name, name) for name in PHASES), FREED, *WAITS]
    return {name: seen[name] for name in order if name in seen}


def label_lanes(axes, lanes, waited):
    """Names on the left, and on the right the share of the step for which a rank waited."""
    axes.set_yticks([lanes.top(rank) + lanes.compute / 2 for rank in range(lanes.ranks)],
                    [f"rank {rank}" for rank in range(lanes.ranks)])
    axes.tick_params(axis="y", length=0, labelsize=11 if lanes.pitch > 0.2 else 6)
    if lanes.messages > 0.09 and lanes.rows:
        for rank in range(lanes.ranks):
            axes.annotate("messages", (0, lanes.row(rank, lanes.rows / 2)), xytext=(-4, 0),
                          xycoords=("axes fraction", "data"), textcoords="offset points",
                          ha="right", va="center", color=style.MUTED, fontsize=style.SMALL)
    for rank, share in enumerate(waited):
        axes.annotate(f"waits {100 * share:.0f} %", (1, lanes.top(rank) + lanes.compute / 2),
                      xytext=(5, 0), xycoords=("axes fraction", "data"), va="center",
                      textcoords="offset points", color=style.MUTED,
                      fontsize=style.SMALL if lanes.pitch > 0.2 else 6)


def short_cpu(name):
    """A CPU's name without what all names have."""
    return " ".join(re.sub(r"\((R|TM|tm)\)|\b(CPU|Processor)\b|\d+-Core|@.*", "", name).split())


def caption(trace, run_dir):
    """Where the times come from."""
    text = traces.circumstances(trace)
    if trace.facts["origin"] == "replayed":
        return text
    try:
        run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        return f"{text} · {short_cpu(run['machine']['cpu'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return text


def draw(trace, run_dir, wanted):
    """The figure of one step."""
    step, shares = choose_step(trace, wanted)
    window = (min(share.begin for share in shares), max(share.end for share in shares))
    messages = [messages_of(rank, *window) for rank in trace.ranks]
    colors = dimension_colors(messages)
    placed = lay_rows(messages, colors)
    lanes = Lanes(len(trace.ranks), count_rows(placed))
    fig, (axes,) = style.figure(size=(5.3, lanes.height + 0.1))
    moves = moves_from(trace)
    seen = draw_ranks(axes, lanes, trace.ranks, placed, colors, window, moves)
    paths = draw_paths(axes, lanes, trace, window[0], placed, moves)
    axes.set_xlim(0, 1e-3 * (window[1] - window[0]))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_xlabel(f"ms since step {step} began")
    label_lanes(axes, lanes, [(share.exposed + share.skew) / max(share.end - share.begin, 1e-9)
                              for share in shares])
    below = style.legend(axes, style.patches(in_order(seen)), 44)
    below = style.legend(axes, style.patches(collectives(messages, colors)), below)
    if paths:
        style.legend(axes, [Line2D([], [], color=style.INK, linewidth=0.6, label=PATH),
                            Line2D([], [], color=style.MUTED, linewidth=2, label=UNREADY)], below)
    facts = trace.facts
    ranks, duration = traces.counted(len(trace.ranks), "rank"), 1e-3 * (window[1] - window[0])
    style.title(axes, f"{facts['chapter']}, step {step} on {ranks}: {duration:.1f} ms",
                caption(trace, run_dir))
    return fig


def main(argv, draw_step=draw):
    """Draws the figure of one step of a trace; the exit code."""
    if len(argv) not in (4, 5):
        raise BookError(f"usage: python3 {argv[0]} RUN_DIR TRACE STEM [STEP]", 2)
    run_dir, stem = Path(argv[1]), argv[3]
    fig = draw_step(traces.load(argv[2]), run_dir, int(argv[4]) if len(argv) == 5 else None)
    try:
        style.save(fig, f"{stem}.png", f"{stem}.svg")
    except OSError as error:
        raise BookError(f"cannot write {stem}.png: {error.strerror}")
    return 0


if __name__ == "__main__":
    style.run(main)
