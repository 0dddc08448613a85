"""Schematics of stages: which layers lie on which rank, and how a backward pass splits into B and W.

Which stages a rank holds is computed here as Stages::stage_of does: stages_of().
"""
from tools.look import palette, schematic
from tools.look.schematic import MARGIN, WIDTH

from .draw_schedules import FORWARD, box, tint

RANKS = 4
PLACEMENTS = {"loop": "loop, v = 2: the last rank is followed by the first",
              "fold": "fold: forward turns at the last rank",
              "mirror": "mirror: two copies of each stage, two directions"}


def stages_of(placement, rank, ranks=RANKS, chunks=2):
    """The stages of a rank, chunk by chunk."""
    if placement == "fold":
        return [rank, 2 * ranks - 1 - rank]
    if placement == "mirror":
        return [rank, ranks - 1 - rank]
    return [chunk * ranks + rank for chunk in range(chunks)]


def placements():
    """The stages of four ranks in the three placements, and the way of a micro-batch."""
    row, pitch, width = 46, 158, 134
    drawing = schematic.Drawing(3 * 176 + 60, "Stages on ranks", "; ".join(
        f"{name}: " + ", ".join(f"rank {rank} has stages {stages_of(name, rank)}"
                                for rank in range(RANKS)) for name in PLACEMENTS))
    left = 78
    for rank in range(RANKS):
        drawing.text(left + rank * pitch + width / 2, 32, f"rank {rank}", anchor="middle", bold=True)
    for number, (name, title) in enumerate(PLACEMENTS.items()):
        y = 48 + number * 176
        drawing.text(MARGIN, y + 26, title)
        for chunk in range(2):
            top = y + 42 + chunk * (row + 12)
            back = name == "fold" and chunk == 1 or name == "mirror" and chunk == 1
            for rank in range(RANKS):
                stage, x = stages_of(name, rank)[chunk], left + rank * pitch
                box(drawing, x, top, width, row, tint(FORWARD) if chunk else FORWARD)
                drawing.text(x + width / 2, top + row / 2 + 8, f"stage {stage}", 22, "middle",
                             palette.text_on(tint(FORWARD) if chunk else FORWARD))
                if rank + 1 < RANKS:
                    ends = ((x + width + 2, top + row / 2), (x + pitch - 2, top + row / 2))
                    drawing.arrow(*(reversed(ends) if back else ends), width=2)
        middle, turn = y + 42 + row + 6, left + (RANKS - 1) * pitch + width / 2
        if name == "loop":  # from the last rank round to the first
            drawing.line((turn, middle - 6), (turn, middle), quiet=True, dashed=True, width=2)
            drawing.line((turn, middle), (left - 22, middle), quiet=True, dashed=True, width=2)
            drawing.arrow((left - 22, middle), (left - 22, middle + 6 + row / 2),
                          (left - 2, middle + 6 + row / 2), quiet=True, width=2)
        elif name == "fold":
            drawing.arrow((turn, middle - 6), (turn, middle + 7), width=2)
        for chunk in range(2 if name == "mirror" else 1):
            top = y + 42 + chunk * (row + 12) + row / 2
            if chunk == 0:
                drawing.arrow((MARGIN + 6, top), (left - 2, top), width=2)
            else:
                right = left + (RANKS - 1) * pitch + width
                drawing.arrow((WIDTH - 4, top), (right + 2, top), width=2)
    drawing.text(MARGIN, 48 + 3 * 176 + 4, "Arrows: forward. Backward takes the way back.", 20)
    return drawing.svg()


def split():
    """Forward, B and W of a linear layer, and who waits for what."""
    drawing = schematic.Drawing(430, "Forward, B and W of a linear layer", (
        "Forward: y = W x. B: dx = transposed W dy, which the stage before waits for. W: dW = dy "
        "transposed x, for which nobody waits before the update. x is kept until W."))
    columns = ((MARGIN, "F", "forward", "y = W x"), (258, "B", "backward", "dx = Wᵀ dy"),
               (496, "W", "message", "dW = dy xᵀ"))
    width = 204
    for x, name, kind, formula in columns:
        drawing.box(x, 120, width, 84, kind, f"{name}\n{formula}", bold=True)
    first, second, third = (x + width / 2 for x, *_ in columns)
    drawing.box(first - 40, 34, 80, 46, "plain", "x")
    drawing.arrow((first, 82), (first, 118))
    drawing.box(second - 40, 34, 80, 46, "plain", "dy")
    drawing.arrow((second, 82), (second, 118))
    drawing.arrow((second + 42, 57), (third, 57), (third, 118))
    # x is kept: past B, to W.
    drawing.line((first - 42, 57), (MARGIN - 8, 57), (MARGIN - 8, 360), quiet=True, dashed=True,
                 width=2)
    drawing.arrow((MARGIN - 8, 360), (third + 60, 360), (third + 60, 206), quiet=True, dashed=True,
                  width=2)
    drawing.text(MARGIN + 4, 388, "x is kept until W", 20, ink="muted")
    for x, name, who in ((first, "y", "next stage"), (second, "dx", "stage before"),
                         (third - 16, "dW", "the update")):
        drawing.arrow((x, 206), (x, 240))
        drawing.box(x - 40, 242, 80, 46, "plain", name)
        drawing.text(x, 318, who, 20, "middle")
        if name != "dW":
            drawing.text(x, 342, "waits", 20, "middle")
    drawing.text(WIDTH - MARGIN, 416, "Nobody waits for W before the update.", 20, "end")
    return drawing.svg()


FIGURES = {"placements.svg": placements, "split.svg": split}
