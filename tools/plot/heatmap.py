"""Draws the best layout of each model on each number of nodes as a cell, darker where MFU is higher.

usage: python3 tools/plot/heatmap.py CELLS.json OUT.png

CELLS.json is as tools/bench/plan_plot.py says.
"""
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.patches import Rectangle  # noqa: E402

from tools.base import BookError  # noqa: E402
from tools.look import layouts, palette  # noqa: E402
from tools.plot import style  # noqa: E402

# (cell, text on it), from the lowest MFU to the highest.
SHADES = [(palette.GREYS["lane"][0], style.INK), (palette.GREYS["pale blue"][0], style.INK),
          (palette.GREYS["light blue"][0], style.INK), (style.BLUE, palette.PAPER[0])]
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of MFU from one shade to the next
ROW, COLUMN = 0.62, 1.62                   # inches of a cell


def bounds(values):
    """Where the second, third and fourth shade begin, and the fourth ends: multiples of the first of STEPS
    with which the lightest shade, which has all below, is left to half of the values at most."""
    for step in STEPS:
        end = math.floor(max(values) / step + 1e-9) + 1
        limits = [step * (end - back) for back in (3, 2, 1, 0)]
        if 2 * sum(value < limits[0] - 1e-9 for value in values) <= len(values):
            break
    return limits


def shade_of(mfu, limits):
    """The number of a cell's shade."""
    return sum(mfu >= limit - 1e-9 for limit in limits[:-1])


def shades_used(values, limits):
    """{what it stands for: its color} of each shade that some cell has."""
    names = [f"below {100 * limits[0]:.0f} %"]
    names += [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in zip(limits, limits[1:])]
    return {names[shade]: SHADES[shade][0] for shade in sorted({shade_of(value, limits) for value in values})}


def lines_of(cell):
    """What a cell says."""
    if "missing" in cell:
        return ["nothing fits:", f"{cell['missing']:.1f} GiB missing"]
    best = cell["best"]
    if best is None:
        return ["none as required"]
    value = layouts.values_of(best["flags"])
    degrees = " ".join(f"{name} {size}" for name, size in layouts.degrees_of(best["flags"]).items() if size > 1)
    choices = f"Z{layouts.stage_of(best['flags'])} mb {value['micro_batch_size']}"
    return [f"{100 * best['mfu']:.1f} %, {best['gib']:.{0 if best['gib'] >= 9.95 else 1}f} GiB", degrees or "dp 1",
            choices + (" recomputes" if value.get("recompute", "none") != "none" else "")]


def draw_cell(axes, x, y, cell, limits):
    """The rectangle and its text. Two cells that touch have paper between them."""
    fill, ink = palette.PAPER[0], style.MUTED
    if cell.get("best"):
        fill, ink = SHADES[shade_of(cell["best"]["mfu"], limits)]
    name = f"cell_{cell['model']}_{cell['nodes']}"
    axes.add_patch(Rectangle((x + 0.015, y + 0.03), 0.97, 0.94, facecolor=fill, linewidth=0, gid=name))
    axes.text(x + 0.5, y + 0.5, style.plain("\n".join(lines_of(cell))), ha="center", va="center", color=ink,
              fontsize=style.SMALL, linespacing=1.12, gid=f"text_{name}")


def draw(record):
    """A column for each model, a row for each number of nodes, the fewest on top."""
    found = record["cells"]
    models = list(dict.fromkeys(cell["model"] for cell in found))
    nodes = sorted({cell["nodes"] for cell in found})
    values = [cell["best"]["mfu"] for cell in found if cell.get("best")]
    limits = bounds(values or [0.0])
    width = max(style.WIDTH, COLUMN * len(models) / 0.77)
    fig, (axes,) = style.figure(size=(width, max(1.6, ROW * len(nodes)) / 0.77))
    for cell in found:
        draw_cell(axes, models.index(cell["model"]), nodes.index(cell["nodes"]), cell, limits)
    axes.set_xlim(0, len(models))
    axes.set_ylim(len(nodes), 0)
    axes.set_xticks([x + 0.5 for x in range(len(models))], [style.plain(name) for name in models])
    axes.set_yticks([y + 0.5 for y in range(len(nodes))], [str(count) for count in nodes])
    axes.grid(False)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("nodes")
    if values:
        style.legend(axes, style.patches(shades_used(values, limits)), 26)
    style.title(axes, "The fastest layout of each model, by nodes",
                "; ".join([*record.get("about", []), "color and first number: MFU; GiB: memory of the fullest "
                           "GPU; Z: stage of ZeRO; mb: micro-batch, in samples"]))
    return fig


def main(argv, draw_record=draw):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError(f"usage: python3 {argv[0]} RECORD.json OUT.png", 2)
    fig = draw_record(json.loads(Path(argv[1]).read_text(encoding="utf-8")))
    try:
        style.save(fig, argv[2])
    except (OSError, ValueError) as error:
        raise BookError(f"cannot write {argv[2]}: {error}")
    return 0


if __name__ == "__main__":
    style.run(main)
