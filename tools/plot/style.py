"""How the project's figures look: a serif face that comes with matplotlib, few inks, thin axes.

A page shows a figure 358 pixels wide on a phone of 390. So none is much wider than MOST_POINTS, and
no text is smaller than SMALL: 9 pixels there.
"""
import math
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of the backend)
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402
from matplotlib.transforms import offset_copy  # noqa: E402

from tools.base import BookError, beside  # noqa: E402
from tools.look import palette  # noqa: E402

INK = palette.INKS["ink"][0]          # text and axes
MUTED = palette.INKS["muted"][0]      # what stands behind the data: references, secondary text
GRID = palette.GREYS["grid"][0]
BLUE = palette.INKS["blue"][0]        # first series
ORANGE = palette.INKS["orange"][0]    # second series, and measured points on the first
GREEN = palette.INKS["green"][0]      # third series
RED = palette.INKS["red"][0]          # only for what went wrong

MOST_POINTS = 408     # of a figure's width, about
SMALL = 10.5          # points, the smallest text
WIDTH = 5.9           # inches of a figure; its axes take three quarters
TITLE_WRAP, WRAP = 58, 74  # characters of a line: the title, and the quieter lines below it
SEEN = 2.5            # contrast of an area with the paper: the least
ROW = 15              # points from one row of a legend to the next

# What memory is spent on, from the bottom of a stack to its top.
CATEGORIES = {"weights": BLUE, "gradients": GREEN, "optimizer": ORANGE, "activations": "#e3b341",
              "workspace": "#8d7fb5", "communication": "#7b828c"}

_SETTINGS = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 11.5,
    "axes.titlesize": 13.5,
    "axes.labelsize": 11.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.direction": "out",
    "ytick.direction": "out",
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "text.color": INK,
    "legend.frameon": True,
    "legend.facecolor": "white",
    "legend.edgecolor": "white",
    "legend.framealpha": 1.0,
    "legend.borderaxespad": 0.0,
    "legend.fontsize": SMALL,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "axes.xmargin": 0.012,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "svg.hashsalt": "ultrascale.cpp",  # the same data gives the same file
}


def apply():
    """Makes every figure of this process follow the style."""
    plt.rcParams.update(_SETTINGS)


def figure(rows=1, heights=(1,), size=(WIDTH, 4.6)):
    """A figure with panels below each other that share the x axis: (figure, [axes])."""
    apply()
    fig, axes = plt.subplots(rows, 1, sharex=True, figsize=size, squeeze=False,
                             gridspec_kw={"height_ratios": heights, "hspace": 0.12})
    return fig, list(axes[:, 0])


def title(axes, text, subtitle=""):
    """A left-aligned title with a quieter text below it."""
    heading(axes, text, subtitle, 9)


def heading(axes, text, subtitle, above):
    """The same so many points above the axes; long texts take several lines."""
    about = textwrap.wrap(plain(subtitle), WRAP)
    over = textwrap.wrap(plain(text), TITLE_WRAP)
    for lines, size, color in ((about, SMALL, MUTED), (over, 13.5, INK)):
        axes.annotate("\n".join(lines), (0, 1), xytext=(0, above), xycoords="axes fraction",
                      textcoords="offset points", color=color, fontsize=size)
        above += 1.25 * size * len(lines) + (4 if lines else 0)


def patches(colors):
    """Handles of a legend, of {name: colour}."""
    return [Patch(facecolor=color, label=name) for name, color in colors.items()]


def legend(axes, handles, below):
    """What handles stand for, in rows so many points below the axes; how far the next row is."""
    rows, room = [], 0
    for handle in handles:
        width = 24 + 4.9 * len(handle.get_label())  # about, in points
        room -= width
        if room < 0:
            rows.append([])
            room = MOST_POINTS - 60 - width
        rows[-1].append(handle)
    for row in rows:
        axes.figure.legend(row, [handle.get_label() for handle in row], ncol=len(row),
                           loc="upper left", bbox_to_anchor=(0, 0), handlelength=1.1,
                           bbox_transform=offset_copy(axes.transAxes, axes.figure, y=-below,
                                                      units="points"),
                           handleheight=0.8, handletextpad=0.5, columnspacing=1.2, borderpad=0,
                           frameon=False)
        below += ROW
    return below


def reference(axes, y, label):
    """A dashed horizontal line with its label at the right end, inside the axes."""
    axes.axhline(y, color=MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate(label, (1, y), xytext=(-2, 4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", va="bottom", color=MUTED, fontsize=SMALL)


def log_axis(axes):
    """A logarithmic y axis with ticks at 1, 2, 5 of each decade, written as plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def tint(color, share=0.5):
    """A lighter one: so much of the way to white."""
    return matplotlib.colors.to_hex([1 - (1 - part) * (1 - share)
                                     for part in matplotlib.colors.to_rgb(color)])


def shade(color, share=0.4):
    """A darker one: so much of the way to black."""
    return matplotlib.colors.to_hex([part * (1 - share)
                                     for part in matplotlib.colors.to_rgb(color)])


def other_shade(color):
    """A darker one; a lighter one of a colour whose darker one is lost on the dark paper."""
    darker = shade(color)
    return darker if palette.contrast(darker, palette.PAPER[1]) >= SEEN else tint(color)


def plain(text):
    """Text in which matplotlib sees no formula, whatever a file is called."""
    return text.replace("$", r"\$")


def save(fig, *paths):
    """Writes the figure, as PNG or SVG by the ending of each path, and without a date in it."""
    for path in map(Path, paths):
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with beside(path) as new:
            fig.savefig(new, bbox_inches="tight", pad_inches=0.12, metadata=metadata)
            if path.suffix == ".svg":
                new.write_text(for_the_dark(new.read_text(encoding="utf-8")), encoding="utf-8")
    plt.close(fig)


def for_the_dark(svg):
    """The file, in which paper, inks and greys are others where the reader's system asks for dark."""
    rules = [f'[style*="{what}: {light}"] {{ {what}: {dark} !important; }}'
             for light, dark in [palette.PAPER, *palette.INKS.values(), *palette.GREYS.values()]
             for what in ("fill", "stroke") if f"{what}: {light}" in svg]
    before, style, after = svg.partition("</style>")
    return "\n".join([before, "@media (prefers-color-scheme: dark) {", *rules, f"}}{style}{after}"])


def run(main):
    """Ends a script with main(argv)'s exit code, or with a BookError's text and code."""
    try:
        sys.exit(main(sys.argv))
    except BookError as problem:
        print(problem, file=sys.stderr)
        sys.exit(problem.code)


def human(count):
    """3.4M for 3412345."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def finite(values):
    """The values that are finite numbers."""
    return [value for value in values if math.isfinite(value)]
