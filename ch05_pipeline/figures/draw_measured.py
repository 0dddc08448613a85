"""Steps that were measured, below what the simulator makes of their own mean times. Drawn from
pace.json."""
from tools.look import schematic
from tools.look.schematic import MARGIN, SMALLEST, WIDTH

from . import pace
from .draw_schedules import GAP, LANE, LEFT, TITLE, axis, box, color_of, legend, micro_batch_of

BETWEEN = 34  # from the planned lanes to the measured ones
FIGURES = {"measured.svg": (pace.DRAWN, "Planned and measured"),
           "measured_two_stages.svg": (pace.TWO_STAGES, "With two stages on each rank"),
           "measured_others.svg": (pace.OTHERS, "One at a time, a heuristic, and from both ends")}


def _lanes(drawing, top, ranks, unit, until):
    for rank, actions in enumerate(ranks):
        y = top + rank * (LANE + GAP)
        drawing.text(LEFT - 10, y + LANE / 2 + 0.36 * SMALLEST, f"rank {rank}", SMALLEST, "end",
                     "muted")
        for action, begin, end in actions:
            if begin >= until:
                continue
            end = min(end, until)
            label = "" if action == "W" else str(micro_batch_of(action))
            box(drawing, LEFT + begin * unit, y, max((end - begin) * unit - 1, 0.5), LANE,
                color_of(action), label)
    return top + len(ranks) * (LANE + GAP)


def _name(own):
    """The schedule, and what it was asked for."""
    more = [f"{letter}{own[flag]}" for flag, letter in (("pp_chunks", "v = "),
                                                        ("pp_run_length", "runs of ")) if flag in own]
    return ", ".join([own["name"], *more])


def has_two_stages(own):
    return any("." in action for of_rank in own["simulated"] for action, _, _ in of_rank)


def draw(drawn, title):
    """Of each schedule: simulated, then measured; the longest but `naive` fills the width."""
    until = max(max(own["measured_ms"], own["simulated_ms"]) for own in drawn
                if own["name"] != "naive")
    unit = (WIDTH - MARGIN - LEFT) / until
    lanes = drawn[0]["ranks"] * (LANE + GAP)
    second = "the rank's second stage" if any(map(has_two_stages, drawn)) else None
    height = len(drawn) * (TITLE + 2 * lanes + BETWEEN) + (130 if second else 100)
    drawing = schematic.Drawing(height, title, "; ".join(
        f"{own['name']}: planned {own['simulated_ms']:.1f} ms, measured {own['measured_ms']:.1f} ms"
        for own in drawn))
    y = 0
    for own in drawn:
        for kind, top in (("simulated", TITLE), ("measured", BETWEEN)):
            name = f"{_name(own)}, planned" if kind == "simulated" else "measured"
            more = f"; it takes {own[kind + '_ms']:.0f}" if own[kind + "_ms"] > until else ""
            drawing.text(MARGIN, y + top - 12 + 2 * (kind == "measured"),
                         f"{name}. Bubble {own[kind + '_bubble']:.2f}{more}", bold=True)
            y = _lanes(drawing, y + top, own[kind], unit, until)
    axis(drawing, y + 4, unit, until, step=max(10, round(until / 60) * 10))
    legend(drawing, y + 56, second, any(action == "W" for own in drawn for of_rank in own["measured"]
                                        for action, _, _ in of_rank), "ms")
    return drawing.svg()


def figures(record):
    """{file: text}, of those that were measured."""
    by_name = {own["name"]: own for own in record["drawn"]}
    return {file: draw([by_name[name] for name in names], title)
            for file, (names, title) in FIGURES.items() if all(name in by_name for name in names)}
