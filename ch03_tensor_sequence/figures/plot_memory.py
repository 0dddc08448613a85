"""Draws what ranks hold under tensor and sequence parallelism.    arguments: MEMORY.json FOLDER

FOLDER/memory_70b.svg: 70B, estimated, beside the book's figures;
FOLDER/batches.svg: the largest micro-batches of 3B.
"""
import json
from pathlib import Path

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tools.base import BookError
from tools.plot import style
from tools.plot.panels import heading, legend, limit, panels, thousands, total

from . import memory

PARTS = (*memory.STATES, "activations")
OURS, BOOK = 0.44, 0.3  # widths, of a layout's place
# Colour, marker, name.
LOOKS = {"tensor": (style.BLUE, "o", "tensor parallelism"),
         "again": (style.ORANGE, "D", "with sequence parallelism")}


def draw_large(record):
    """Every layout and sequence, ours beside the book's, and the device's limit."""
    fig, axes = panels([f"{thousands(seq_len)} tokens" for seq_len in memory.SEQ_LENS], sharey=True)
    layouts = [layout for layout in memory.LAYOUTS if layout[0] > 1]
    for number, (panel, seq_len) in enumerate(zip(axes, memory.SEQ_LENS)):
        for place, (tp, way) in enumerate(layouts):
            held = memory.find(record["cases"], tp, way, seq_len)["simulated"]
            base = 0.0
            for part in PARTS:
                size = held[part] / memory.GIB
                bar, = panel.bar(place - BOOK / 2, size, OURS, bottom=base, linewidth=0,
                                 color=style.CATEGORIES[part])
                bar.set_gid(f"{seq_len}_{tp}_{way}_{part}")
                base += size
            total(panel, place - BOOK / 2, base)
            theirs = [*memory.BOOK_STATES[tp], memory.BOOK_ACTIVATIONS[tp, way][number]]
            base = 0.0
            for size in theirs:
                panel.bar(place + OURS / 2, size, BOOK, bottom=base, facecolor="white",
                          edgecolor=style.INK, linewidth=0.7)
                base += size
            total(panel, place + OURS / 2, base)
        panel.set_xticks(range(len(layouts)),
                         [f"{tp}{chr(10) + 'SP' if way != 'tensor' else ''}" for tp, way in layouts])
        panel.tick_params(axis="x", length=0)
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.6, len(layouts) - 0.3)
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.margins(y=0.14)
        panel.tick_params(axis="x", labelbottom=panel is axes[-1])
    for panel in axes:
        limit(panel, memory.DEVICE / memory.GIB)
    axes[-1].annotate("80 GiB", (1, memory.DEVICE / memory.GIB), xytext=(3, 0), va="center",
                      textcoords="offset points", xycoords=("axes fraction", "data"),
                      fontsize=style.SMALL)
    axes[1].set_ylabel("GiB of a rank")
    axes[-1].set_xlabel("tensor-parallel ranks; SP: with sequence parallelism")
    heading(fig, "70B on ranks that share its layers", "bf16 with gradients in f32, one sequence, "
            "dry runs")
    legend(fig, [Patch(facecolor=style.CATEGORIES[part], label=part) for part in PARTS]
           + [Patch(facecolor="white", edgecolor=style.INK, linewidth=0.7,
                    label="the book, in the same order")], 54)
    return fig


def below(batch, others):
    """Whether a number has more room below its point than above it, on a logarithmic axis."""
    lower = max([other / batch for other in others if other < batch], default=0)
    upper = max([batch / other for other in others if other > batch], default=0)
    return lower < upper


def draw_batches(found):
    """Largest micro-batches over tp, ours and the book's."""
    fig, (axes,) = style.figure(size=(style.WIDTH, 4.2))
    batches = {way: [case["batch"] for case in found if case["way"] == way] for way in LOOKS}
    all_points = list(zip(*batches.values(), *memory.BOOK_BATCHES.values()))
    for way, (color, marker, label) in LOOKS.items():
        ours = batches[way]
        axes.plot(memory.BATCH_TP, ours, color=color, marker=marker, markersize=5, label=label)
        axes.plot(memory.BATCH_TP, memory.BOOK_BATCHES[way], color=color, marker="s", markersize=3.5,
                  linewidth=1.0, dashes=(4, 2), alpha=0.7, label="the book's, measured on H100s")
        for tp, batch, points in zip(memory.BATCH_TP, ours, all_points):
            axes.annotate(str(batch), (tp, batch), textcoords="offset points",
                          xytext=(2, -15) if below(batch, points) else (-2, 7),
                          ha="center", fontsize=style.SMALL, color=color,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    axes.set_xscale("log", base=2)
    axes.set_xticks(memory.BATCH_TP, [str(tp) for tp in memory.BATCH_TP])
    axes.set_xlim(1.8, 36)
    axes.minorticks_off()
    style.log_axis(axes)
    axes.set_xlabel("tensor-parallel ranks")
    axes.set_ylabel("sequences in a micro-batch")
    axes.legend(loc="upper left", bbox_to_anchor=(0.02, 1))  # the axis stays in sight
    style.title(axes, "The largest micro-batch that fits into 80 GiB",
                "3B, sequences of 4,096 tokens, bf16; dry runs")
    return fig


def main(argv):
    """Draws both figures; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: MEMORY.json FOLDER", 2)
    record, folder = json.loads(Path(argv[1]).read_text(encoding="utf-8")), Path(argv[2])
    for name, fig in (("memory_70b", draw_large(record["large"])),
                      ("batches", draw_batches(record["batches"]))):
        style.save(fig, folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    style.run(main)
