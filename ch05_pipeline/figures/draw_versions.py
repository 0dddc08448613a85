"""Which version of its weights each pass of PipeDream reads. Drawn from schedules.json."""
from tools import palette, schematic
from tools.schematic import MARGIN, SMALLEST, WIDTH

from . import stale
from .draw_schedules import BACKWARD, FORWARD, LEFT, axis, micro_batch_of, tint

LANE, GAP, TOP = 56, 6, 56


def figures(record):
    """{file: text}."""
    schedule = stale.of_1f1b(record)
    unit = (WIDTH - MARGIN - LEFT) / schedule["makespan"]
    ranks = stale.versions(schedule)
    drawing = schematic.Drawing(
        TOP + len(ranks) * (LANE + GAP) + 160, "PipeDream: which weights each pass reads",
        "; ".join(f"rank {rank}: " + ", ".join(f"{action} version {version}"
                                               for action, _, _, version, _ in found)
                  for rank, found in enumerate(ranks)))
    drawing.text(MARGIN, 34, "Micro-batch, and below it the version that it reads", bold=True)
    y = TOP
    for rank, found in enumerate(ranks):
        drawing.text(LEFT - 10, y + LANE / 2 + 0.36 * SMALLEST, f"rank {rank}", SMALLEST, "end",
                     "muted")
        for own in found:
            _box(drawing, y, unit, *own)
        y += LANE + GAP
    axis(drawing, y + 4, unit, schedule["makespan"])
    _legend(drawing, y + 56)
    return {"versions.svg": drawing.svg()}


def _box(drawing, y, unit, action, begin, end, version, newest):
    number = schematic._number  # pylint: disable=protected-access
    color = FORWARD if action.startswith("F") else BACKWARD if version == newest else tint(BACKWARD)
    x, width = LEFT + begin * unit, (end - begin) * unit - 1
    drawing.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
                         f'height="{LANE}" rx="2" fill="{color}"/>')
    for text, down in ((micro_batch_of(action), 0.28), (version, 0.76)):
        drawing.text(x + width / 2, y + down * LANE + 0.36 * SMALLEST, str(text), SMALLEST, "middle",
                     palette.text_on(color), bold=down > 0.5)


def _legend(drawing, y):
    number = schematic._number  # pylint: disable=protected-access
    x = MARGIN
    for color, name in ((FORWARD, "forward"), (BACKWARD, "backward, newest weights"),
                        (tint(BACKWARD), "backward, older weights")):
        drawing.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="20" height="20" rx="2" '
                             f'fill="{color}"/>')
        drawing.text(x + 28, y + 17, name, SMALLEST)
        x += 44 + schematic.text_width(name, SMALLEST)
        if x > WIDTH / 2 and color == BACKWARD:
            x, y = MARGIN, y + 32
    drawing.text(MARGIN, y + 52, "Each backward pass makes the next version of its rank.", SMALLEST,
                 ink="muted")
