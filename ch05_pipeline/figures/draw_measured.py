"""Steps that were measured, below what the simulator makes of their own mean times. Drawn from
pace.json."""
from tools import schematic
from tools.schematic import MARGIN, SMALLEST, WIDTH

from .draw_schedules import GAP, LANE, LEFT, TITLE, axis, box, color_of, legend, micro_batch_of

BETWEEN = 34  # from the planned lanes to the measured ones


def _lanes(drawing, top, ranks, unit):
    for rank, actions in enumerate(ranks):
        y = top + rank * (LANE + GAP)
        drawing.text(LEFT - 10, y + LANE / 2 + 0.36 * SMALLEST, f"rank {rank}", SMALLEST, "end",
                     "muted")
        for action, begin, end in actions:
            label = "" if action == "W" else str(micro_batch_of(action))
            box(drawing, LEFT + begin * unit, y, max((end - begin) * unit - 1, 0.5), LANE,
                color_of(action), label)
    return top + len(ranks) * (LANE + GAP)


def measured(record):
    """Of each schedule: simulated, then measured."""
    drawn = record["drawn"]
    until = max(max(own["measured_ms"], own["simulated_ms"]) for own in drawn)
    unit = (WIDTH - MARGIN - LEFT) / until
    lanes = drawn[0]["ranks"] * (LANE + GAP)
    height = len(drawn) * (TITLE + 2 * lanes + BETWEEN) + 100
    drawing = schematic.Drawing(height, "Planned and measured", "; ".join(
        f"{own['name']}: planned {own['simulated_ms']:.1f} ms, measured {own['measured_ms']:.1f} ms"
        for own in drawn))
    y = 0
    for own in drawn:
        drawing.text(MARGIN, y + 34, f"{own['name']}, planned. Bubble {own['simulated_bubble']:.2f}",
                     bold=True)
        y = _lanes(drawing, y + TITLE, own["simulated"], unit)
        drawing.text(MARGIN, y + 24, f"measured. Bubble {own['measured_bubble']:.2f}", bold=True)
        y = _lanes(drawing, y + BETWEEN, own["measured"], unit)
    axis(drawing, y + 4, unit, until, step=max(10, round(until / 60) * 10))
    legend(drawing, y + 56, None, any(action == "W" for own in drawn for of_rank in own["measured"]
                                      for action, _, _ in of_rank), "ms")
    return drawing.svg()


def figures(record):
    """{file: text}"""
    return {"measured.svg": measured(record)}
