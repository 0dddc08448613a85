"""A drawing that moves: a block of two queries goes over four tiles of keys, and softmax takes one pass. And one of
backward's two passes."""
from math import exp, inf

from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

QUERIES = ((1, 1), (1, -1))
KEYS = ((2, -1), (1, 0), (2, 1), (0, 1), (3, -1), (2, 1), (3, 2), (1, 1))
VALUES = (2, 4, 1, 3, 5, 2, 6, 1)  # of one channel
TILE = 2
TILES = len(KEYS) // TILE
STEP, HOLD = 3, 6  # seconds: of a tile, and with everything shown
DIM = 0.15  # opacity of what is not there now


def scores(query):
    """Products of a query with every key."""
    return [sum(a * b for a, b in zip(QUERIES[query], key)) for key in KEYS]


def steps(row):
    """[(max, factor, sum, acc)] of a row of scores, as each tile leaves them."""
    found, top, total, acc = [], -inf, 0.0, 0.0
    for first in range(0, len(row), TILE):
        tile, values = row[first:first + TILE], VALUES[first:first + TILE]
        new = max(top, *tile)
        factor, weights = exp(top - new), [exp(score - new) for score in tile]
        top, total = new, total * factor + sum(weights)
        acc = acc * factor + sum(weight * value for weight, value in zip(weights, values))
        found.append((top, factor, total, acc))
    return found


def rules():
    """When each group is seen: a tile during its step, a row of the table from then on, everything at the end and
    wherever nothing moves."""
    period = TILES * STEP + HOLD
    lines = []

    def shown(name, moments):
        frames = " ".join(f"{100 * at / period:.2f}% {{ opacity: {opacity}; }}"
                          for at, opacity in sorted({0: DIM, **moments}.items()))
        lines.append(f"@keyframes {name} {{ {frames} }}\n.{name} {{ animation: {name} {period}s step-end infinite; }}")

    for step in range(TILES):
        begin, end = step * STEP, (step + 1) * STEP
        shown(f"tile{step}", {begin: 1, end: DIM, TILES * STEP: 1})
        shown(f"row{step}", {begin: 1})
        shown(f"now{step}", {0: 0, begin: 1, end: 0})
    shown("out", {TILES * STEP: 1})
    return "@media (prefers-reduced-motion: no-preference) {\n" + "\n".join(lines) + "\n}"


def over_tiles():
    """Tiles above, and below them what the block keeps of its two rows after each."""
    drawing = schematic.Drawing(500, "Softmax in one pass over four tiles of keys", (
        "Above: four tiles of two keys, their values, and the scores of two queries. Below: after each tile a row's "
        "maximum, the factor for what was summed before, the sum and the accumulator; at the end acc / sum. The drawing "
        "moves: a tile's scores are there in its step alone."), rules())
    label, half, column = MARGIN + 90, (WIDTH - 2 * MARGIN - 90) / 2, (WIDTH - 2 * MARGIN - 90) / 8
    for y, text in ((37, "keys"), (79, "values"), (117, "query 1"), (155, "query 2")):
        drawing.text(MARGIN, y, text, 20)
    for tile in range(TILES):
        x = label + tile * 2 * column
        with drawing.group(f"tile{tile}"):
            drawing.box(x + 4, 14, 2 * column - 8, 34, "message", f"tile {tile + 1}", 20)
            for i in range(TILE):
                key = tile * TILE + i
                drawing.text(x + (i + 0.5) * column, 79, str(VALUES[key]), 20, "middle")
                for query, y in ((0, 94), (1, 132)):
                    drawing.box(x + i * column + 4, y, column - 8, 32, "forward", str(scores(query)[key]), 20)
    for query in range(2):
        x = label + query * half
        drawing.text(x + half / 2, 206, f"query {query + 1}", 20, "middle", bold=True)
        for i, head in enumerate(("max", "factor", "sum", "acc")):
            drawing.text(x + (i + 0.5) * column, 238, head, 20, "middle", "muted")
        of_tiles = steps(scores(query))
        for step, (top, factor, total, acc) in enumerate(of_tiles):
            with drawing.group(f"row{step}"):
                for i, text in enumerate((str(top), *(f"{number:.3f}" for number in (factor, total, acc)))):
                    drawing.text(x + (i + 0.5) * column, 276 + 40 * step, text, 20, "middle",
                                 bold=i == 1 and factor != 1)
        with drawing.group("out"):
            _, _, total, acc = of_tiles[-1]
            drawing.text(x + half / 2, 440, f"acc / sum = {acc / total:.3f}", 20, "middle", bold=True)
    for step in range(TILES):
        with drawing.group(f"row{step}"):
            drawing.text(MARGIN, 276 + 40 * step, f"tile {step + 1}", 20)
        with drawing.group(f"now{step}", hidden=True):
            x, y = label + step * 2 * column, 254 + 40 * step
            for left, top, right, bottom in ((x, 8, x + 2 * column, 170), (MARGIN - 8, y, WIDTH - MARGIN + 8, y + 32)):
                drawing.line((left, top), (right, top), (right, bottom), (left, bottom), (left, top), strong=True)
    with drawing.group("out"):
        drawing.text(MARGIN, 440, "output", 20)
    drawing.text(MARGIN, 482, "factor = exp(old max - new max), for sum and acc", 20, ink="muted")
    return drawing.svg()


def two_passes():
    """Tiles of scores twice: one block's column, which sums gradients of its keys, and one block's row."""
    drawing = schematic.Drawing(424, "Backward's two passes over the tiles of scores", (
        "Four by four tiles of scores, twice; keys across, queries down. Left: a block keeps a tile of keys, and goes down "
        "its column; it sums dK and dV alone, but of each query's dQ it has one of four terms. Right: a block keeps a tile "
        "of queries, and goes along its row, in the order of the keys; it sums dQ alone."))
    tile, top, half = 56, 84, WIDTH / 2
    for side, (title, mine, text) in enumerate((
            ("pass 1: blocks keep keys", lambda row, column: column == 1,
             ("a column: dK and dV whole,", "of dQ a term for each row")),
            ("pass 2: blocks keep queries", lambda row, column: row == 2,
             ("a row: dQ whole,", "in the order of the keys")))):
        left = MARGIN + side * half + 40
        drawing.text(MARGIN + side * half, 32, title, 20, bold=True)
        drawing.text(left + 2 * tile, 68, "keys", 20, "middle", "muted")
        for row in range(TILES):
            for column in range(TILES):
                drawing.box(left + column * tile, top + row * tile, tile - 6, tile - 6,
                            "backward" if mine(row, column) else "plain")
        if side == 0:
            drawing.arrow((left + 1.45 * tile, top + 10), (left + 1.45 * tile, top + TILES * tile - 16))
        else:
            drawing.arrow((left + 10, top + 2.45 * tile), (left + TILES * tile - 16, top + 2.45 * tile))
        for line, words in enumerate(text):
            drawing.text(MARGIN + side * half, top + TILES * tile + 30 + 28 * line, words, 20)
    drawing.text(MARGIN, 406, "Queries downwards. Filled: the tiles of one block.", 20, ink="muted")
    return drawing.svg()


FIGURES = {"over_tiles.svg": over_tiles, "two_passes.svg": two_passes}
