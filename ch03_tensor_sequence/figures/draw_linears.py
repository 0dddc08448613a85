"""Schematic of the two ways to split a linear layer, with the book's numbers.

The numbers are computed: column_parallel() and row_parallel() are the two identities.
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS = 2
X = ((0, 1), (2, 3), (4, 5), (6, 7))  # the book's example: x [4, 2]
W_T = ((10, 30), (20, 40))            # Wᵀ [2, 2], which the book calls W
OWN = ("forward", "optimizer")        # colours of the ranks' own slices
ROW, CELL, WIDE = 32, 40, 50          # of a cell: height; width of small numbers, of large ones


def product(a, b):
    """The matrix a b."""
    return tuple(tuple(sum(p * q for p, q in zip(row, column)) for column in zip(*b)) for row in a)


def columns(matrix, part):
    """The columns that one of the ranks holds."""
    each = len(matrix[0]) // RANKS
    return tuple(row[part * each:(part + 1) * each] for row in matrix)


def rows(matrix, part):
    """The rows that one of the ranks holds."""
    each = len(matrix) // RANKS
    return matrix[part * each:(part + 1) * each]


def column_parallel():
    """[(x, this rank's columns of Wᵀ, its columns of y)] of the ranks."""
    return [(X, columns(W_T, rank), product(X, columns(W_T, rank))) for rank in range(RANKS)]


def row_parallel():
    """[(this rank's columns of x, its rows of Wᵀ, its term of y)] of the ranks."""
    return [(columns(X, rank), rows(W_T, rank), product(columns(X, rank), rows(W_T, rank)))
            for rank in range(RANKS)]


def total(terms):
    """The sum of matrices."""
    return tuple(tuple(map(sum, zip(*of_rows))) for of_rows in zip(*terms))


def draw_matrix(drawing, x, middle, matrix, kind, cell):
    """A matrix whose rows are centred about `middle`; where it ends."""
    for i, row in enumerate(matrix):
        y = middle + (i - len(matrix) / 2) * ROW
        for j, value in enumerate(row):
            drawing.box(x + j * cell, y, cell - 2, ROW - 2, kind, str(value), 20)
    return x + len(matrix[0]) * cell


def draw_product(drawing, rank, middle, factors, kinds):
    """x · Wᵀ = y of one rank."""
    x = MARGIN + rank * 354
    for number, (matrix, kind) in enumerate(zip(factors, kinds)):
        if number:
            drawing.text(x + 12, middle + 8, "×="[number - 1], anchor="middle")
            x += 26
        x = draw_matrix(drawing, x, middle, matrix, kind, WIDE if number == 2 else CELL)


def linears():
    """A column-parallel and a row-parallel linear layer on two ranks, in the book's numbers."""
    drawing = schematic.Drawing(724, "Two ways to split a linear layer",
                                "y = x Wᵀ on two ranks. Column-parallel: each rank has all of x and "
                                "some columns of Wᵀ, and computes those columns of y. Row-parallel: "
                                "each rank has some columns of x and those rows of Wᵀ, and computes "
                                f"a term of y; the sum of the terms is y = {product(X, W_T)}.")
    tall = len(X) * ROW
    for top, title, factors, kinds in (
            (0, "Column-parallel: x × columns of Wᵀ", column_parallel(), ("plain", None, None)),
            (266, "Row-parallel: columns of x × rows of Wᵀ", row_parallel(), (None, None, None))):
        drawing.text(MARGIN, top + 36, title, bold=True)
        for rank in range(RANKS):
            drawing.text(MARGIN + rank * 354, top + 72, f"rank {rank}", 20, ink="muted")
            draw_product(drawing, rank, top + 90 + tall / 2, factors[rank],
                         [kind or OWN[rank] for kind in kinds])
    drawing.text(MARGIN, 246, "No message: the next layer goes on with these columns.", 20)
    y = 266 + 90 + tall + 10
    for rank in range(RANKS):
        x = MARGIN + rank * 354 + 3 * CELL + 52 + WIDE
        drawing.arrow((x, y), (x, y + 24))
    drawing.box(MARGIN, y + 26, WIDTH - 2 * MARGIN, 40, "tp", "all-reduce: the sum, on both ranks",
                bold=True)
    drawing.arrow((WIDTH / 2, y + 68), (WIDTH / 2, y + 86))
    middle = y + 90 + tall / 2
    drawing.text(WIDTH / 2 - WIDE - 14, middle + 7, "y =", anchor="end")
    draw_matrix(drawing, WIDTH / 2 - WIDE, middle,
                total([term for _, _, term in row_parallel()]), "plain", WIDE)
    return drawing.svg()


FIGURES = {"linears.svg": linears}
