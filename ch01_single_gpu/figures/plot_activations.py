"""Draws what a training step needs, ours beside the book's formulas, from estimates.

arguments: ESTIMATES.json FOLDER

FOLDER/model_memory.svg: weights, gradients, optimizer and activations, by model and sequence;
FOLDER/recomputation.svg: the activations alone, for every mode of recomputation.
"""
import json
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tools.base import BookError
from tools.plot import style
from tools.plot.panels import DEVICE, heading, legend, panels, thousands
from tools.run import estimates

from . import cases as estimated

GIB = 2**30
MODE_COLORS = {"none": style.ORANGE, "selective": style.BLUE, "full": style.GREEN}
OURS, BOOK = 0.46, 0.36  # widths of the bars of one sequence


def draw_stack(axes, x, case, name):
    """The stacked bar of one case, and the book's beside it."""
    base = 0.0
    for part in estimates.PARTS:
        size = case["simulated"][part] / GIB
        bar, = axes.bar(x - OURS / 2 - 0.02, size, OURS, bottom=base, color=style.CATEGORIES[part],
                        linewidth=0)
        bar.set_gid(f"{name}_{part}")
        base += size
    draw_total(axes, x - OURS / 2 - 0.03, base)
    book = case["book"]
    states, activations = (book[part] / GIB for part in ("weights_gradients_optimizer",
                                                         "activations"))
    for part, bottom, size in (("states", 0, states), ("activations", states, activations)):
        bar, = axes.bar(x + BOOK / 2 + 0.03, size, BOOK, bottom=bottom, facecolor="white",
                        edgecolor=style.INK, linewidth=0.7)
        bar.set_gid(f"{name}_book_{part}")
    draw_total(axes, x + BOOK / 2 + 0.03, states + activations)


def draw_total(axes, x, total):
    """What a bar comes to, upright above it: short bars, too, can be read."""
    axes.annotate(f"{total:,.0f}", (x, total), xytext=(0, 3), textcoords="offset points",
                  ha="center", va="bottom", fontsize=style.SMALL)


def draw_models(cases):
    """All that a step needs, by model and sequence."""
    models, seq_lens = estimated.BY_MODEL["models"], estimated.BY_MODEL["seq_lens"]
    fig, axes = panels(models)
    for panel, model in zip(axes, models):
        for x, seq_len in enumerate(seq_lens):
            case = estimates.find(cases, estimated.shape_of(model, seq_len))
            draw_stack(panel, x, case, f"{model}_{seq_len}")
        panel.set_xticks(range(len(seq_lens)), [thousands(s) for s in seq_lens])
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.65, len(seq_lens) - 0.45)
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panel.set_ylim(0, 1.12 * panel.get_ylim()[1])
        panel.set_ylabel("GiB")
    axes[-1].set_xlabel("sequence length")
    heading(fig, "What a training step needs", "micro-batch of one sequence, bf16, no "
            "recomputation, attention scores stored")
    names = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer",
             "activations": "activations"}
    legend(fig, [Patch(facecolor=style.CATEGORIES[part], label=label)
                 for part, label in names.items()]
           + [Patch(facecolor="white", edgecolor=style.INK, linewidth=0.7,
                    label="the book's formulas, activations above")], 42)
    return fig


def draw_modes(cases):
    """The activations, by model, sequence and mode of recomputation."""
    models, seq_lens = estimated.BY_MODE["models"], estimated.BY_MODE["seq_lens"]
    fig, axes = panels(models, columns=2, sharey=True, sharex=True)
    for panel, model in zip(axes, models):
        for mode, color in MODE_COLORS.items():
            found = [estimates.find(cases, estimated.shape_of(model, seq_len, mode))
                     for seq_len in seq_lens]
            ours = [case["simulated"]["activations"] / GIB for case in found]
            book = [case["book"]["activations"] / GIB for case in found]
            line, = panel.plot(seq_lens, ours, color=color, marker="o", markersize=4.5)
            line.set_gid(f"{model}_{mode}")
            panel.plot(seq_lens, book, color=color, linestyle="none", marker="o", markersize=9,
                       markerfacecolor="none", markeredgewidth=1.1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlim(seq_lens[0] / 1.3, 1.3 * seq_lens[-1])
        panel.set_xticks(seq_lens, [thousands(s) for s in seq_lens])
        panel.minorticks_off()
        panel.margins(y=0.08)  # the book's circles are whole
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panel.axhline(DEVICE / GIB, color=style.INK, linewidth=0.9, dashes=(5, 3))
    axes[0].annotate("80 GiB", (0, DEVICE / GIB), xytext=(3, 3), textcoords="offset points",
                     xycoords=("axes fraction", "data"), fontsize=style.SMALL)
    fig.supylabel("activations, GiB", x=-0.01, fontsize=11.5)
    for panel in axes[-2:]:
        panel.set_xlabel("sequence length")
    heading(fig, "What recomputation leaves of the activations",
            "micro-batch of one sequence, bf16, attention scores stored where there is no "
            "recomputation")
    legend(fig, [Line2D([], [], color=color, marker="o", markersize=4.5, label=mode)
                 for mode, color in MODE_COLORS.items()]
           + [Line2D([], [], color=style.MUTED, linestyle="none", marker="o", markersize=9,
                     markerfacecolor="none", markeredgewidth=1.1, label="the book's formulas")],
           42)
    return fig


def read_cases(path):
    """The cases of an estimates file; BookError (2) if there are none."""
    try:
        return [dict(case) for case in json.loads(Path(path).read_text(encoding="utf-8"))["cases"]]
    except OSError as error:
        raise BookError(f"cannot read {path}: {error.strerror}", 2)
    except (ValueError, KeyError, TypeError) as error:
        raise BookError(f"{path} holds no estimates: {type(error).__name__}: {error}", 2)


def main(argv):
    """Draws both figures; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: ESTIMATES.json FOLDER", 2)
    cases, folder = read_cases(argv[1]), Path(argv[2])
    try:
        for name, draw in (("model_memory", draw_models), ("recomputation", draw_modes)):
            style.save(draw(cases), folder / f"{name}.svg")
    except OSError as error:
        raise BookError(f"cannot write into {folder}: {error.strerror}")
    return 0


if __name__ == "__main__":
    style.run(main)
