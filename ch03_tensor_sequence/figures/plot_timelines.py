"""Draws a step of tensor and sequence parallelism on one time axis.

    arguments: TIMELINES.json STEM
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style, ways

TITLES = {"none": "none: every message is waited for",
          "weight_grad": "weight_grad: dx is summed under dW",
          "chunks": "chunks: rows travel under the next rows' product",
          "batch_halves": "batch_halves: one half travels under the other's products",
          "again": "sequence parallelism, weight_grad: x is gathered again under dx"}


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: TIMELINES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(ways.draw(record, TITLES), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
