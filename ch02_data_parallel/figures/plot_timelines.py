"""Draws a step of every way of data parallelism and of ZeRO on one time axis.

    arguments: TIMELINES.json STEM
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style, ways

TITLES = {"naive": "naive: one all-reduce after backward",
          "overlapped": "overlapped: an all-reduce for each parameter, under backward",
          "bucketed": "bucketed: an all-reduce for each bucket, under backward",
          "zero1_forward": "ZeRO-1: reduce-scatter under backward, all-gather under forward",
          "zero2": "ZeRO-2: the same, and gradients are freed",
          "zero3": "ZeRO-3: all-gather before each use, reduce-scatter under backward"}


def main(argv):
    """Draws the figure; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: TIMELINES.json STEM", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    style.save(ways.draw(record, TITLES), argv[2] + ".svg")
    return 0


if __name__ == "__main__":
    style.run(main)
