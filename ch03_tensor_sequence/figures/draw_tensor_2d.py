"""Schematic of 2D tensor parallelism: a step of SUMMA on a square of ranks, in its two forms.

The blocks are computed, not drawn by hand: steps() carries out both forms.
"""
from tools.look import schematic
from tools.look.schematic import MARGIN

SIDE = 3   # rows and columns of ranks
DRAWN = 1  # the step; its row and column have neighbors on both sides
INPUT, OUTPUT = "input", "output"  # what moves along the rows
WIDTH, HEIGHT = 62, 120   # of a rank
ACROSS, DOWN = 116, 144   # from one rank to the next
BLOCK = (54, 34)


def steps(moves):
    """{(step, row, column): blocks (of x, of W, of y)}: what a rank multiplies in each step of
    y = x Wᵀ, and the block of y to which the product is a term. W [O, I] is cut like y and x."""
    ranks = [(row, column) for row in range(SIDE) for column in range(SIDE)]
    if moves == INPUT:
        return {(step, i, j): ((i, step), (j, step), (i, j))
                for step in range(SIDE) for i, j in ranks}
    return {(step, i, j): ((i, j), (step, j), (i, step))
            for step in range(SIDE) for i, j in ranks}


def step_of_summa():
    """One step of each form: what is a rank's own, what arrives, and where sums go."""
    drawing = schematic.Drawing(590, "A step of SUMMA where the input moves, and where the output",
                                f"{SIDE} x {SIDE} ranks in step {DRAWN}. Left: x of column {DRAWN} "
                                f"goes along the rows. Right: terms of y go to column {DRAWN}. In "
                                f"both, W of row {DRAWN} goes along the columns.")
    for moves, left, below in (
            (INPUT, MARGIN + 8, (f"x of column {DRAWN} along rows,", "y adds up where it is")),
            (OUTPUT, 386, (f"terms of y to column {DRAWN},", "x stays where it is"))):
        drawing.text(left + ACROSS + WIDTH / 2, 36, f"the {moves} moves", anchor="middle",
                     bold=True)
        for (step, row, column), blocks in steps(moves).items():
            if step == DRAWN:
                _rank(drawing, left + column * ACROSS, 54 + row * DOWN, (row, column), blocks,
                      moves == INPUT)
        for number, line in enumerate(below):
            drawing.text(left, 498 + number * 28, line, 20)
    drawing.legend(548, {"activations": "own block of x or y", "weights": "own block of W",
                         "plain": "copy, or term"})
    return drawing.svg()


def _rank(drawing, x, y, rank, blocks, input_moves):
    """A rank's blocks, and arrows to its neighbors: copies that it sends, terms that it gets."""
    row, column = rank
    owner = column == DRAWN  # of what moves along the row
    kinds = ("activations" if owner or not input_moves else "plain",
             "weights" if row == DRAWN else "plain",
             "activations" if owner or input_moves else "plain")
    drawing.box(x, y, WIDTH, HEIGHT, "ghost")
    tops = [y + 5 + number * (BLOCK[1] + 4) for number in range(3)]
    for name, index, kind, top in zip("xWy", blocks, kinds, tops):
        drawing.box(x + 4, top, *BLOCK, kind, "{}{}{}".format(name, *index), 20)
    level = tops[0 if input_moves else 2] + BLOCK[1] / 2
    for side in (-1, 1):
        if owner:
            here = x + 4 + (BLOCK[0] + 2 if side > 0 else -2)
            there = x + 4 + side * ACROSS + (-2 if side > 0 else BLOCK[0] + 2)
            ends = ((here, level), (there, level))
            drawing.arrow(*(ends if input_moves else ends[::-1]))
        if row == DRAWN:
            here, edge = tops[1] + BLOCK[1] / 2 + side * 6, x + BLOCK[0] + 6
            drawing.arrow((edge, here), (edge + 22, here), (edge + 22, here + side * (DOWN - 12)),
                          (edge, here + side * (DOWN - 12)), quiet=True)


FIGURES = {"tensor_2d.svg": step_of_summa}
