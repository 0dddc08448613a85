"""Schematic of one layer's types: what forward and backward make, a letter and a color along each axis.

The rows are those of types.txt, which the program has printed.
"""
import re
from pathlib import Path

from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

from . import placed

PRINTED = Path(__file__).with_name("types.txt")
KINDS = {"R": "forward", "P": "optimizer", "T": "backward", "F": "message", "O": "gather", "I": "wait", "0": "plain"}
WORDS = {"R": "the same", "P": "term of a sum", "T": "other rows", "F": "other columns", "O": "other outputs",
         "I": "other inputs"}
NAMES = {"linear_forward": "", "linear_backward_input": "dx of ", "linear_backward_weight": "dW of ",
         "rmsnorm_backward_input": "dx of norm", "rmsnorm_backward_weight": "dW of norm", "rmsnorm_forward": "norm",
         "swiglu_forward": "swiglu", "swiglu_backward": "swiglu", "attention_forward": "attention",
         "attention_backward": "attention", "attention_delta": "delta of attention"}
STEP, TOP, CHIP = 34, 84, 36


def made(text):
    """[(phase, what, {axis: letter})] of the rows of a layer, in their order."""
    rows = []
    for phase, name, weight, makes, _ in placed.rows_in(text):
        short = NAMES.get(name, name.split(" over ")[0].replace("_", "-"))
        if short == "" or short.endswith(" of "):
            short += weight.rpartition(".")[2]
        rows.append((phase, short, dict(re.findall(r"(\w+):(\w)", makes))))
    return rows


def layer():
    """Forward from the top downwards, and backward beside it, too."""
    rows = made(PRINTED.read_text(encoding="utf-8").split("\n", 1)[1])
    sides = {phase: [row for row in rows if row[0] == phase] for phase in ("forward", "backward")}
    axes = list(rows[0][2])
    bottom = TOP + STEP * max(map(len, sides.values()))
    drawing = schematic.Drawing(bottom + 110, "The types of a layer", "; ".join(
        f"{phase}: " + ", ".join(f"{what} {' '.join(f'{axis}:{letter}' for axis, letter in types.items())}"
                                 for _, what, types in side) for phase, side in sides.items()))
    half = (WIDTH - 2 * MARGIN) / 2
    for place, (phase, side) in enumerate(sides.items()):
        left = MARGIN + place * (half + 10)
        chips = left + half - 10 - len(axes) * (CHIP + 6)
        drawing.text(left, 36, phase, bold=True)
        for number, axis in enumerate(axes):
            drawing.text(chips + number * (CHIP + 6) + CHIP / 2, 66, axis, 20, "middle", ink="muted")
        for row, (_, what, types) in enumerate(side):
            y = TOP + row * STEP
            drawing.text(left, y + 22, what, 20)
            for number, axis in enumerate(axes):
                drawing.box(chips + number * (CHIP + 6), y, CHIP, STEP - 5, KINDS[types[axis]], types[axis], 20)
    for number, (letter, words) in enumerate(WORDS.items()):
        x, y = MARGIN + number % 3 * (WIDTH - 2 * MARGIN) / 3, bottom + 16 + number // 3 * 44
        drawing.box(x, y, CHIP, STEP - 5, KINDS[letter], letter, 20)
        drawing.text(x + CHIP + 8, y + 22, words, 20)
    return drawing.svg()


FIGURES = {"types.svg": layer}
