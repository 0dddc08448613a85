"""Draws RUN_DIR/experts.png and experts.svg: how many tokens each expert got, over steps, by layer.

usage: python3 tools/plot/experts.py RUN_DIR

A cell is an expert's load over the mean: 1 where all are alike. Lines part the experts of different
ranks. A run with many steps or layers is
drawn in means over steps, and in some of its layers.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from tools.base import BookError, show_path  # noqa: E402
from tools.look.runs import read_metrics, read_run  # noqa: E402
from tools.plot import style  # noqa: E402

MOST_COLUMNS, MOST_LAYERS = 120, 6
MOST_LOAD = 3.0   # over the mean: from there on all are of one colour
PANEL = 1.15      # inches of a layer
MOST_RANKS = 6    # that are named beside a layer
COLORS = LinearSegmentedColormap.from_list("load", [
    (0.0, "#ffffff"), (1 / MOST_LOAD, style.tint(style.BLUE, 0.35)), (2 / MOST_LOAD, style.ORANGE),
    (1.0, style.shade(style.ORANGE, 0.55))])


def loads(records):
    """{layer: [steps, E] load of each expert over the mean}, and the share of the choices that were
    dropped."""
    found, dropped, choices = {}, 0.0, 0.0
    for record in records:
        for entry in record.get("experts", []):
            tokens = np.array([float(count) for count in entry["tokens"]])
            found.setdefault(int(entry["layer"]), []).append(
                tokens * len(tokens) / tokens.sum() if tokens.sum() else tokens)
            dropped, choices = dropped + float(entry["dropped"]), choices + tokens.sum()
    return {layer: np.array(rows) for layer, rows in found.items()}, dropped / (choices or 1.0)


def means(rows, columns):
    """The same in so many stretches of steps."""
    return np.array([part.mean(axis=0) for part in np.array_split(rows, min(columns, len(rows)))])


def some_of(layers, most):
    """The first, the last, and those in between, evenly."""
    chosen = np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int)
    return [layers[i] for i in chosen]


def summary(found):
    """max 2.9, at the end 1.2: the fullest expert of the whole run, and of its last tenth."""
    fullest = np.mean([rows.max(axis=1) for rows in found.values()], axis=0)
    return fullest.max(), fullest[-max(1, len(fullest) // 10):].mean()


def part_ranks(axes, experts, ep_size):
    """A line between the experts of one rank of ep and the next one's, and the ranks' names."""
    each = experts / ep_size
    for rank in range(ep_size):
        if rank > 0:
            axes.axhline(rank * each - 0.5, color=style.INK, linewidth=0.8)
        if ep_size <= MOST_RANKS or rank in (0, ep_size - 1):
            axes.annotate(f"ep {rank}", (1, (rank + 0.5) * each - 0.5), xytext=(4, 0), va="center",
                          xycoords=("axes fraction", "data"), textcoords="offset points",
                          color=style.MUTED, fontsize=style.SMALL)


def draw(records, ep_size=1):
    """The figure: a panel for each layer. ep_size: ranks that share its experts."""
    found, dropped = loads(records)
    if not found:
        raise BookError("no step of this run says where tokens went: its model has no experts", 2)
    steps = [float(record["step"]) for record in records if record.get("experts")]
    layers = some_of(sorted(found), MOST_LAYERS)
    fig, panels = style.figure(rows=len(layers), heights=[1] * len(layers),
                               size=(style.WIDTH, 0.9 + PANEL * len(layers)))
    for axes, layer in zip(panels, layers):
        cells = means(found[layer], MOST_COLUMNS).T
        image = axes.imshow(cells, aspect="auto", origin="lower", interpolation="nearest",
                            cmap=COLORS, vmin=0, vmax=MOST_LOAD,
                            extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(cells) - 0.5))
        axes.grid(False)
        axes.set_ylabel(f"layer {layer}\nexpert")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        if ep_size > 1:
            part_ranks(axes, len(cells), ep_size)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    bar = fig.colorbar(image, ax=panels, fraction=0.04, extend="max",
                       pad=0.03 if ep_size == 1 else 0.11)
    bar.set_label("load over the mean")
    most, last = summary(found)
    about = (f"{len(cells)} experts; the fullest one's load, mean of layers: at most {most:.2f}, in the "
             f"last tenth {last:.2f}" + (f"; {100 * dropped:.1f} % dropped" if dropped else ""))
    style.title(panels[0], "Tokens of each expert", about)
    return fig


def main(argv):
    """Draws the figure of a run; the exit code."""
    if len(argv) != 2:
        raise BookError("usage: python3 tools/plot/experts.py RUN_DIR", 2)
    run_dir = Path(argv[1])
    records, warnings = read_metrics(run_dir)
    for warning in warnings:
        print(f"book: {warning}", file=sys.stderr)
    fig = draw(records, int((read_run(run_dir).get("config") or {}).get("ep_size", 1)))
    try:
        style.save(fig, run_dir / "experts.png", run_dir / "experts.svg")
    except OSError as error:
        raise BookError(f"cannot write into {show_path(run_dir)}: {error.strerror}")
    return 0


if __name__ == "__main__":
    style.run(main)
