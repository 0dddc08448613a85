"""Figures of several panels, with one title over and one legend below them."""
import matplotlib.pyplot as plt

from tools.plot import style

ABOVE = 2               # points from a bar, or a line, to the number above it
DEVICE = 80 * 2**30  # bytes of a GPU that is sold, and called by the book, as one of 80 GB


def panels(models, columns=1, height=1.6, **kwargs):
    """A figure with one panel for each model, in rows of so many, each so many inches high."""
    style.apply()
    rows = -(-len(models) // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(style.WIDTH, height * rows / 0.77),
                             squeeze=False, **kwargs)
    fig.subplots_adjust(wspace=0.08, hspace=0.44)
    for panel, model in zip(axes.flat, models):
        panel.annotate(model, (0.5, 1), xytext=(0, 4), xycoords="axes fraction", ha="center",
                       textcoords="offset points", fontsize=12)
    for spare in axes.flat[len(models):]:
        spare.set_axis_off()
        axes[-2, -1].tick_params(axis="x", labelbottom=True)  # nothing is below it
    return fig, list(axes.flat[:len(models)])


def heading(fig, text, subtitle):
    """The title and its quieter lines, over all panels."""
    style.heading(fig.axes[0], text, subtitle, 25)


def legend(fig, handles, below):
    """Names so many points below the panels."""
    last = fig.axes[-1].get_gridspec()
    style.legend(fig.axes[(last.nrows - 1) * last.ncols], handles, below)


def total(axes, x, size):
    """The sum of a bar, above it, on paper that hides what is behind."""
    axes.annotate(f"{size:.0f}", (x, size), xytext=(0, ABOVE), textcoords="offset points",
                  ha="center", va="bottom", fontsize=style.SMALL,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0})


def limit(axes, size):
    """A dashed line across a panel that has all its bars. Sums on which it would lie move above it."""
    axes.axhline(size, color=style.INK, linewidth=0.9, dashes=(5, 3))
    axes.autoscale_view()
    level = axes.transData.transform((0, size))[1]
    inches = 1 / axes.figure.dpi
    for text in (text for text in axes.texts if text.get_bbox_patch()):
        box = text.get_window_extent(axes.figure.canvas.get_renderer())
        lift = 72 * inches * (level - box.y0) + ABOVE  # points
        if 0 < lift < 72 * inches * box.height + 2 * ABOVE:
            text.set_position((0, ABOVE + lift))


def thousands(seq_len):
    """4k for 4096."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
