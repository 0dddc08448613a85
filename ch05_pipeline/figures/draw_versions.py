"""Which version of its weights each pass of PipeDream reads, and how long a rank keeps each. Drawn from
stale.json."""
from tools.look import palette, schematic
from tools.look.schematic import MARGIN, SMALLEST, WIDTH

from . import stale
from .draw_schedules import BACKWARD, FORWARD, LEFT, axis, micro_batch_of, tint

LANE, GAP, TOP = 56, 6, 56


ROW = 27  # of a version


def figures(schedule):
    """{file: text} of both figures."""
    return {"versions.svg": _versions(schedule), "kept.svg": _kept(schedule)}


def _versions(schedule):
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
    return drawing.svg()


def _kept(schedule):
    """Of rank 0, from when to when each version is the newest, and then stashed."""
    unit = (WIDTH - MARGIN - LEFT) / schedule["makespan"]
    found = stale.versions(schedule)[0]
    ends = [end for action, _, end, _, _ in found if not action.startswith("F")]
    last_read = {version: end for _, _, end, version, _ in found}
    until = schedule["makespan"]
    spans = [(begin, end, max(end, last_read.get(number, 0))) for number, (begin, end) in
             enumerate(zip([0, *ends], ends))]  # the last update makes the next step's first
    drawing = schematic.Drawing(
        TOP + len(spans) * ROW + 92, "PipeDream: how long rank 0 keeps each version",
        "; ".join(f"version {number}: newest from {begin:g} to {end:g}, kept until {kept:g}"
                  for number, (begin, end, kept) in enumerate(spans)))
    drawing.text(MARGIN, 34, "Versions of rank 0, from update to last use", bold=True)
    y = TOP
    for number, (begin, end, kept) in enumerate(spans):
        drawing.text(LEFT - 10, y + ROW / 2 + 0.36 * SMALLEST, str(number), SMALLEST, "end", "muted")
        for color, left, right in ((FORWARD, begin, end), (tint(FORWARD), end, kept)):
            if right > left:
                _rectangle(drawing, color, LEFT + left * unit, y, (right - left) * unit - 1, ROW - 3)
        y += ROW
    axis(drawing, y + 4, unit, until)
    _keys(drawing, y + 56, ((FORWARD, "newest"), (tint(FORWARD), "stashed")))
    return drawing.svg()


def _rectangle(drawing, color, x, y, width, height):
    number = schematic._number  # pylint: disable=protected-access
    drawing.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
                         f'height="{number(height)}" rx="2" fill="{color}"/>')


def _keys(drawing, y, entries):
    x = MARGIN
    for color, name in entries:
        _rectangle(drawing, color, x, y, 20, 20)
        drawing.text(x + 28, y + 17, name, SMALLEST)
        x += 44 + schematic.text_width(name, SMALLEST)


def _box(drawing, y, unit, action, begin, end, version, newest):
    color = FORWARD if action.startswith("F") else BACKWARD if version == newest else tint(BACKWARD)
    x, width = LEFT + begin * unit, (end - begin) * unit - 1
    _rectangle(drawing, color, x, y, width, LANE)
    for text, down in ((micro_batch_of(action), 0.28), (version, 0.76)):
        drawing.text(x + width / 2, y + down * LANE + 0.36 * SMALLEST, str(text), SMALLEST, "middle",
                     palette.text_on(color), bold=down > 0.5)


def _legend(drawing, y):
    _keys(drawing, y, ((FORWARD, "forward"), (BACKWARD, "backward, newest weights")))
    _keys(drawing, y + 32, ((tint(BACKWARD), "backward, older weights"),))
    drawing.text(MARGIN, y + 84, "Each backward pass makes the next version of its rank.", SMALLEST,
                 ink="muted")
