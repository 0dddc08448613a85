"""Draws a step of each method of context parallelism, or of each layout, on one time axis.

    arguments: TIMELINES.json STEM
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style, ways

TITLES = {"ring": "ring: keys go on while a block is computed",
          "ring_waits": "ring, cp_overlap none: each message is waited for at once",
          "all_gather": "all_gather: all keys at once, under the own block",
          "ulysses": "ulysses: tokens are exchanged for heads",
          "contiguous": "contiguous: late ranks compute most",
          "zigzag": "zigzag: an early and a late piece for each"}


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: TIMELINES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(ways.draw(record, TITLES), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
