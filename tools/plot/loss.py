"""Draws RUN_DIR/loss.png and loss.svg, or STEM.svg from a record of a run.

usage: python3 tools/plot/loss.py RUN_DIR
       python3 tools/plot/loss.py RECORD.json STEM
"""
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from tools.base import BookError  # noqa: E402
from tools.look.runs import read_metrics, read_run  # noqa: E402
from tools.plot import style  # noqa: E402

SMOOTH_FROM_STEPS = 40  # shorter runs are drawn as they are
SMOOTH_SHARE = 25       # the window is 1 / SMOOTH_SHARE of the run


def smooth(values, window):
    """Mean over a centred window; only finite values count. At the beginning, where the loss falls
    fast, the window shrinks. At the end there is no mean where there is no whole window: that of a
    few steps would show their noise as a trend."""
    half = window // 2
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    reach = np.minimum(half, index)
    low, high = index - reach, np.minimum(index + reach + 1, len(values))
    known &= index + half < len(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return np.where(known, means, math.nan)


def column(records, key):
    """One value per record as an array, NaN where a record does not have it."""
    return np.array([float(record.get(key, math.nan)) for record in records])


def draw_series(axes, steps, values, color, label):
    """The measured line, and in long runs its mean over it; returns the window of the mean."""
    if len(steps) < SMOOTH_FROM_STEPS:
        marker = "o" if len(steps) < SMOOTH_FROM_STEPS / 2 else None
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.5)
        return 1
    window = max(5, len(steps) // SMOOTH_SHARE) | 1
    name = label.replace(" ", "_")
    axes.plot(steps, values, color=color, alpha=0.28, linewidth=0.9, gid=name,
              label=f"{label}, each step")
    axes.plot(steps, smooth(values, window), color=color, gid=f"mean_of_{name}",
              label=f"{label}, mean of {window} steps")
    return window


def loss_range(values, uniform, entropy):
    """y limits that a spike cannot blow up and that hold the unigram line."""
    known = style.finite(values)
    if not known:
        return 0.0, max(style.finite([uniform, entropy]) or [1.0]) * 1.1
    low, high = min(known), max(known)
    if math.isfinite(uniform):
        high = max(min(high, 1.5 * uniform), low * 1.1)
    if math.isfinite(entropy):
        low, high = min(low, entropy), max(high, entropy)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + 1.4 * margin


def draw_loss(axes, records, run):
    """The upper panel: training loss, validation loss, what a unigram model would reach."""
    steps, losses = column(records, "step"), column(records, "loss")
    config = run.get("config") or {}
    uniform = math.log(float(config["vocab_size"])) if "vocab_size" in config else math.nan
    entropy = float((run.get("data") or {}).get("unigram_entropy", math.nan))
    drawn = np.concatenate([losses, column(records, "val_loss")])
    axes.set_ylim(*loss_range(drawn, uniform, entropy))
    draw_series(axes, steps, losses, style.BLUE, "training loss")
    validated = [record for record in records if "val_loss" in record]
    if validated:
        axes.plot(column(validated, "step"), column(validated, "val_loss"), color=style.ORANGE,
                  linestyle="none", marker="o", markersize=6, markeredgecolor="white",
                  markeredgewidth=0.9, label="validation loss", zorder=4)
    if math.isfinite(entropy):
        style.reference(axes, entropy, f"byte frequencies alone (unigram entropy) {entropy:.3f}"
                        if config.get("vocab_size") == 256 else f"unigram entropy {entropy:.3f}")
    if math.isfinite(uniform) and len(steps) >= SMOOTH_FROM_STEPS:
        axes.annotate(f"uniform guess: ln {config['vocab_size']} = {uniform:.3f}", (0, uniform),
                      xytext=(0.055, uniform), textcoords=("axes fraction", "data"), va="center",
                      color=style.MUTED, fontsize=style.SMALL, annotation_clip=True,
                      arrowprops={"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.8})
    axes.legend(loc="upper right")
    axes.set_ylabel("loss, nats per token")
    mark_broken(axes, steps, losses)


def mark_broken(axes, steps, losses):
    """A red line where the loss first is not a finite number."""
    broken = np.flatnonzero(~np.isfinite(losses))
    if len(broken):
        first = steps[broken[0]]
        right_half = first > (steps[0] + steps[-1]) / 2
        axes.axvline(first, color=style.RED, linewidth=1.2)
        axes.annotate(f"not finite at step {first:.0f}, {len(broken)} such steps in all",
                      (first, 0.62), xycoords=("data", "axes fraction"), color=style.RED,
                      xytext=(-6 if right_half else 6, 0), textcoords="offset points",
                      ha="right" if right_half else "left")


def skipped_steps(records):
    """The steps whose update was left out, for want of a finite gradient."""
    steps, norms = column(records, "step"), column(records, "grad_norm")
    return steps[~np.isfinite(norms)]


def draw_norm(axes, records):
    """The lower panel: the gradient norm before clipping, on a logarithmic axis; where there was
    none, and so no update, a mark above the axis."""
    steps, norms = column(records, "step"), column(records, "grad_norm")
    norms = np.where(norms > 0, norms, math.nan)
    style.log_axis(axes)
    draw_series(axes, steps, norms, style.GREEN, "gradient norm")
    skipped = skipped_steps(records)
    if len(skipped):
        marks = axes.plot(skipped, np.full(len(skipped), 0.06), color=style.RED, linestyle="none",
                          marker="x", markersize=4.5, transform=axes.get_xaxis_transform(),
                          label=f"{len(skipped)} skipped updates" if len(skipped) > 1 else
                          "1 skipped update", zorder=4)
        marks[0].set_gid("skipped_" + "_".join(f"{step:.0f}" for step in skipped))
        axes.legend(handles=marks, loc="upper right")
    axes.set_ylabel("gradient norm")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    margin = 0.012 * (steps[-1] - steps[0]) or 1.0
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)


def _layout(machine):
    """2 threads / 2 ranks × 1 thread"""
    def counted(number, word):
        return f"{number} {word}" + ("" if number == 1 else "s")
    threads = counted(machine.get("threads", "?"), "thread")
    ranks = machine.get("ranks", 1)
    return threads if ranks == 1 else f"{counted(ranks, 'rank')} × {threads}"


def heading(records, run):
    """(title, subtitle): model size, dtype and data; steps, tokens and speed."""
    config, data = run.get("config") or {}, run.get("data") or {}
    size = f"{style.human(run['parameters'])} parameters" if "parameters" in run else "a model"
    parts = [size, str(config.get("dtype", "")), Path(str(data.get("path", ""))).name]
    title = "Training a Llama: " + " · ".join(part for part in parts if part)
    last = records[-1]
    facts = [f"{len(records)} steps" if len(records) > 1 else "1 step"]
    if "tokens" in last:
        facts.append(f"{style.human(float(last['tokens']))} tokens")
    speeds = style.finite(column(records, "tokens_per_s"))
    if speeds:
        facts.append(f"median {np.median(speeds):,.0f} tokens/s")
    machine = run.get("machine") or {}
    if machine.get("cpu"):
        cpu = re.sub(r"\((R|TM|tm)\)|\b(CPU|Processor)\b|\d+-Core|@.*", "", str(machine["cpu"]))
        facts.append(f"{_layout(machine)} of {' '.join(cpu.split())}")
    return title, " · ".join(facts)


def main(argv):
    """Draws the figure of one run; the exit code."""
    if len(argv) not in (2, 3):
        raise BookError("usage: python3 tools/plot/loss.py RUN_DIR | RECORD.json STEM", 2)
    if len(argv) == 3:
        record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
        style.save(draw(record["steps"], record), f"{argv[2]}.svg")
        return 0
    run_dir = Path(argv[1])
    records, warnings = read_metrics(run_dir)
    for warning in warnings:
        print(f"book: {warning}", file=sys.stderr)
    fig = draw(records, read_run(run_dir))
    try:
        style.save(fig, run_dir / "loss.png", run_dir / "loss.svg")
    except OSError as error:
        raise BookError(f"cannot write into {run_dir}: {error.strerror}")
    return 0


def draw(records, run):
    """The figure: the loss, and below it the gradient norm."""
    fig, (upper, lower) = style.figure(rows=2, heights=(3, 1), size=(style.WIDTH, 5.4))
    draw_loss(upper, records, run)
    draw_norm(lower, records)
    style.title(upper, *heading(records, run))
    fig.align_ylabels()
    return fig


if __name__ == "__main__":
    style.run(main)
