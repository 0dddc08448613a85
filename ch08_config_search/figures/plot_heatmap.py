"""Draws the best layout of each model on each number of nodes.

    arguments: MAP.json STEM
"""
from tools.plot import heatmap, style


def main(argv):
    """Draws the figure; the exit code."""
    return heatmap.main([*argv[:2], *(stem + ".svg" for stem in argv[2:])])


if __name__ == "__main__":
    style.run(main)
