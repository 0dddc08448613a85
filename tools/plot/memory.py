"""Draws RUN_DIR/memory.png and memory.svg.    usage: python3 tools/plot/memory.py RUN_DIR

What is live by category, from the allocations and releases of the recorded steps, with the phases
of each step above.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from tools.base import BookError  # noqa: E402
from tools.look import palette  # noqa: E402
from tools.look import memory as memories  # noqa: E402
from tools.look.runs import read_run  # noqa: E402
from tools.plot import style  # noqa: E402

# The phases, in greys: the colours are the categories'.
SHORT = {"forward": "FWD", "backward": "BWD", "optimizer": "OPT"}
GREYS = {"forward": palette.GREYS["forward"][0], "backward": style.MUTED, "optimizer": style.INK}
BETWEEN = palette.GREYS["lane"][0]
MOST_STEPS = 10       # drawn; later ones look alike
MOST_MOMENTS = 1200   # drawn: the figure is some 800 pixels wide where it is read
FITS = 0.09           # of the width, that a label in a phase needs
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def unit_for(size):
    """(bytes, name) of the largest unit that a size has at least one of."""
    return next((unit for unit in UNITS if size >= unit[0]), UNITS[-1])


def live_bytes(memory):
    """(times, live): live[category, i] is live from times[i] on; times are ns, the first is where
    recording began."""
    live = np.zeros((len(memory.categories), len(memory.times) + 1))
    live[:, 0] = memory.initial
    live[memory.kinds, np.arange(1, len(memory.times) + 1)] = memory.sizes
    begin = min([memory.times[0], *(phase.begin for phase in memory.phases)])
    return np.array([begin, *memory.times], dtype=np.int64), np.cumsum(live, axis=1)


def thin_out(times, live, most=MOST_MOMENTS):
    """Of many moments, the highest, the lowest and the last of each of most / 3 equal spans of
    time. Each keeps its own composition: no peak is lost, none invented, and what lasts is shown."""
    if len(times) <= most:
        return times, live
    spans = np.linspace(times[0], times[-1], most // 3 + 1)
    bounds = np.unique(np.append(np.searchsorted(times, spans[:-1]), len(times)))
    total, kept = live.sum(axis=0), {0, len(times) - 1}
    for first, last in zip(bounds, bounds[1:]):
        part = total[first:last]
        kept |= {first + int(part.argmax()), first + int(part.argmin()), int(last) - 1}
    kept = sorted(kept)
    return times[kept], live[:, kept]


def window(memory):
    """(begin, end, how many steps were left out): the first steps, or all where none is marked."""
    steps = memory.steps()
    begin = min([memory.times[0], *(phase.begin for phase in memory.phases)])
    end = max([memory.times[-1], *(phase.end for phase in memory.phases)])
    if len(steps) > MOST_STEPS:
        return begin, steps[MOST_STEPS - 1].end, len(steps) - MOST_STEPS
    return begin, max(end, begin + 1), 0


def draw_live(axes, memory, span, unit):
    """The categories on top of each other; returns those that are ever live."""
    begin, end = span
    times, live = live_bytes(memory)
    inside = times <= end
    times, live = thin_out(times[inside], live[:, inside])
    times = np.repeat(1e-6 * (np.append(times, end) - begin), 2)[1:-1]
    order = stack(memory.categories)
    tops, drawn = np.cumsum(live[order], axis=0) / unit, {}
    # From the highest down to the axis, and the next one over it.
    for kind, top in reversed([*zip(order, tops)]):
        if live[kind].any():
            drawn[memory.categories[kind]] = color = color_of(memory.categories[kind])
            bend = np.flatnonzero(np.diff(top)) + 1  # elsewhere the line goes straight on
            corners = np.repeat(top, 2)
            kept = np.unique([0, *(2 * bend - 1), *(2 * bend), len(corners) - 1])
            area, = axes.fill([times[0], *times[kept], times[-1]], [0, *corners[kept], 0],
                              facecolor=color, linewidth=0)
            area.set_gid(f"live_{memory.categories[kind]}")
    axes.set_xlim(0, 1e-6 * (end - begin))
    return dict(reversed(drawn.items()))


def stack(categories):
    """Indices of the categories from the bottom of the stack to its top: what stays is below."""
    order = list(style.CATEGORIES)
    return sorted(range(len(categories)), key=lambda kind: order.index(categories[kind])
                  if categories[kind] in order else len(order))


def color_of(category):
    return style.CATEGORIES.get(category, style.MUTED)


def draw_phases(axes, memory, span):
    """A strip of the phases, with their short names where they fit, and the number of each step."""
    begin, end = span
    for phase in memory.phases:
        if phase.begin >= end:
            continue
        left, width = 1e-6 * (phase.begin - begin), 1e-6 * (phase.end - phase.begin)
        middle = left + width / 2
        if phase.name == memories.STEP:
            axes.broken_barh([(left, width)], (0, 1), facecolors=BETWEEN, linewidths=0, zorder=0.5)
            axes.annotate(f"step {phase.step}", (middle, 1.2), ha="center", va="bottom",
                          fontsize=style.SMALL, annotation_clip=False)
            continue
        drawn = axes.broken_barh([(left, width)], (0, 1), facecolors=GREYS[phase.name],
                                 linewidths=0)
        drawn.set_gid(f"step_{phase.step}_{phase.name}")
        if width > FITS * 1e-6 * (end - begin):
            axes.annotate(SHORT[phase.name], (middle, 0.46), ha="center", va="center",
                          color=style.INK if phase.name == "forward" else "white",
                          fontsize=style.SMALL)
    axes.set_xlim(0, 1e-6 * (end - begin))
    axes.set_ylim(0, 1)
    axes.axis("off")


def draw_limits(axes, memory, unit):
    """Two dashed lines, named on the right: the most that was live at a time, and the most that was
    taken from the system."""
    size, name = unit
    top = 1.06 * max(memory.peak_total, memory.reserved) / size
    limits = {"max allocated": memory.peak_total / size, "max reserved": memory.reserved / size}
    close = abs(memory.peak_total - memory.reserved) / size < 0.12 * top
    highest = max(limits, key=limits.get)
    for label, value in limits.items():
        axes.axhline(value, color=style.INK, linewidth=1.0, dashes=(5, 3),
                     gid=label.replace(" ", "_"))
        side = "center" if not close else "bottom" if label == highest else "top"
        axes.annotate(f"{label}\n{value:,.1f} {name}", (1, value), xytext=(6, 0), va=side,
                      xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=style.SMALL)
    axes.set_ylim(0, top)


def heading(memory, run, left_out):
    """(title, subtitle)"""
    steps = len(memory.steps()) - left_out
    config = run.get("config") or {}
    facts = [f"{style.human(run['parameters'])} parameters" if "parameters" in run else "",
             str(config.get("dtype", "")),
             f"{config['micro_batch_size']} × {config['seq_len']} tokens"
             if {"micro_batch_size", "seq_len"} <= set(config) else ""]
    for flag in ("attention", "recompute"):
        if flag in config:
            facts.append(f"{flag} {config[flag]}")
    if left_out:
        facts.append(f"{left_out} more were recorded")
    first = {0: "recorded", 1: "of the first step"}.get(steps, f"of the first {steps} steps")
    # A line breaks between facts, not within one.
    return f"Memory {first}", " · ".join(fact.replace(" ", "\u00a0") for fact in facts if fact)


def draw(memory, run):
    """The figure of one run."""
    begin, end, left_out = window(memory)
    unit = unit_for(memory.peak_total)
    fig, (axes,) = style.figure(size=(5.0, 4.6))
    drawn = draw_live(axes, memory, (begin, end), unit[0])
    draw_limits(axes, memory, unit)
    draw_phases(axes.inset_axes([0, 1.025, 1, 0.055]), memory, (begin, end))
    for step in memory.steps()[1:MOST_STEPS]:
        axes.axvline(1e-6 * (step.begin - begin), color="white", linewidth=0.8)
    axes.set_xlabel(memories.clock(run))
    axes.set_ylabel(unit[1])
    below = style.legend(axes, style.patches(drawn), 42)
    marked = {phase.name for phase in memory.phases} & set(GREYS)
    if marked:
        greys = {f"{SHORT[name]}: {name}": grey for name, grey in GREYS.items() if name in marked}
        style.legend(axes, style.patches({**greys, "between them": BETWEEN}), below)
    title, subtitle = heading(memory, run, left_out)
    style.heading(axes, title, subtitle, 46)
    return fig


def main(argv):
    """Draws the figure of one run; the exit code."""
    if len(argv) != 2:
        raise BookError("usage: python3 tools/plot/memory.py RUN_DIR", 2)
    run_dir = Path(argv[1])
    memory = memories.load(run_dir)
    fig = draw(memory, read_run(run_dir))
    try:
        style.save(fig, run_dir / "memory.png", run_dir / "memory.svg")
    except OSError as error:
        raise BookError(f"cannot write into {run_dir}: {error.strerror}")
    return 0


if __name__ == "__main__":
    style.run(main)
