"""Schematics of data parallelism: the replicas, and buckets of gradients."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS = 3
LAYERS, PER_BUCKET = 6, 2


def replicas():
    """Ranks with the same weights and other samples, whose gradients one all-reduce adds up."""
    drawing = schematic.Drawing(506, "Replicas and their all-reduce",
                                f"{RANKS} ranks hold the same weights and read different samples. "
                                "An all-reduce adds their gradients; each makes the same update.")
    width, gap = 208, 28
    rows = (("plain", "samples {}"), ("forward", "forward"), ("backward", "backward"),
            ("gradients", "gradients {}"))
    for rank in range(RANKS):
        x = MARGIN + rank * (width + gap)
        drawing.text(x + width / 2, 40, f"rank {rank}", anchor="middle", bold=True)
        for number, (kind, label) in enumerate(rows):
            y = 56 + number * 66
            drawing.box(x, y, width, 46, kind, label.format(rank))
            drawing.arrow((x + width / 2, y + 48), (x + width / 2, y + 64))
        drawing.arrow((x + width / 2, 372), (x + width / 2, 388))
        drawing.box(x, 390, width, 46, "optimizer", "update")
    drawing.box(MARGIN, 322, WIDTH - 2 * MARGIN, 48, "message",
                "all-reduce: the sum, on every rank", bold=True)
    drawing.text(MARGIN, 474, "Same weights, same sum, same update: they stay equal.",
                 20)
    return drawing.svg()


def buckets():
    """Gradients become ready from the last layer on; a full bucket leaves under backward."""
    drawing = schematic.Drawing(374, "Buckets under the backward pass",
                                "Backward makes gradients ready from the last layer to the first. "
                                "A bucket is all-reduced as soon as its last gradient is ready; "
                                "only the last bucket's all-reduce outlasts the backward pass.")
    first, cell, message = 136, 70, 120
    end = first + LAYERS * cell - 4
    drawing.text(MARGIN, 36, "time →", 20, ink="muted")
    for y, label in ((85, "backward"), (183, "buckets"), (281, "messages")):
        drawing.text(MARGIN, y, label, 20)
    for number in range(LAYERS):
        x = first + number * cell
        drawing.box(x, 54, cell - 4, 46, "backward", str(LAYERS - 1 - number))
        drawing.arrow((x + cell / 2 - 2, 102), (x + cell / 2 - 2, 150), quiet=True)
    for number in range(LAYERS // PER_BUCKET):
        x = first + number * PER_BUCKET * cell
        ready = x + PER_BUCKET * cell - 4
        drawing.box(x, 152, ready - x, 46, "gradients", f"bucket {number}", 20)
        drawing.arrow((ready - 10, 200), (ready - 10, 224), (ready + 4, 224), (ready + 4, 248))
        drawing.box(ready + 4, 250, message, 46, "message", "all-reduce", 20)
    drawing.line((end + 2, 44), (end + 2, 318), quiet=True, dashed=True)
    drawing.text(end + 14, 85, "exposed", 20)
    drawing.text(MARGIN, 350, "The update waits for the last bucket's all-reduce alone.", 20)
    return drawing.svg()


FIGURES = {"replicas.svg": replicas, "buckets.svg": buckets}
