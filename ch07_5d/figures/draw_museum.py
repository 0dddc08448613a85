"""Curves of the museum's exhibits in full: losses without the mistake and with it, and those of two seeds."""
from tools.look import schematic
from tools.look.schematic import MARGIN, SMALLEST, WIDTH

COLUMNS, WIDE, HIGH, GAP = 3, 208, 130, 28
TOP, LABEL = 62, 34          # of the first row; what a panel's name takes
LEAST, MOST = 2.0, 6.0       # losses that a panel shows
NAMES = {"zero_expert_gradients_by_edp": "experts' gradients", "tensor_router_of_own_rows": "router",
         "zero_tied_ends_apart": "tied ends", "tensor_single_kv_head_not_summed": "one kv head",
         "context_balance_loss_times_cp": "one loss and cp", "tensor_same_values_on_every_rank": "random values",
         "expert_norm_of_first_rank": "gradient norm", "expert_load_of_own_rows": "experts' biases"}


def curves(pairs, steps):
    """pairs: [(name, losses without the mistake, losses with it)] at these steps; the last one is of two seeds."""
    rows = -(-len(pairs) // COLUMNS)
    drawing = schematic.Drawing(TOP + rows * (HIGH + LABEL + GAP), "Losses without a mistake and with it", (
        f"Losses from {LEAST:.0f} to {MOST:.0f} over {steps[-1]} steps. At the end: "
        + "; ".join(f"{name} {right[-1]:.2f} and {planted[-1]:.2f}" for name, right, planted in pairs)))
    drawing.line((MARGIN, 26), (MARGIN + 40, 26))
    drawing.text(MARGIN + 50, 33, "as it should be", SMALLEST)
    drawing.line((MARGIN + 290, 26), (MARGIN + 330, 26), strong=True, dashed=True)
    drawing.text(MARGIN + 340, 33, "with the mistake", SMALLEST)
    for number, (name, right, planted) in enumerate(pairs):
        left = MARGIN + number % COLUMNS * (WIDE + GAP)
        top = TOP + number // COLUMNS * (HIGH + LABEL + GAP) + LABEL
        drawing.text(left, top - 10, name, SMALLEST, bold=True)
        drawing.box(left, top, WIDE, HIGH, "plain")
        for losses, look in ((right, {}), (planted, {"strong": True, "dashed": True})):
            drawing.line(*((left + WIDE * step / steps[-1], top + HIGH * (MOST - loss) / (MOST - LEAST))
                           for step, loss in zip(steps, losses)), **look)
    return drawing.svg()
