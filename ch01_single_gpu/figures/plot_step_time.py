"""Draws where a step's time goes, from a record of `./book bench`.

    arguments: BENCH_JSON STEM

A bar per configuration, by kind of operator, of one measurement: the recorded steps of its profile.
"""
import json
from pathlib import Path

from tools.bench import limits
from tools.plot import style

COLORS = {limits.MATMUL: style.BLUE, limits.ATTENTION: style.ORANGE, limits.MEMORY: style.GREEN}
OUTSIDE = "outside of operators"
LABELLED = 0.06  # of a step: shares from here on are written into the bar


def main(argv):
    record, stem = json.loads(Path(argv[1]).read_text(encoding="utf-8")), argv[2]
    fig, (axes,) = style.figure(size=(5.0, 3.4))
    profiles = record["profiles"]
    for row, profile in enumerate(profiles):
        draw_bar(axes, row, profile)
    axes.set_yticks(range(len(profiles)), [f"{p['config']} {p['dtype']}" for p in profiles])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("% of a step")
    style.legend(axes, axes.get_legend_handles_labels()[0], 42)
    host = record["machine"]
    style.title(axes, f"{record['chapter']}: where a step's time goes",
                f"{host['cpu']}, {host['threads']} threads, {' '.join(host['isa'])}")
    style.save(fig, f"{stem}.svg")
    return 0


def draw_bar(axes, row, profile):
    """The kinds of operators of one profile, and how long its step is."""
    parts = {kind: of["ms"] for kind, of in limits.by_kind(profile).items()}
    parts[OUTSIDE] = profile["outside_ms"]
    left = 0
    for kind, ms in parts.items():
        share = ms / profile["step_ms"]
        axes.barh(row, 100 * share, 0.62, left, color=COLORS.get(kind, style.MUTED),
                  label=kind if row == 0 else None)
        if share >= LABELLED:
            axes.annotate(f"{100 * share:.0f} %", (left + 50 * share, row), ha="center",
                          va="center", color="white", fontsize=style.SMALL)
        left += 100 * share
    axes.annotate(f"{profile['step_ms']:,.0f} ms", (100, row), xytext=(6, 0), va="center",
                  textcoords="offset points", annotation_clip=False)


if __name__ == "__main__":
    style.run(main)
