"""Schematics of the collectives: what each rank holds before and after, and a ring's steps.

The contents are computed, not drawn by hand: collectives() applies each operation to what the ranks
hold, and ring() carries out the steps of a ring.
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS = 3
KINDS = ("forward", "optimizer", "backward")  # the colours of the ranks' own values
SUM = "Σ"


def _own():
    """What a rank has by itself: one value."""
    return [[str(rank)] for rank in range(RANKS)]


def _parts(rank):
    """A value cut into a part for each rank."""
    return [f"{rank}{'abc'[part]}" for part in range(RANKS)]


def states():
    """{collective: (before, after)}: for each rank its cells, of which None is empty."""
    own, empty = _own(), [[None]] * RANKS
    root = [own[0], *empty[1:]]
    all_parts = [_parts(rank) for rank in range(RANKS)]
    sums = [[f"{SUM}{'abc'[rank]}"] for rank in range(RANKS)]
    everything = [value for cells in own for value in cells]
    return {
        "broadcast": (root, [own[0]] * RANKS),
        "reduce": (own, [[SUM], *empty[1:]]),
        "all-reduce": (own, [[SUM]] * RANKS),
        "gather": (own, [everything, *[[None] * RANKS] * (RANKS - 1)]),
        "all-gather": (own, [everything] * RANKS),
        "scatter": ([_parts(0), *[[None] * RANKS] * (RANKS - 1)], [[part] for part in _parts(0)]),
        "reduce-scatter": (all_parts, sums)}


def _cells(drawing, x, y, cells, size=43):
    for number, value in enumerate(cells):
        if value is None:
            drawing.box(x + number * (size + 4), y, size, 34, "ghost")
            continue
        kind = "message" if value.startswith(SUM) else KINDS[int(value[0])]
        drawing.box(x + number * (size + 4), y, size, 34, kind, value, 20)


def collectives():
    """Eight collectives of three ranks, before and after."""
    drawing = schematic.Drawing(842, "The collectives, before and after",
                                "Each row is a rank. " + "; ".join(
                                    f"{name}: {before} to {after}" for name, (before, after)
                                    in states().items()))
    width, height = 350, 200
    for number, (name, (before, after)) in enumerate(states().items()):
        x, y = MARGIN + number % 2 * width, 16 + number // 2 * height
        drawing.text(x, y + 24, name, bold=True)
        for rank in range(RANKS):
            top = y + 40 + rank * 42
            _cells(drawing, x, top, before[rank])
            _cells(drawing, x + 192, top, after[rank])
        drawing.arrow((x + 47 * len(before[0]) + 6, y + 99), (x + 184, y + 99))
    x, y = MARGIN + width, 16 + 3 * height
    drawing.text(x, y + 24, "barrier", bold=True)
    for rank, begin in enumerate((60, 130, 20)):  # when a rank arrives, and when all go on
        top = y + 40 + rank * 42
        drawing.box(x, top, begin, 34, "forward")
        drawing.box(x + begin + 2, top, 176 - begin - 2, 34, "wait")
        drawing.box(x + 180, top, 148, 34, "forward")
    drawing.text(MARGIN, 822, f"Rows: ranks 0 to {RANKS - 1}. {SUM}: a sum. Yellow: a rank waits.",
                 20)
    return drawing.svg()


def ring_steps(ranks=RANKS):
    """[(what each rank holds of each part, as the set of those it sums; who sent which part)] from
    the start to the end: ranks - 1 steps of reduce-scatter, then as many of all-gather."""
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    found = [([[set(part) for part in parts] for parts in held], [])]
    for step in range(2 * (ranks - 1)):
        reducing = step < ranks - 1
        # The part that was just added to, or that has just arrived whole, goes on.
        sent = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        before = [[set(part) for part in parts] for parts in held]
        for rank, part in sent:
            to = (rank + 1) % ranks
            held[to][part] = before[rank][part] | (before[to][part] if reducing else set())
        found.append(([[set(part) for part in parts] for parts in held], sent))
    return found


def ring():
    """What the ranks hold after every step, and the arrows of what was sent."""
    cell, pitch, row, first = 54, 208, 112, 92
    drawing = schematic.Drawing(first + 5 * row + 52, "A ring: reduce-scatter, then all-gather",
                                "Each rank sends one part to the next in every step. A cell names "
                                "the ranks whose values it sums.")
    left = 112
    for rank in range(RANKS):
        drawing.text(left + rank * pitch + 1.5 * cell + 2, 40, f"rank {rank}", anchor="middle",
                     bold=True)
        for part in range(RANKS):
            drawing.text(left + rank * pitch + part * (cell + 2) + cell / 2, 74, "abc"[part], 20,
                         "middle", "muted")
    for number, (held, sent) in enumerate(ring_steps()):
        y = first + number * row
        reducing = 0 < number < RANKS
        for rank, part in sent:
            to = (rank + 1) % RANKS
            begin = (left + rank * pitch + part * (cell + 2) + cell / 2, y - row + 46)
            end = (left + to * pitch + part * (cell + 2) + cell / 2, y - 3)
            drawing.arrow(begin, end, quiet=True)
        drawing.text(MARGIN, y + 30, "start" if number == 0 else f"step {number}", 20)
        for rank, parts in enumerate(held):
            for part, whose in enumerate(parts):
                full = len(whose) == RANKS
                arrived = any((rank - 1) % RANKS == source and part == of for source, of in sent)
                kind = "message" if full else "wait" if arrived and reducing else "plain"
                label = "".join(map(str, sorted(whose)))
                drawing.box(left + rank * pitch + part * (cell + 2), y, cell, 44, kind, label, 20)
    y = first + 5 * row - 40
    drawing.text(MARGIN, y + 14, "Steps 1 and 2: reduce-scatter. Steps 3 and 4: all-gather.", 20)
    drawing.legend(y + 34, {"message": "the whole sum", "wait": "just added"})
    return drawing.svg()


FIGURES = {"collectives.svg": collectives, "ring.svg": ring}
