"""Draws the operators of one step of a rank.    usage: python3 tools/plot/ops.py RUN_DIR TRACE STEM [STEP]

Above the whole step, below it one block's forward and backward pass, where operators have room for
their names. Lanes: passes, blocks, segments of a block, operators.
"""
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from tools.bench.limits import ATTENTION, MATMUL, MEMORY, kind_of  # noqa: E402
from tools.look import palette  # noqa: E402
from tools.look import trace as traces  # noqa: E402
from tools.plot import style  # noqa: E402
from tools.plot.timeline import EXPOSED, caption, choose_step, inside, main  # noqa: E402

RANK = 0
WAIT, OUTSIDE = "waiting", "outside of operators"
COLORS = {MATMUL: style.BLUE, ATTENTION: style.ORANGE, MEMORY: style.GREEN, WAIT: EXPOSED,
          OUTSIDE: palette.GREYS["outside"][0]}
LANE, DARK_LANE = palette.GREYS["lane"][0], palette.GREYS["dark lane"][0]  # phases, in turns
NAMES = ("pass", "block", "segment", "operator")
FULL = {"grad_squares": "gradient norm", "take_batch": "batch"}
SHORT = {"attention": "attn", "embedding": "emb", "forward": "fwd", "backward": "bwd",
         "grad_squares": "norm", "optimizer": "opt"}
LANE_INCHES, BAR = 0.3, 0.88  # and the part of it that a bar fills
CHARACTER = 0.072  # inches, of a label in a bar
INCHES = 4.6       # of the axes, about
SHORTENED = {"linear_forward": "$y = xW^T$", "linear_forward_add": "$y = r + xW^T$",
             "linear_backward_input": "$dx = dy\\,W$", "linear_backward_weight": "$dW = dy^T x$",
             "attention_forward": "attention", "attention_backward": "attention",
             "attention_delta": "delta",
             "rmsnorm_forward": "norm", "rmsnorm_backward_input": "norm dx",
             "rmsnorm_backward_weight": "norm dw", "swiglu_forward": "swiglu",
             "swiglu_backward": "swiglu"}


class Kind(NamedTuple):
    """What the operators of one kind took of a step, in us, and did in it."""

    time: float
    flops: int
    bytes: int


def add_up(operators, waits, duration):
    """{kind: Kind} of a step, what no operator and no wait accounts for among them."""
    sums = defaultdict(lambda: [0.0, 0, 0])
    for span in operators:
        of_kind = sums[kind_of(span.name)]
        for i, value in enumerate((span.duration, span.flops, span.bytes)):
            of_kind[i] += value
    if waits:
        sums[WAIT] = [sum(wait.duration for wait in waits), 0, 0]
    accounted = sum(time for time, _, _ in sums.values())
    sums[OUTSIDE] = [max(0.0, duration - accounted), 0, 0]
    return {kind: Kind(*sums[kind]) for kind in COLORS if kind in sums}


def describe(kind, total, duration):
    """matmul 61 %, 150 GFLOP/s"""
    text = f"{kind} {100 * total.time / duration:.1f} %"
    if kind in (MATMUL, ATTENTION):
        return f"{text}, {total.flops / total.time * 1e-3:.0f} GFLOP/s"
    return f"{text}, {total.bytes / total.time * 1e-3:.1f} GB/s" if kind == MEMORY else text


def nest(phases):
    """[(depth, span)]: a step has depth 0, a pass 1, a block 2, its segments 3."""
    placed, ends = [], []
    for span in sorted(phases, key=lambda s: (s.begin, -s.duration)):
        while ends and ends[-1] <= span.begin:
            ends.pop()
        placed.append((len(ends), span))
        ends.append(span.begin + span.duration)
    return placed


def label(axes, texts, begin, duration, y, color):
    """The first of the texts that fits, in the middle of a bar."""
    left, right = axes.get_xlim()
    room = duration / (right - left) * INCHES / CHARACTER
    for text in texts:
        if len(re.sub(r"[$^\\]", "", text)) < room:
            axes.text(begin + duration / 2, y, text, ha="center", va="center", fontsize=style.SMALL,
                      color=color, clip_on=True)
            return


def draw_phases(axes, spans, row):
    """A lane of phases in two tones by turns, as far as the panel reaches."""
    left, right = axes.get_xlim()
    for i, span in enumerate(inside(spans, left, right)):
        begin, end = max(left, span.begin), min(right, span.begin + span.duration)
        axes.broken_barh([(begin, end - begin)], (row - BAR / 2, BAR),
                         facecolors=(LANE, DARK_LANE)[i % 2], edgecolors="none")
        short = SHORT.get(span.name, span.name.removeprefix("block "))
        label(axes, (FULL.get(span.name, span.name), short), begin, end - begin, row, style.INK)


