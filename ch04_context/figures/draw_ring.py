"""Schematics of the ring: who has whose keys in which step, where their gradients travel, and how
two partial results of a softmax become one.

The ring and the numbers of the merge are computed here: owner(), journey(), partial(), merged().
"""
import math

from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

from .draw_masks import LAYOUTS, OWN, RANKS, cells, positions

PITCH, ROW, CELL = 159, 92, 17  # from rank to rank, from step to step; a cell of a block
LEFT = 90
NAMES = dict(zip(LAYOUTS, ("contiguous", "zig-zag")))


def owner(rank, step, ranks=RANKS):
    """Whose keys a rank has in a step: its own first, then those of the rank before it."""
    return (rank - step) % ranks


def _block(drawing, x, y, layout, rank, of):
    """The cells of a rank's queries and an owner's keys."""
    computed = set(cells(layout, rank, of))
    for i, query in enumerate(positions(layout, rank)):
        for j, key in enumerate(positions(layout, of)):
            drawing.box(x + j * CELL, y + i * CELL, CELL - 2, CELL - 2,
                        OWN[of] if (query, key) in computed else "plain")


def ring(layout):
    """Four steps of four ranks: the keys that are here, and the cells computed with them."""
    counts = [[len(cells(layout, rank, owner(rank, step))) for rank in range(RANKS)]
              for step in range(RANKS)]
    drawing = schematic.Drawing(
        56 + RANKS * ROW + 70, f"The ring in {RANKS} steps, {NAMES[layout]}", "; ".join(
            f"step {step}: " + ", ".join(
                f"rank {rank} has K, V {owner(rank, step)}, computes {count} cells"
                for rank, count in enumerate(of_step)) for step, of_step in enumerate(counts)))
    for rank in range(RANKS):
        drawing.text(LEFT + rank * PITCH, 36, f"rank {rank}", bold=True)
    for step in range(RANKS):
        y = 56 + step * ROW
        drawing.text(MARGIN - 4, y + 44, f"step {step}", 20)
        for rank in range(RANKS):
            x, of = LEFT + rank * PITCH, owner(rank, step)
            drawing.box(x, y, 62, 72, OWN[of], f"K, V\n{of}", 20, bold=True)
            _block(drawing, x + 68, y, layout, rank, of)
            if rank + 1 < RANKS and step + 1 < RANKS:  # it goes on to the next rank
                drawing.arrow((x + 62, y + 73), (x + PITCH - 2, y + ROW + 2), quiet=True, width=1.5)
    y = 56 + RANKS * ROW
    drawing.text(MARGIN, y + 22, "A cell of the rank's queries has the color of its keys.", 20)
    drawing.text(MARGIN, y + 52, f"Rank {RANKS - 1} sends to rank 0. Outlined: hidden by the mask.",
                 20)
    return drawing.svg()


def journey(of, ranks=RANKS):
    """[(rank, shares that its gradient holds afterwards)] of one block's keys, step by step; the
    last entry is home again."""
    steps, held = [], []
    for step in range(ranks):
        rank = (of + step) % ranks
        if step > 0:
            held = held + [rank]
        steps.append((rank, tuple(held)))
    return [*steps, (of, (*held, of))]


def gradients():
    """Where the keys of rank 0 are in backward, and behind them their gradient."""
    way = journey(0)
    drawing = schematic.Drawing(356, "Keys of rank 0 in backward, and their gradient", "; ".join(
        f"step {step}: rank {rank}, shares of {', '.join(map(str, held)) or 'none'}"
        for step, (rank, held) in enumerate(way)))
    pitch, width = 137, 124
    for step, (rank, held) in enumerate(way):
        x, home = MARGIN + step * pitch, step == RANKS
        drawing.text(x + width / 2, 34, "home" if home else f"step {step}", 20, "middle", "muted")
        drawing.text(x + width / 2, 64, f"rank {rank}", anchor="middle", bold=True)
        if not home:
            drawing.box(x, 80, width, 52, OWN[0], "K, V 0", bold=True)
        if step + 2 <= RANKS:
            drawing.arrow((x + width, 106), (x + pitch, 106), width=2)
        if not held:
            drawing.box(x, 176, width, 112, "ghost", "share 0\nstays", 20)
            continue
        top = 176
        for share in held:
            drawing.box(x, top, width, 26, OWN[share], f"share {share}", 20)
            top += 29
        if not home:
            drawing.arrow((x + width, 190), (x + pitch, 190), width=2)
    drawing.text(MARGIN, 164, "dK, dV 0", 20)
    drawing.text(MARGIN, 334, "Keys go first. The sum of shares follows, one step behind.", 20)
    return drawing.svg()


