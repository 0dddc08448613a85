"""Judge of ch09.ex6: what attention with scores in memory asks for beyond attention without them."""

SIZE = LENGTH, WIDTH = 192, 64
HEADS, BYTES, TILE = 2, 4, 32
SCORES = LENGTH * LENGTH * BYTES                # of a head
ROWS = TILE * WIDTH * BYTES                     # of a tile, of one operand
DOWN = LENGTH // TILE


def measure(lab):
    """Bytes that one rung asks for, less those of the other."""
    rungs = lab.kernels("ch09.attention", *SIZE)
    return rungs["naive"]["bytes"] - rungs["blockwise"]["bytes"]


def suspects(measured):
    """[(a wrong answer, its words)]"""
    queries = (DOWN * DOWN - DOWN) * ROWS
    return [(HEADS * 5 * SCORES, "naive also reads the queries of each tile anew"),
            (HEADS * (5 * SCORES + DOWN * DOWN * ROWS), "blockwise reads its queries, too: once a block"),
            (HEADS * (2 * SCORES + queries), "scores are written once and read twice, weights written and read"),
            (HEADS * (3 * SCORES + queries), "these are the passes of scores: weights are written and read, too"),
            (measured / HEADS, "this is one head"),
            (measured / BYTES, "these are numbers: one of f32 has 4 bytes")]
