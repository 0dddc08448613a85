"""How the project's figures look: a serif face that comes with matplotlib, few inks, thin axes."""
import math
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of the backend)
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

from tools.base import BookError  # noqa: E402

INK = "#22262b"       # text and axes
MUTED = "#7b828c"     # what stands behind the data: references, secondary text
GRID = "#e6e8eb"
BLUE = "#2a5f9e"      # first series
ORANGE = "#d1622b"    # second series, and measured points on the first
GREEN = "#3c8a5c"     # third series
RED = "#b3272d"       # only for what went wrong

# What memory is spent on, from the bottom of a stack to its top.
CATEGORIES = {"weights": BLUE, "gradients": GREEN, "optimizer": ORANGE, "activations": "#e3b341",
              "workspace": "#8d7fb5", "communication": "#7b828c"}

_SETTINGS = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 12,
    "axes.titlesize": 14,
    "axes.labelsize": 12,
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
    "legend.fontsize": 11,
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


def figure(rows=1, heights=(1,), size=(8.4, 5.0)):
    """A figure with panels below each other that share the x axis: (figure, [axes])."""
    apply()
    fig, axes = plt.subplots(rows, 1, sharex=True, figsize=size, squeeze=False,
                             gridspec_kw={"height_ratios": heights, "hspace": 0.12})
    return fig, list(axes[:, 0])


def title(axes, text, subtitle=""):
    """A left-aligned title with a quieter second line."""
    axes.set_title(plain(text), loc="left", pad=26 if subtitle else 10)
    if subtitle:
        axes.annotate(plain(subtitle), (0, 1), xytext=(0, 9), xycoords="axes fraction",
                      textcoords="offset points", color=MUTED, fontsize=11.5)


def reference(axes, y, label):
    """A dashed horizontal line with its label at the right end, inside the axes."""
    axes.axhline(y, color=MUTED, linewidth=1.0, dashes=(5, 3))
    axes.annotate(label, (1, y), xytext=(-2, 4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", va="bottom", color=MUTED, fontsize=11)


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


def plain(text):
    """Text in which matplotlib sees no formula, whatever a file is called."""
    return text.replace("$", r"\$")


def save(fig, *paths):
    """Writes the figure, as PNG or SVG by the ending of each path, and without a date in it."""
    for path in paths:
        metadata = {"Date": None} if str(path).endswith(".svg") else {"Software": None}
        fig.savefig(path, bbox_inches="tight", pad_inches=0.12, metadata=metadata)
    plt.close(fig)


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