def draw_operators(axes, operators, waits, row):
    """The lane of operators and waits, by kind."""
    left, right = axes.get_xlim()
    bars = defaultdict(list)
    for span in inside(operators, left, right):
        bars[kind_of(span.name)].append((span.begin, span.duration))
        name = SHORTENED.get(span.name, span.name.replace("_", " "))
        label(axes, (name,), span.begin, span.duration, row, "white")
    bars[WAIT] = [(wait.begin, wait.duration) for wait in inside(waits, left, right)]
    axes.broken_barh([(left, right - left)], (row - BAR / 2, BAR), facecolors=COLORS[OUTSIDE],
                     zorder=0.8)
    visible = 0.0025 * (right - left)
    for kind, boxes in bars.items():
        drawn = axes.broken_barh(boxes, (row - BAR / 2, BAR), facecolors=COLORS[kind],
                                 edgecolors="white",
                                 linewidths=[0.4 if width > visible else 0 for _, width in boxes])
        drawn.set_gid(kind.replace(" ", "_"))


def draw_panel(axes, placed, operators, waits, window, lanes):
    """A window of time, in ms from the step's begin; `lanes` of NAMES, the last ones."""
    axes.set_xlim(*window)
    first = len(NAMES) - lanes
    for row in range(lanes - 1):
        draw_phases(axes, [span for depth, span in placed if depth == first + row + 1], row)
    draw_operators(axes, operators, waits, lanes - 1)
    axes.set_ylim(lanes - 0.45, -0.5)
    axes.set_yticks(range(lanes), NAMES[first:])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(7))


def middle_block(placed):
    """The block half-way through the model, as the last forward and the last backward pass ran it:
    {"forward": span, "backward": span}; nothing in a trace without blocks."""
    found = {}
    for depth, span in placed:
        if depth != 2 or not span.name.startswith("block "):
            continue
        passes = [outer.name for at, outer in placed if at == 1 and outer.begin <= span.begin
                  and span.begin < outer.begin + outer.duration]
        found.setdefault(passes[0], {})[span.name] = span
    names = list(found.get("forward", ()))
    if not names:
        return {}
    chosen = names[len(names) // 2]
    return {which: found[which][chosen] for which in ("forward", "backward")
            if chosen in found.get(which, ())}


def relative(items, origin):
    """The same in ms since `origin`."""
    return [item._replace(begin=1e-3 * (item.begin - origin), duration=1e-3 * item.duration)
            for item in items]


def draw(trace, run_dir, wanted):
    """The figure of one step of RANK."""
    step, shares = choose_step(trace, wanted)
    share, rank = shares[RANK], trace.ranks[RANK]
    duration = share.end - share.begin
    spans = inside(rank.work, share.begin, share.end)
    operators = [span for span in spans if span.category == "op"]
    waits = inside(rank.stalls, share.begin, share.end)
    totals = add_up(operators, waits, duration)
    placed = nest(relative([span for span in spans if span.category == "phase"], share.begin))
    operators, waits = relative(operators, share.begin), relative(waits, share.begin)
    zooms = middle_block(placed)
    windows = [(0, 1e-3 * duration)] + [(zoom.begin, zoom.begin + zoom.duration)
                                        for zoom in zooms.values()]
    fig, panels = make_panels([len(NAMES)] + [2] * len(zooms))
    for axes, window, lanes in zip(panels, windows, [len(NAMES)] + [2] * len(zooms)):
        draw_panel(axes, placed, operators, waits, window, lanes)
    for axes, (which, zoom) in zip(panels[1:], zooms.items()):
        axes.set_title(f"{zoom.name}, {which}: {zoom.duration:.2f} ms", loc="left", fontsize=11.5,
                       pad=4)
    panels[-1].set_xlabel(f"ms since step {step} began")
    texts = [describe(kind, total, duration) for kind, total in totals.items()]
    style.legend(panels[-1], style.patches(dict(zip(texts, map(COLORS.get, totals)))), 44)
    ranks = "" if len(trace.ranks) == 1 else f", rank {RANK}"
    style.title(panels[0], f"{trace.facts['chapter']}, step {step}{ranks}: "
                f"{1e-3 * duration:.1f} ms", caption(trace, run_dir))
    return fig


def make_panels(lanes):
    """A figure with a panel for every number of lanes: (figure, [axes])."""
    style.apply()
    heights = [LANE_INCHES * count for count in lanes]
    gaps = 0.62  # inches
    fig, axes = plt.subplots(
        len(lanes), 1, figsize=(style.WIDTH, sum(heights) + gaps * len(lanes)), squeeze=False,
        gridspec_kw={"height_ratios": heights, "hspace": gaps * len(lanes) / sum(heights)})
    return fig, list(axes[:, 0])


if __name__ == "__main__":
    style.run(partial(main, draw_step=draw))
