"""Draws how data parallelism scales: speed and memory of a rank.    arguments: DATA.json STEM"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style

from . import claims

BOOK_RANKS = 8  # of the first point
MEMORY = (("states", "weights, gradients, optimizer", style.BLUE),
          ("activations", "activations", style.CATEGORIES["activations"]),
          ("scratch", "scratch of the all-reduce", style.CATEGORIES["communication"]))


def draw_drops(axes, points):
    """What each doubling costs, below its point."""
    for before, point in zip(points, points[1:]):
        rate, drop = point["tokens_per_s_per_rank"], point["tokens_per_s_per_rank"] / before[
            "tokens_per_s_per_rank"] - 1
        axes.annotate(f"{100 * drop:+.1f} %", (point["ranks"], rate), xytext=(-5, -13),
                      textcoords="offset points", ha="right", color=style.MUTED,
                      fontsize=style.SMALL,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})


def draw_book(axes, points):
    """The book's curve, in units of ours on as many ranks as its first point has."""
    here = next(p["tokens_per_s_per_rank"] for p in points if p["ranks"] == BOOK_RANKS)
    rates = [here * rate / claims.BOOK_SCALING[0] for rate in claims.BOOK_SCALING]
    axes.plot([BOOK_RANKS * 2**i for i in range(len(rates))], rates, color=style.MUTED, marker="s",
              markersize=4, linewidth=1.2, dashes=(4, 2),
              label="the book's 1B on H100s, scaled at 8")


def draw_memory(axes, found):
    """Stacked bytes of a rank."""
    places, base = range(len(found)), [0.0] * len(found)
    ranks = [entry["ranks"] for entry in found]
    for name, label, color in MEMORY:
        sizes = [entry[name] / 2**20 for entry in found]
        axes.bar(ranks, sizes, [0.35 * n for n in ranks], bottom=base, color=color, label=label,
                 linewidth=0)
        base = [base[i] + sizes[i] for i in places]
    axes.set_ylabel("MiB of a rank")
    axes.set_ylim(0, 1.1 * max(base))
    style.legend(axes, axes.get_legend_handles_labels()[0], 42)


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: DATA.json STEM", 2)
    data = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["scaling"]
    fig, (axes, below) = style.figure(rows=2, heights=(3, 1.2), size=(style.WIDTH, 6.6))
    replayed, measured = data["replayed"], data["measured"]
    axes.plot([p["ranks"] for p in replayed], [p["tokens_per_s_per_rank"] for p in replayed],
              color=style.BLUE, marker="o", markersize=5, label="replayed: every rank owns a core")
    axes.plot([p["ranks"] for p in measured], [p["tokens_per_s_per_rank"] for p in measured],
              color=style.ORANGE, linestyle="none", marker="D", markersize=7,
              label="measured on this machine")
    draw_drops(axes, replayed)
    draw_book(axes, replayed)
    draw_memory(below, data["memory"])
    axes.axvline(data["node_size"] * 2**0.5, color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate(f"one node of {data['node_size']}", (data["node_size"] * 2**0.5, 0.03),
                  xycoords=("data", "axes fraction"), xytext=(-6, 0), textcoords="offset points",
                  ha="right", color=style.MUTED, fontsize=style.SMALL)
    axes.set_xscale("log", base=2)
    ranks = [2**i for i in range(9)]
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    highest = max(p["tokens_per_s_per_rank"] for p in replayed + measured)
    axes.set_ylim(0, 1.18 * highest)
    axes.set_xlim(0.75, 330)
    below.set_xlabel("data-parallel ranks")
    axes.set_ylabel("tokens/s of each rank")
    axes.legend(loc="upper right")
    links = [" ".join(link.replace("=", " ").split(",")) for link in data["links"]]
    links = [f"{kind} {latency} us {rate} GB/s" for kind, latency, rate in map(str.split, links)]
    style.title(axes, "Data parallelism: the same micro-batch on more ranks",
                f"{data['tokens_per_rank']} tokens a rank and step; {', '.join(links)}")
    style.save(fig, argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
