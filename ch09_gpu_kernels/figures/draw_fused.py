"""Schematics: what goes through memory between the last product and the loss, and back."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

CHUNKS = 4


def forward():
    """Logits as a whole, and a few rows of them at a time."""
    drawing = schematic.Drawing(470, "Logits in memory", (
        "Above: the product writes all logits, the loss reads them, and they stay for backward. Below: a few rows of logits at a "
        "time become one number each, and only these stay."))
    left, side = MARGIN, 150
    far = WIDTH - MARGIN - side
    drawing.text(left, 36, "reference", bold=True)
    drawing.box(left, 52, side, 90, "forward", "x\n[T, H]")
    drawing.box(left + side + 60, 52, far - left - side - 120, 90, "activations", "logits [T, V]: kept")
    drawing.box(far, 52, side, 90, "plain", "lse [T]\nloss")
    drawing.arrow((left + side + 4, 97), (left + side + 56, 97))
    drawing.arrow((far - 56, 97), (far - 4, 97))
    drawing.text(left, 206, "fused", bold=True)
    drawing.box(left, 222, side, 4 * 46, "forward", "x\n[T, H]")
    drawing.box(far, 222, side, 4 * 46, "plain", "lse [T]\nloss")
    for chunk in range(CHUNKS):
        top = 222 + chunk * 46
        kind = "activations" if chunk == 1 else "ghost"
        drawing.box(left + side + 60, top + 3, far - left - side - 120, 40, kind, f"logits of chunk {chunk + 1}")
        drawing.arrow((left + side + 4, top + 23), (left + side + 56, top + 23))
        drawing.arrow((far - 56, top + 23), (far - 4, top + 23))
    drawing.text(MARGIN, 446, "Dashed: not there now. One chunk is in memory at a time.", 20, ink="muted")
    return drawing.svg()


def backward():
    """A chunk's way through backward."""
    drawing = schematic.Drawing(330, "Backward of a chunk", (
        "A chunk of the logits is multiplied again; with the kept lse it becomes dlogits in the same memory, from which dx and a "
        "term of dW are multiplied before the next chunk takes its place."))
    width = (WIDTH - 2 * MARGIN - 80) / 3
    columns = [MARGIN + number * (width + 40) for number in range(3)]
    drawing.box(columns[0], 30, width, 80, "forward", "rows of x")
    drawing.box(columns[0], 150, width, 80, "plain", "lse, targets")
    drawing.box(columns[1], 90, width, 80, "activations", "logits, then\ndlogits")
    drawing.box(columns[2], 30, width, 80, "backward", "rows of dx")
    drawing.box(columns[2], 150, width, 80, "gradients", "dW += ...")
    drawing.arrow((columns[0] + width + 4, 80), (columns[1] - 4, 115))
    drawing.arrow((columns[0] + width + 4, 185), (columns[1] - 4, 150))
    drawing.arrow((columns[1] + width + 4, 115), (columns[2] - 4, 80))
    drawing.arrow((columns[1] + width + 4, 150), (columns[2] - 4, 185))
    drawing.text(MARGIN, 276, "One product more than without fusing: the logits again.")
    drawing.text(MARGIN, 308, "The next chunk takes the same memory.", 20, ink="muted")
    return drawing.svg()


FIGURES = {"forward.svg": forward, "backward.svg": backward}
