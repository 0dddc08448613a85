"""Schematics of sequence parallelism: the two pairs of operators, and who holds which numbers."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

OWN = ("forward", "optimizer")  # colours of the ranks
# (name, forward, backward) of the way into a region and of the way out
ALONE = (("f", "as it is", "all-reduce"), ("f*", "all-reduce", "as it is"))
SEQUENCE = (("g", "all-gather", "reduce-scatter"), ("g*", "reduce-scatter", "all-gather"))
KINDS = {"as it is": "ghost", "all-reduce": "tp", "reduce-scatter": "tp", "all-gather": "tp_gather"}


def regions():
    """What happens at the edges of a region, without and with sequence parallelism."""
    drawing = schematic.Drawing(640, "The edges of a tensor-parallel region", "; ".join(
        f"{name}: forward {forward}, backward {backward}"
        for name, forward, backward in (*ALONE, *SEQUENCE)))
    left, half = 66, 313
    y = 14
    for title, (enter, leave), outside in (
            ("Tensor parallelism", ALONE, "x [T, H], the same on all ranks"),
            ("With sequence parallelism", SEQUENCE, "x [T/t, H], own rows of tokens")):
        drawing.text(MARGIN, y + 24, title, bold=True)
        y += 40
        for edge in (enter, leave):
            drawing.box(left, y, WIDTH - MARGIN - left, 40, "plain", f"norm: {outside}", 20)
            y += 46
            if edge is enter:
                y = _edge(drawing, y, edge, left, half)
                drawing.box(left, y, WIDTH - MARGIN - left, 40, "forward",
                            "column, then row: [T, ...], own features", 20)
                y = _edge(drawing, y + 46, leave, left, half)
        y += 24
    drawing.text(MARGIN, y + 22, "↓ forward, ↑ backward. Dashed: nothing is sent.", 20)
    return drawing.svg()


def _edge(drawing, y, edge, left, half):
    """An operator: what it is forward, on the left, and backward; the y below it."""
    name, forward, backward = edge
    drawing.text(MARGIN, y + 28, name, bold=True)
    for x, sign, what in ((left, "↓", forward), (left + half + 8, "↑", backward)):
        drawing.box(x, y, half, 40, KINDS[what], f"{sign} {what}")
    return y + 46


ROWS, CHANNELS, FEATURES = 4, 4, 6  # tokens, of the residual stream, of the MLP: in the drawing
# (label, shape, what a rank has of it, columns in all, whose colour)
STAGES = (("norm", "[T/t, H]", "own rows", CHANNELS, "own"),
          ("g: all-gather", "[T, H]", "all rows", CHANNELS, "by row"),
          ("gate, up, SwiGLU", "[T, F/t]", "own columns", FEATURES, "own"),
          ("down: a term", "[T, H]", "all rows", CHANNELS, "own"),
          ("g*: reduce-scatter", "[T/t, H]", "own rows", CHANNELS, "sum"))


def owner(row):
    """The rank that holds a row of tokens outside the regions."""
    return row * len(OWN) // ROWS


def shapes():
    """What two ranks hold, from one norm to the next residual connection."""
    cell, tall, pitch = 32, 24, 128
    drawing = schematic.Drawing(60 + len(STAGES) * pitch + 44, "Sequence parallelism on two ranks",
                                "; ".join(f"{label} {shape}: {held}"
                                          for label, shape, held, _, _ in STAGES))
    first, apart = 284, 220
    for rank in range(len(OWN)):
        drawing.text(first + rank * apart + FEATURES * cell / 2, 36, f"rank {rank}",
                     anchor="middle", bold=True)
    for number, (label, shape, held, width, what) in enumerate(STAGES):
        y = 54 + number * pitch
        drawing.text(MARGIN, y + 40, label, bold=True)
        drawing.text(MARGIN, y + 70, shape, 20, ink="muted")
        for rank in range(len(OWN)):
            for row in range(ROWS):
                for column in range(width):
                    x = first + rank * apart + column * cell
                    whose = {"all rows": rank, "own rows": owner(row),
                             "own columns": column * len(OWN) // FEATURES}[held]
                    kind = {"own": OWN[rank], "by row": OWN[owner(row)], "sum": "tp"}[what]
                    drawing.box(x, y + row * tall, cell - 3, tall - 3,
                                kind if whose == rank else "ghost")
    drawing.legend(54 + len(STAGES) * pitch, {"forward": "by rank 0", "optimizer": "by rank 1",
                                              "tp": "the sum", "ghost": "not here"})
    return drawing.svg()


FIGURES = {"regions.svg": regions, "shapes.svg": shapes}
