"""Schematics of who holds which positions, and of the cells of the causal mask that this costs.

Everything drawn is computed: positions() is the rule of each layout, cells() counts.
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS, TOKENS = 4, 16
OWN = ("forward", "optimizer", "backward", "message")  # colours of the ranks
LAYOUTS = ("contiguous", "zigzag")
DOCUMENTS = (3, 7, 6)  # tokens of each, side by side in the sample
CELL = 20


def positions(layout, rank, tokens=TOKENS, ranks=RANKS):
    """The positions that a rank holds; `striped` is Striped Attention's layout."""
    if layout == "contiguous":
        return list(range(rank * tokens // ranks, (rank + 1) * tokens // ranks))
    if layout == "striped":
        return list(range(rank, tokens, ranks))
    piece = tokens // (2 * ranks)
    return [piece * place + i for place in (rank, 2 * ranks - 1 - rank) for i in range(piece)]


def begins(lengths):
    """{position: where its document begins}"""
    starts, begin = [], 0
    for length in lengths:
        starts += [begin] * length
        begin += length
    return starts


def sees(query, key, starts=None):
    """Whether a query sees a key: at or before it, and in its document."""
    return key <= query and (starts is None or starts[query] == starts[key])


def cells(layout, rank, owner=None, starts=None, tokens=TOKENS, ranks=RANKS):
    """(query, key) pairs that a rank computes, of one owner's keys or of all."""
    keys = range(tokens) if owner is None else positions(layout, owner, tokens, ranks)
    return [(query, key) for query in positions(layout, rank, tokens, ranks) for key in keys
            if sees(query, key, starts)]


def owners(layout):
    """{position: rank}"""
    return {position: rank for rank in range(RANKS) for position in positions(layout, rank)}


def work(layout, starts=None, ranks=RANKS, tokens=TOKENS):
    """Cells of each rank."""
    return [len(cells(layout, rank, starts=starts, tokens=tokens, ranks=ranks))
            for rank in range(ranks)]


def _mask(drawing, left, top, layout, starts):
    held = owners(layout)
    for query in range(TOKENS):
        for key in range(TOKENS):
            if sees(query, key, starts):
                drawing.box(left + key * CELL, top + query * CELL, CELL - 2, CELL - 2,
                            OWN[held[query]])
            elif key <= query:
                drawing.box(left + key * CELL, top + query * CELL, CELL - 2, CELL - 2, "plain")


def _two(title, panels):
    """Two masks side by side; panels: (heading, layout, where documents begin)."""
    described = "; ".join(f"{heading}: " + ", ".join(
        f"rank {rank} {count}" for rank, count in enumerate(work(layout, starts)))
        for heading, layout, starts in panels)
    named = {kind: f"rank {rank}" for rank, kind in enumerate(OWN)}
    if any(starts for _, _, starts in panels):
        named["plain"] = "the key is of another document"
    drawing = schematic.Drawing(530 if len(named) == RANKS else 562, title, f"Rows are queries, columns keys. Cells of the mask "
                                f"that each rank computes. {described}.")
    for number, (heading, layout, starts) in enumerate(panels):
        left, top = MARGIN + number * 360, 54
        drawing.text(left, 36, heading, bold=True)
        _mask(drawing, left, top, layout, starts)
        drawing.text(left + TOKENS * CELL, top + 20, "keys →", 20, "end", "muted")
        drawing.text(left + TOKENS * CELL, top + 48, "queries ↓", 20, "end", "muted")
        y = top + TOKENS * CELL + 10
        for rank, count in enumerate(work(layout, starts)):
            drawing.box(left + rank * 80, y, 74, 40, OWN[rank], str(count), bold=True)
        drawing.text(left, y + 68, "cells of each rank", 20)
    drawing.legend(490, named)
    return drawing.svg()


def masks():
    """The causal mask of 16 tokens on 4 ranks, in both layouts."""
    return _two("Who computes which cells of the causal mask",
                [("contiguous", "contiguous", None), ("zig-zag", "zigzag", None)])


def documents():
    """The same where tokens see their own document alone."""
    starts = begins(DOCUMENTS)
    return _two("A sample of three documents",
                [("contiguous", "contiguous", starts), ("zig-zag", "zigzag", starts)])


FIGURES = {"masks.svg": masks, "documents.svg": documents}
