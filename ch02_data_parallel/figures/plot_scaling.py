"""Draws how data parallelism scales.    arguments: DATA.json STEM"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style


def draw_drops(axes, points):
    """What each doubling costs, above its point."""
    for before, point in zip(points, points[1:]):
        rate, drop = point["tokens_per_s_per_rank"], point["tokens_per_s_per_rank"] / before[
            "tokens_per_s_per_rank"] - 1
        axes.annotate(f"{100 * drop:+.1f} %", (point["ranks"], rate), xytext=(4, 9),
                      textcoords="offset points", ha="center", color=style.MUTED, fontsize=11)


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: DATA.json STEM", 2)
    data = json.loads(Path(argv[1]).read_text(encoding="utf-8"))["scaling"]
    fig, (axes,) = style.figure(size=(8.4, 4.6))
    replayed, measured = data["replayed"], data["measured"]
    axes.plot([p["ranks"] for p in replayed], [p["tokens_per_s_per_rank"] for p in replayed],
              color=style.BLUE, marker="o", markersize=5, label="replayed: every rank owns a core")
    axes.plot([p["ranks"] for p in measured], [p["tokens_per_s_per_rank"] for p in measured],
              color=style.ORANGE, linestyle="none", marker="D", markersize=7,
              label="measured on this machine")
    draw_drops(axes, replayed)
    axes.axvline(data["node_size"] * 2**0.5, color=style.MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate(f"one node of {data['node_size']}", (data["node_size"] * 2**0.5, 0.04),
                  xycoords=("data", "axes fraction"), xytext=(-6, 0), textcoords="offset points",
                  ha="right", color=style.MUTED, fontsize=11)
    axes.set_xscale("log", base=2)
    ranks = sorted({p["ranks"] for p in replayed + measured})
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    highest = max(p["tokens_per_s_per_rank"] for p in replayed + measured)
    axes.set_ylim(0, 1.18 * highest)
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylabel("tokens/s of each rank")
    axes.legend(loc="lower left", bbox_to_anchor=(0.02, 0.06))
    links = [" ".join(link.replace("=", " ").split(",")) for link in data["links"]]
    links = [f"{kind} {latency} us {rate} GB/s" for kind, latency, rate in map(str.split, links)]
    style.title(axes, "Data parallelism: the same micro-batch on more ranks",
                f"{data['tokens_per_rank']} tokens a rank and step; {', '.join(links)}")
    style.save(fig, argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
