"""Draws all layouts of the search on one node.

    arguments: SEARCHES.json STEM
"""
from tools.plot import heatmap, layouts, style


def draw(record):
    """The figure."""
    found = record["one_node"]
    return layouts.draw({"layouts": found["best"],
                         "about": [f"8B on one node of {found['cluster']}", f"{found['tokens']:,} tokens a step"]})


def main(argv):
    """Draws the figure; the exit code."""
    return heatmap.main([*argv[:2], *(stem + ".svg" for stem in argv[2:])], draw)


if __name__ == "__main__":
    style.run(main)