SCORES = ((1.0, 3.0), (2.0, 4.0))   # of one query with two blocks of two keys
VALUES = ((10.0, 20.0), (30.0, 40.0))


def partial(scores, values):
    """(max, sum, out) of one block: out is as if there were no other keys."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return top, sum(weights), sum(w * v for w, v in zip(weights, values)) / sum(weights)


def lse(part):
    """max + log(sum): all that a block need say of its sum."""
    return part[0] + math.log(part[1])


def merged(a, b):
    """(lse, out) of both blocks, from (lse, out) of each."""
    (lse_a, out_a), (lse_b, out_b) = a, b
    top = max(lse_a, lse_b)
    total = top + math.log(math.exp(lse_a - top) + math.exp(lse_b - top))
    return total, math.exp(lse_a - total) * out_a + math.exp(lse_b - total) * out_b


def merge():
    """Two blocks of keys, each with a softmax of its own, and what they are together."""
    parts = [partial(scores, values) for scores, values in zip(SCORES, VALUES)]
    pairs = [(lse(part), part[2]) for part in parts]
    total, out = merged(*pairs)
    shares = [math.exp(pair[0] - total) for pair in pairs]
    drawing = schematic.Drawing(560, "Two partial results become one", (
        f"Scores {SCORES}, values {VALUES}. Each block gives lse and out; weighted with "
        f"exp(lse - total) they sum to out {out:.2f}, the softmax over all four keys."))
    half, width = 350, 330
    for number, (scores, values, part, share) in enumerate(zip(SCORES, VALUES, parts, shares)):
        x, kind = MARGIN + number * half, OWN[number]
        drawing.text(x, 36, f"keys of rank {number}", bold=True)
        for y, what, numbers in ((52, "scores", scores), (96, "values", values)):
            drawing.text(x, y + 28, what, 20, ink="muted")
            for column, value in enumerate(numbers):
                drawing.box(x + 90 + column * 82, y, 76, 38, "plain", f"{value:g}")
        rows = (f"max = {part[0]:g}", f"sum = {part[1]:.3f}", f"lse = {lse(part):.3f}",
                f"out = {part[2]:.2f}")
        drawing.box(x, 148, width, 132, kind, "\n".join(rows), bold=True)
        drawing.arrow((x + width / 2, 282), (x + width / 2, 318))
        drawing.box(x, 320, width, 42, "plain", f"its share: {share:.3f}")
        drawing.arrow((x + width / 2, 364), (x + width / 2, 398))
    drawing.text(WIDTH / 2, 306, "exp(lse − lse of both)", 20, "middle", "muted")
    drawing.box(MARGIN, 400, 2 * half - MARGIN, 76, "ghost")
    terms = " + ".join(f"{share:.3f} · {part[2]:.2f}" for share, part in zip(shares, parts))
    drawing.text(WIDTH / 2, 430, f"out = {terms} = {out:.2f}", anchor="middle", bold=True)
    drawing.text(WIDTH / 2, 462, f"lse of both = {total:.3f}", 20, "middle")
    drawing.text(WIDTH / 2, 508, "The same as a softmax over all four keys.", 20, "middle")
    drawing.text(WIDTH / 2, 538, "Only out and lse of a block are needed for it.", 20, "middle")
    return drawing.svg()


FIGURES = {"ring.svg": lambda: ring("contiguous"), "ring_zigzag.svg": lambda: ring("zigzag"),
           "gradients.svg": gradients, "merge.svg": merge}
