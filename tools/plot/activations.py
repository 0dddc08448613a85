"""Draws what a training step needs, ours beside the book's formulas, from estimates.

usage: python3 tools/plot/activations.py ESTIMATES.json FOLDER

FOLDER/model_memory.{png,svg}: weights, gradients, optimizer and activations, by model and sequence;
FOLDER/recomputation.{png,svg}: the activations alone, for every mode of recomputation.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: E402

from tools import estimates  # noqa: E402
from tools.base import BookError  # noqa: E402
from tools.plot import style  # noqa: E402

GIB, TIB = 2**30, 2**40
DEVICE = 80 * 10**9  # bytes of the book's GPU
MODE_COLORS = {"none": style.ORANGE, "selective": style.BLUE, "full": style.GREEN}
OURS, BOOK = 0.44, 0.30  # widths of the bars of one sequence


def panels(models, **kwargs):
    """A figure with one panel for each model, side by side."""
    style.apply()
    fig, axes = plt.subplots(1, len(models), figsize=(8.6, 3.9), squeeze=False, **kwargs)
    fig.subplots_adjust(wspace=0.24 if len(models) < 4 else 0.08)
    for panel, model in zip(axes[0], models):
        panel.annotate(model, (0.5, 1), xytext=(0, 5), xycoords="axes fraction", ha="center",
                       textcoords="offset points", fontsize=12.5)
    return fig, list(axes[0])


def heading(fig, text, subtitle):
    """The title and its quieter second line, over all panels."""
    axes = fig.axes[0]
    for line, above, look in ((text, 50, {"fontsize": 14}),
                              (subtitle, 31, {"fontsize": 11.5, "color": style.MUTED})):
        axes.annotate(style.plain(line), (0, 1), xytext=(0, above), xycoords="axes fraction",
                      textcoords="offset points", **look)


def legend(fig, handles, y):
    """A row of names below the panels."""
    fig.legend(handles, [handle.get_label() for handle in handles], ncol=len(handles),
               loc="upper left", bbox_to_anchor=(0, y), bbox_transform=fig.axes[0].transAxes,
               handlelength=1.3, handleheight=0.8, handletextpad=0.5, columnspacing=1.2,
               borderpad=0, fontsize=10.5, frameon=False)


def thousands(seq_len):
    """4k for 4096."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)


def draw_stack(axes, x, case, name):
    """The stacked bar of one case, and the book's beside it."""
    base = 0.0
    for part in estimates.PARTS:
        size = case["simulated"][part] / TIB
        bar, = axes.bar(x - OURS / 2, size, OURS, bottom=base, color=style.CATEGORIES[part],
                        linewidth=0)
        bar.set_gid(f"{name}_{part}")
        base += size
    book = case["book"]
    states = book["weights_gradients_optimizer"] / TIB
    for part, bottom, size in (("states", 0, states),
                               ("activations", states, book["activations"] / TIB)):
        bar, = axes.bar(x + BOOK / 2 + 0.03, size, BOOK, bottom=bottom, facecolor="white",
                        edgecolor=style.INK, linewidth=0.7)
        bar.set_gid(f"{name}_book_{part}")


def draw_models(cases):
    """All that a step needs, by model and sequence."""
    models, seq_lens = estimates.BY_MODEL["models"], estimates.BY_MODEL["seq_lens"]
    fig, axes = panels(models)
    for panel, model in zip(axes, models):
        for x, seq_len in enumerate(seq_lens):
            case = estimates.find(cases, estimates.shape_of(model, seq_len))
            draw_stack(panel, x, case, f"{model}_{seq_len}")
        panel.set_xticks(range(len(seq_lens)), [thousands(s) for s in seq_lens])
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.65, len(seq_lens) - 0.45)
        panel.yaxis.set_major_locator(MaxNLocator(6))
    axes[0].set_ylabel("TiB")
    axes[len(axes) // 2].set_xlabel("sequence length")
    heading(fig, "What a training step needs", "micro-batch of one sequence, bf16, no "
            "recomputation, attention scores stored")
    names = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer",
             "activations": "activations, simulated"}
    legend(fig, [Patch(facecolor=style.CATEGORIES[part], label=label)
                 for part, label in names.items()]
           + [Patch(facecolor="white", edgecolor=style.INK, linewidth=0.7,
                    label="the book's formulas")], -0.19)
    return fig


def draw_modes(cases):
    """The activations, by model, sequence and mode of recomputation."""
    models, seq_lens = estimates.BY_MODE["models"], estimates.BY_MODE["seq_lens"]
    fig, axes = panels(models, sharey=True)
    for panel, model in zip(axes, models):
        for mode, color in MODE_COLORS.items():
            found = [estimates.find(cases, estimates.shape_of(model, seq_len, mode))
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
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panel.axhline(DEVICE / GIB, color=style.INK, linewidth=0.9, dashes=(5, 3))
    axes[0].annotate("80 GB", (0, DEVICE / GIB), xytext=(3, 3), textcoords="offset points",
                     xycoords=("axes fraction", "data"), fontsize=10.5)
    axes[0].set_ylabel("activations, GiB")
    fig.text(0.5, -0.02, "sequence length", ha="center", fontsize=12)
    heading(fig, "What recomputation leaves of the activations",
            "micro-batch of one sequence, bf16, attention scores stored where there is no "
            "recomputation")
    legend(fig, [Line2D([], [], color=color, marker="o", markersize=4.5, label=mode)
                 for mode, color in MODE_COLORS.items()]
           + [Line2D([], [], color=style.MUTED, linestyle="none", marker="o", markersize=9,
                     markerfacecolor="none", markeredgewidth=1.1, label="the book's formulas")],
           -0.21)
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
        raise BookError("usage: python3 tools/plot/activations.py ESTIMATES.json FOLDER", 2)
    cases, folder = read_cases(argv[1]), Path(argv[2])
    try:
        for name, draw in (("model_memory", draw_models), ("recomputation", draw_modes)):
            style.save(draw(cases), folder / f"{name}.png", folder / f"{name}.svg")
    except OSError as error:
        raise BookError(f"cannot write into {folder}: {error.strerror}")
    return 0


if __name__ == "__main__":
    style.run(main)
