"""Draws where a step's time goes, from a record of `./book bench`.

    arguments: BENCH_JSON STEM

A bar per configuration, by kind of operator; marks where the step would end if there were only its
matrix products, and where PyTorch's best mode ends. A step of ours is 1.
"""
import json
import statistics
from pathlib import Path

from tools import limits
from tools.plot import style

COLORS = {limits.MATMUL: style.BLUE, limits.ATTENTION: style.ORANGE, limits.MEMORY: style.GREEN}
OUTSIDE = "outside of operators"


def main(argv):
    record, stem = json.loads(Path(argv[1]).read_text(encoding="utf-8")), argv[2]
    fig, (axes,) = style.figure(size=(8.4, 3.4))
    profiles = record["profiles"]
    for row, profile in enumerate(profiles):
        parts = {kind: of["ms"] for kind, of in limits.by_kind(profile).items()}
        parts[OUTSIDE] = profile["outside_ms"]
        left = 0
        for kind, ms in parts.items():
            width = ms / profile["step_ms"]
            axes.barh(row, width, 0.62, left, color=COLORS.get(kind, style.MUTED),
                      label=kind if row == 0 else None)
            left += width
    mark_others(axes, record, profiles)
    axes.set_yticks(range(len(profiles)), [f"{p['config']} {p['dtype']}" for p in profiles])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of a step, ours = 1")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncol=3, markerscale=0.5)
    host = record["machine"]
    style.title(axes, f"{record['chapter']}: where a step's time goes",
                f"{host['cpu']}, {host['threads']} threads, {' '.join(host['isa'])}")
    style.save(fig, f"{stem}.svg")
    return 0


def mark_others(axes, record, profiles):
    """The bound, and the peer's best mode, of every row."""
    bound = {(r["config"], r["dtype"]): statistics.median(b["bound_ms"] for b in r["rounds"])
             / r["summary"]["step_ms"]["median"] for r in record["results"]}
    peer = {(e["config"], e["dtype"]): e["ratio"] for e in record["peers"]}
    rows = [(row, (p["config"], p["dtype"])) for row, p in enumerate(profiles)]
    axes.plot([bound[case] for _, case in rows], [row for row, _ in rows], "|", markersize=26,
              markeredgewidth=2.2, color=style.INK, label="matrix products alone")
    marked = [(row, peer[case]) for row, case in rows if case in peer]
    if marked:
        axes.plot([ratio for _, ratio in marked], [row for row, _ in marked], "D",
                  color=style.RED, label="PyTorch, best mode")


if __name__ == "__main__":
    style.run(main)
