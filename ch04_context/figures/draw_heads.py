"""Schematics of what lies beside the ring: all keys at once, tokens exchanged for heads, and rings
of such groups."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

from .draw_masks import OWN, RANKS, TOKENS, positions

HEADS = 4
ROWS = 8           # tokens, in the drawing of the exchange
CELL = 36
GROUP = 2          # ranks of a group that exchanges tokens for heads; RANKS / GROUP on a ring
BLOCK, MESSAGE = 112, 96  # widths of what a step computes, and sends
SENDER, RECEIVER = 0, 2   # whose message is framed


def by_tokens(row, _head):
    """The rank that holds a token, before the exchange."""
    return row * RANKS // ROWS


def by_heads(_row, head):
    """The rank that computes a head, after it."""
    return head * RANKS // HEADS


def message(sender, receiver):
    """(row, head) of what one rank sends another."""
    return [(row, head) for row in range(ROWS) for head in range(HEADS)
            if by_tokens(row, head) == sender and by_heads(row, head) == receiver]


def ulysses():
    """Tokens and heads of q, k, v: whose they are before and after an all-to-all."""
    drawing = schematic.Drawing(512, "Tokens for heads, and back", (
        f"{ROWS} tokens and {HEADS} heads on {RANKS} ranks. Before: each rank has all heads of its "
        f"tokens. After an all-to-all: all tokens of its heads. Framed: what rank {SENDER} sends to "
        f"rank {RECEIVER}. A second all-to-all brings the outputs back."))
    panels = ((MARGIN + 4, "q, k, v", "all heads", "of own tokens", by_tokens),
              (288, "attention", "all tokens", "of own heads", by_heads),
              (556, "out", "all heads", "of own tokens", by_tokens))
    top = 72
    for number, (left, name, first, second, holder) in enumerate(panels):
        middle = left + HEADS * CELL / 2
        drawing.text(middle, 36, name, anchor="middle", bold=True)
        for row in range(ROWS):
            for head in range(HEADS):
                drawing.box(left + head * CELL, top + row * CELL, CELL - 3, CELL - 3,
                            OWN[holder(row, head)])
        drawing.text(middle, top + ROWS * CELL + 26, first, 20, "middle")
        drawing.text(middle, top + ROWS * CELL + 52, second, 20, "middle")
        if number < 2:
            rows, heads = zip(*message(SENDER, RECEIVER))
            x, y = left + min(heads) * CELL - 2, top + min(rows) * CELL - 2
            right, bottom = left + (max(heads) + 1) * CELL, top + (max(rows) + 1) * CELL - 1
            drawing.line((x, y), (right, y), (right, bottom), (x, bottom), (x, y), (right, y),
                         strong=True, width=5)
            drawing.arrow((left + HEADS * CELL + 14, top + 4 * CELL),
                          (panels[number + 1][0] - 12, top + 4 * CELL))
            drawing.text((left + HEADS * CELL + panels[number + 1][0]) / 2, top + 4 * CELL - 14,
                         "all-to-all", 20, "middle")
    drawing.text(MARGIN, 456, "Rows: tokens, columns: heads. Framed: rank "
                 f"{SENDER} to {RECEIVER}.", 20)
    drawing.legend(474, {kind: f"rank {rank}" for rank, kind in enumerate(OWN)})
    return drawing.svg()


def of_place(place):
    """The positions that a place of the ring holds: zig-zag over the places."""
    return positions("zigzag", place, TOKENS, RANKS // GROUP)


def of_rank(rank):
    """Those of a rank: consecutive shares of both pieces of its place."""
    place, member = divmod(rank, GROUP)
    held = of_place(place)
    piece = len(held) // 2
    share = piece // GROUP
    return [held[half * piece + member * share + i] for half in (0, 1) for i in range(share)]


def ring_ulysses():
    """Four ranks as a ring of two groups: positions of each, and the two exchanges."""
    drawing = schematic.Drawing(492, "A ring of groups that exchange tokens for heads", "; ".join(
        [f"rank {rank} holds positions {of_rank(rank)}" for rank in range(RANKS)]
        + [f"place {place} of the ring {of_place(place)}" for place in range(RANKS // GROUP)]))
    cell = (WIDTH - 2 * MARGIN) / TOKENS
    held = {position: rank for rank in range(RANKS) for position in of_rank(rank)}
    drawing.text(MARGIN, 36, f"{TOKENS} positions: who holds them", bold=True)
    for position in range(TOKENS):
        drawing.box(MARGIN + position * cell, 50, cell - 3, 40, OWN[held[position]], str(position),
                    20)
    width, half = 150, 350
    for place in range(RANKS // GROUP):
        left = MARGIN + place * half
        ranks = [place * GROUP + member for member in range(GROUP)]
        drawing.box(left, 128, half - 20, 178, "ghost")
        drawing.text(left + 12, 156, f"place {place}: a node", 20)
        for member, rank in enumerate(ranks):
            drawing.box(left + 10 + member * (width + 10), 170, width, 44, OWN[rank],
                        f"rank {rank}", bold=True)
        drawing.text(left + (half - 20) / 2, 246, "all-to-all: tokens for heads", 20, "middle")
        heads = HEADS // GROUP
        for member in range(GROUP):
            first = member * heads
            drawing.text(left + 10 + member * (width + 10) + width / 2, 286,
                         f"heads {first}, {first + heads - 1}", 20, "middle")
    for member in range(GROUP):
        a, b = MARGIN + 10 + member * (width + 10) + width / 2, half + MARGIN + 10 + width / 2
        b += member * (width + 10)
        y = 346 + member * 46
        drawing.arrow((b, y), (b, 308), width=2)
        drawing.arrow((b, y), (a, y), (a, 308), width=2)
    drawing.text(MARGIN, 436, "Two rings, one for each half of the heads:", 20)
    drawing.text(MARGIN, 466, "K, V of the gathered tokens go from place to place.", 20)
    return drawing.svg()


def _steps(kind):
    """([(kind, label, width)] computed, the same of what travels) of a forward pass."""
    blocks = [("forward", f"block {step}", BLOCK) for step in range(RANKS)]
    if kind == "ring":
        return blocks, [("message", f"K, V {step + 1}", MESSAGE) if step + 1 < RANKS else
                        (None, "", 0) for step in range(RANKS)]
    if kind == "all_gather":
        gather = (RANKS - 1) * MESSAGE
        return ([blocks[0], ("wait", "waits", gather - BLOCK), *blocks[1:]],
                [("message", "K, V of all ranks", gather)])
    first, back = 64, 56  # of q, k, v; of out
    return ([("wait", "", first), ("forward", "all keys, own heads", BLOCK * RANKS),
             ("wait", "", back)],
            [("message", "qkv", first), (None, "", BLOCK * RANKS), ("message", "out", back)])


def ways():
    """A layer's attention in forward: what a rank computes, and below it what travels."""
    scale = (WIDTH - 2 * MARGIN) / sum(width for _, _, width in _steps("all_gather")[0])
    drawing = schematic.Drawing(478, "What hides which exchange", "; ".join(
        f"{kind}: {', '.join(label or 'waits' for _, label, _ in _steps(kind)[0])}"
        for kind in ("ring", "all_gather", "ulysses")))
    for number, kind in enumerate(("ring", "all_gather", "ulysses")):
        y = 14 + number * 138
        computed, travels = _steps(kind)
        drawing.text(MARGIN, y + 22, kind, bold=True)
        for top, boxes in ((y + 36, computed), (y + 78, travels)):
            x = MARGIN
            for step, (what, label, width) in enumerate(boxes):
                if what:
                    drawing.box(x, top, width * scale - 4, 38, what, label, 20)
                # A message of the ring begins with the block that hides it.
                aligned = kind == "ring" and what == "message"
                x += (BLOCK if aligned else width) * scale
    drawing.legend(434, {"forward": "computes", "message": "travels", "wait": "the rank waits"})
    return drawing.svg()


FIGURES = {"ways.svg": ways, "ulysses.svg": ulysses, "ring_ulysses.svg": ring_ulysses}
