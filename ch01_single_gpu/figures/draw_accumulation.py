"""A schematic of gradient accumulation."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

MICRO_BATCHES = 3


def accumulation():
    """Micro-batches one after the other, one gradient buffer, one update."""
    drawing = schematic.Drawing(372, "Gradient accumulation",
                                f"{MICRO_BATCHES} micro-batches run forward and backward one after "
                                "the other; each adds to the same gradients; then one update.")
    each, width = 188, 82
    for number in range(MICRO_BATCHES):
        x = MARGIN + number * each
        drawing.text(x + width + 3, 42, f"micro-batch {number}", 20, "middle")
        drawing.box(x, 58, width, 54, "forward", "fwd")
        drawing.box(x + width + 6, 58, width, 54, "backward", "bwd")
        drawing.arrow((x + 1.5 * width + 6, 116), (x + 1.5 * width + 6, 170))
        drawing.text(x + 1.5 * width - 4, 152, "=" if number == 0 else "+", 26, "end", bold=True)
    drawing.box(MARGIN, 174, MICRO_BATCHES * each - 18, 54, "gradients", "one buffer of gradients")
    update = MARGIN + MICRO_BATCHES * each
    drawing.arrow((update - 16, 201), (update + 4, 201))
    drawing.box(update + 6, 174, WIDTH - MARGIN - update - 6, 54, "optimizer", "update")
    drawing.text(MARGIN, 274, "gbs = b · grad_acc", bold=True)
    drawing.text(MARGIN, 310, "Activations: of one micro-batch at a time.", 20)
    drawing.text(MARGIN, 342, "The first writes the gradients, the others add to them.", 20)
    return drawing.svg()


FIGURES = {"accumulation.svg": accumulation}
