"""Figures of several panels side by side, with one title over and one legend below them."""
import matplotlib.pyplot as plt

from tools.plot import style

DEVICE = 80 * 2**30  # bytes of a GPU that is sold, and called by the book, as one of 80 GB


def panels(models, **kwargs):
    """A figure with one panel for each model, side by side."""
    style.apply()
    fig, axes = plt.subplots(1, len(models), figsize=(8.6, 3.9), squeeze=False, **kwargs)
    fig.subplots_adjust(wspace=0.24 if len(models) < 4 else 0.08)
    for panel, model in zip(axes[0], models):
        panel.annotate(model, (0.5, 1), xytext=(0, 5), xycoords="axes fraction", ha="center",
                       textcoords="offset points", fontsize=12.5)
    return fig, list(axes[0])


def heading(fig, text, subtitle):
    """The title and its quieter second line, over all panels."""
    axes = fig.axes[0]
    for line, above, look in ((text, 50, {"fontsize": 14}),
                              (subtitle, 31, {"fontsize": 11.5, "color": style.MUTED})):
        axes.annotate(style.plain(line), (0, 1), xytext=(0, above), xycoords="axes fraction",
                      textcoords="offset points", **look)


def legend(fig, handles, y, columns=None):
    """Names below the panels, in one row or in so many columns."""
    fig.legend(handles, [handle.get_label() for handle in handles], ncol=columns or len(handles),
               loc="upper left", bbox_to_anchor=(0, y), bbox_transform=fig.axes[0].transAxes,
               handlelength=1.3, handleheight=0.8, handletextpad=0.5, columnspacing=1.2,
               borderpad=0, fontsize=10.5, frameon=False)


def thousands(seq_len):
    """4k for 4096."""
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)
