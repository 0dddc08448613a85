"""Schematics: from a dry run to a step's time, and two ranks whose events are laid out in time."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

# Two ranks' events, microseconds: computes, then posts an exchange, computes on, waits for it.
BEFORE, UNDER, TAKES = (200, 280), (120, 120), 200
UNIT = 1.0  # a microsecond in units of the drawing


def chain():
    """What is recorded once, and read with any cluster."""
    drawing = schematic.Drawing(440, "From a dry run to a step's time", (
        "The trainer makes a dry run, once for each class of ranks. Its events go with a cluster's numbers into the "
        "replay, which gives the step, bubble and exposed time."))
    width = (WIDTH - 2 * MARGIN - 60) / 3
    columns = [MARGIN + number * (width + 30) for number in range(3)]
    drawing.box(columns[0], 20, width, 90, "forward", "a dry run of\nthe trainer")
    drawing.box(columns[1], 20, width, 90, "plain", "programs:\none a class")
    drawing.box(columns[2], 20, width, 90, "optimizer", "replay:\nclocks")
    for left, right in zip(columns, columns[1:]):
        drawing.arrow((left + width + 3, 65), (right - 3, 65))
    drawing.box(columns[1], 190, width, 90, "plain", "a cluster:\nclusters/*.json")
    drawing.box(columns[2], 190, width, 90, "message", "cost of\nan event")
    drawing.arrow((columns[1] + width + 3, 235), (columns[2] - 3, 235))
    drawing.arrow((columns[2] + width / 2, 187), (columns[2] + width / 2, 113))
    drawing.text(MARGIN, 340, "A program has events in order and no clock:")
    drawing.text(MARGIN, 372, "op m x n x k · post tp.all_gather · op · wait", 20, ink="muted")
    drawing.text(MARGIN, 412, "Another cluster needs no other dry run.", 20)
    return drawing.svg()


def clocks():
    """Two ranks: the exchange begins with the last of them, and part of it is hidden."""
    begins = max(BEFORE)
    ends = begins + TAKES
    exposed = [ends - (before + under) for before, under in zip(BEFORE, UNDER)]
    drawing = schematic.Drawing(420, "Two ranks, one exchange", (
        f"Rank 0 posts after {BEFORE[0]} us, rank 1 after {BEFORE[1]} us. The exchange begins then and takes {TAKES} us; "
        f"rank 0 waits for {exposed[0]} us of it, rank 1 for {exposed[1]} us."))
    left = MARGIN + 80
    for rank, (before, under) in enumerate(zip(BEFORE, UNDER)):
        top = 20 + rank * 130
        drawing.text(MARGIN, top + 32, f"rank {rank}", 20)
        drawing.box(left, top, before * UNIT, 48, "forward", f"{before}", 20)
        drawing.box(left + before * UNIT, top, under * UNIT, 48, "forward", f"{under}", 20)
        drawing.box(left + (before + under) * UNIT, top, exposed[rank] * UNIT, 48, "ghost", f"{exposed[rank]}", 20)
        drawing.box(left + begins * UNIT, top + 58, TAKES * UNIT, 40, "message", f"{TAKES}", 20)
    y = drawing.legend(290, {"forward": "computes", "message": "exchange", "ghost": "exposed: waits"})
    drawing.text(MARGIN, y + 24, "An exchange begins when its last member has posted it.", 20)
    drawing.text(MARGIN, y + 54, "Lengths in microseconds.", 20, ink="muted")
    return drawing.svg()


FIGURES = {"chain.svg": chain, "clocks.svg": clocks}
