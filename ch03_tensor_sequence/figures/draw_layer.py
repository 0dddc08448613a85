"""Schematics of tensor parallelism: a transformer layer on two ranks, and who holds which heads."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS = 2
OWN = ("forward", "optimizer")  # colours of the ranks' own slices
# Of each half of a layer: what every rank computes alike, and what each with its own weights.
HALVES = (("RMSNorm", ("q, k, v: columns", "attention: own heads", "o: rows")),
          ("RMSNorm", ("gate, up: columns", "SwiGLU: own columns", "down: rows")))


def layer():
    """A layer from above: two column-row pairs, each with one all-reduce forward."""
    row, height, gap = 50, 42, 24
    left, outside = 66, 16  # beside the columns a line for the residual
    right = WIDTH - MARGIN - outside
    width = (right - left - gap) / RANKS
    beside = (left - outside, right + outside)  # of each rank
    drawing = schematic.Drawing(816, "A transformer layer on two tensor-parallel ranks",
                                "Norms are computed alike on both ranks. Between f and f* each rank "
                                "works with its own slice: columns of q, k, v, gate and up, rows of "
                                "o and down. f* is an all-reduce forward, f one backward.")
    for rank in range(RANKS):
        drawing.text(left + rank * (width + gap) + width / 2, 36, f"rank {rank}", anchor="middle",
                     bold=True)
    y = 68
    for norm, steps in HALVES:
        begin = y - 10  # of the residual's way round the half
        for rank in range(RANKS):
            x = left + rank * (width + gap)
            drawing.arrow((x + width / 2, y - 22), (x + width / 2, y))
            drawing.box(x, y, width, height, "plain", norm)
        y += row
        _edge(drawing, y + 14, "f", "backward: all-reduce")
        y += 40
        for step in steps:
            for rank in range(RANKS):
                x = left + rank * (width + gap)
                drawing.box(x, y, width, height, OWN[rank], step)
                if step != steps[-1]:
                    drawing.line((x + width / 2, y + height), (x + width / 2, y + row))
            y += row
        for rank in range(RANKS):
            x = left + rank * (width + gap) + width / 2
            drawing.arrow((x, y - row + height + 2), (x, y + 6))
        drawing.text(MARGIN, y + 38, "f*")
        drawing.box(left, y + 8, right - left, height, "tp", "forward: all-reduce", bold=True)
        y += row + 6
        for rank in range(RANKS):
            x = left + rank * (width + gap) + width / 2
            drawing.text(x, y + 27, "+", 28, "middle", bold=True)
            drawing.arrow((x, begin), (beside[rank], begin), (beside[rank], y + 18), (x + (14, -14)[rank == 0], y + 18))
        y += 54
    drawing.legend(y + 10, {"plain": "the same on both", "forward": "rank 0's weights",
                            "optimizer": "rank 1's"})
    return drawing.svg()


def _edge(drawing, y, name, says):
    """Where a region begins that only backward notices."""
    drawing.text(MARGIN, y + 7, name)
    drawing.line((66, y), (WIDTH / 2 - 120, y), quiet=True, dashed=True)
    drawing.text(WIDTH / 2, y + 7, says, 20, "middle", "muted")
    drawing.line((WIDTH / 2 + 120, y), (WIDTH - MARGIN - 16, y), quiet=True, dashed=True)


QUERY_HEADS, KV_HEADS = 8, 2
SPLITS = (2, 4)  # ranks: as many as kv heads, and more


def kv_head_of(query_head):
    """The kv head that a query head reads."""
    return query_head * KV_HEADS // QUERY_HEADS


def heads_of(rank, ranks):
    """(query heads, kv heads) of a rank."""
    each = QUERY_HEADS // ranks
    queries = range(rank * each, (rank + 1) * each)
    return list(queries), sorted({kv_head_of(query) for query in queries})


def sharing(ranks):
    """[ranks that hold the same kv heads]: the groups tp_kv."""
    groups = {}
    for rank in range(ranks):
        groups.setdefault(tuple(heads_of(rank, ranks)[1]), []).append(rank)
    return list(groups.values())


def heads():
    """Who holds which heads: whole groups of them, and copies of kv heads where ranks are more."""
    pitch, inset, height = (WIDTH - 2 * MARGIN) / QUERY_HEADS, 7, 40
    drawing = schematic.Drawing(500, "Attention by heads", "; ".join(
        f"tp = {ranks}: " + ", ".join(f"rank {rank} has query heads {queries} and kv heads {kvs}"
                                      for rank in range(ranks)
                                      for queries, kvs in [heads_of(rank, ranks)])
        for ranks in SPLITS))
    y = 14
    for ranks in SPLITS:
        drawing.text(MARGIN, y + 24, f"tp = {ranks}", bold=True)
        drawing.text(WIDTH - MARGIN, y + 24, f"{QUERY_HEADS} query heads, {KV_HEADS} kv heads", 20,
                     "end", "muted")
        y += 40
        for rank in range(ranks):
            queries, kvs = heads_of(rank, ranks)
            x, wide = MARGIN + queries[0] * pitch, len(queries) * pitch - 8
            drawing.box(x, y, wide, 132, "ghost")
            drawing.text(x + inset, y + 26, f"rank {rank}", 20)
            each = (wide - inset) / len(queries)
            for number, query in enumerate(queries):
                drawing.box(x + inset + number * each, y + 36, each - inset, height,
                            OWN[kv_head_of(query)], f"q {query}", 20)
            for kv in kvs:
                drawing.box(x + inset, y + 84, wide - 2 * inset, height, OWN[kv], f"k, v {kv}", 20)
        y += 142
        for group in sharing(ranks):
            if len(group) > 1:
                first, last = heads_of(group[0], ranks)[0][0], heads_of(group[-1], ranks)[0][-1]
                drawing.box(MARGIN + first * pitch, y, (last + 1 - first) * pitch - 8, height, "tp",
                            "tp_kv: sums dWk, dWv", 20)
        y += 26
    drawing.text(MARGIN, y + 50, "Equal copies of kv heads: their gradients are summed.", 20)
    return drawing.svg()


FIGURES = {"layer.svg": layer, "heads.svg": heads}
