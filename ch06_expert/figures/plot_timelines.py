"""Draws steps of a mixture of experts, each two on one time axis.    arguments: TIMELINES.json FOLDER

FOLDER/timelines.svg: two ranks; FOLDER/timelines_turns.svg: four, with two stages.
"""
import json
from pathlib import Path

from tools.base import BookError
from tools.plot import style, ways

TITLES = {"timelines": {"plain_2": "no shared expert: weight gradients alone hide messages",
                        "shared_2": "a shared expert: it computes while rows travel"},
          "timelines_turns": {"one_by_one": "dualpipe: one pass at a time",
                              "turns": "overlap_dispatch: one pass computes while the other's rows travel"}}


def main(argv):
    """Draws the figures; the exit code."""
    if len(argv) != 3:
        raise BookError("usage: TIMELINES.json FOLDER", 2)
    record = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    for stem, titles in TITLES.items():
        own = {**record, "ways": [way for way in record["ways"] if way["way"] in titles]}
        style.save(ways.draw(own, titles), str(Path(argv[2]) / f"{stem}.svg"))
    return 0


if __name__ == "__main__":
    style.run(main)
