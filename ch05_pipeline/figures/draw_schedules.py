"""Schedules as the simulator lays them out, on one time axis: a lane for each rank, a box for each
action. Drawn from schedules.json."""
from tools.look import palette, schematic
from tools.look.schematic import MARGIN, SMALLEST, WIDTH

LANE, GAP = 27, 3           # of a rank; between ranks
TITLE = 46                  # above the lanes of a schedule
AXIS = 50                   # below them
LEFT = 84
FORWARD, BACKWARD, WEIGHTS = palette.FORWARD, palette.BACKWARD, palette.DP
TINT = 0.5                  # of the second chunk of a rank: so much of the way to white
TWO_STAGES, BEGIN = ("interleaved", "llama3", "zb_v"), 14  # up to so many units of time
NAMES = {"naive": "naive: one at a time", "afab": "afab: all forward, all backward",
         "1f1b": "1f1b: one forward, one backward", "interleaved": "interleaved: v = 2",
         "llama3": "llama3: v = 2, runs of {pp_run_length}", "zb_h1": "zb_h1: W fills the end",
         "zb_h2": "zb_h2: and more forward first", "zb_v": "zb_v: folded, v = 2",
         "dualpipe": "dualpipe: micro-batches from both ends"}


def tint(color):
    """A lighter one."""
    return "#" + "".join(f"{round(255 - (255 - int(color[at:at + 2], 16)) * (1 - TINT)):02x}"
                         for at in (1, 3, 5))


def color_of(action):
    """By work, and lighter in the rank's second chunk."""
    own = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}[action[0]]
    return tint(own) if "." in action else own


def micro_batch_of(action):
    return int(action.lstrip("FBW").partition(".")[0])


def box(drawing, x, y, width, height, color, label=""):
    """A box of any color, labelled where there is room."""
    number = schematic._number  # pylint: disable=protected-access
    drawing.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
                         f'height="{number(height)}" rx="2" fill="{color}"/>')
    if label and schematic.text_width(label, SMALLEST) <= width - 1:
        drawing.text(x + width / 2, y + height / 2 + 0.36 * SMALLEST, label, SMALLEST, "middle",
                     palette.text_on(color))


def lanes(drawing, top, schedule, unit, until, of_each=None, since=0):
    """The ranks of a schedule between two times; of_each: micro-batches that count from 0 anew."""
    for rank, actions in enumerate(schedule["actions"]):
        y = top + rank * (LANE + GAP)
        drawing.text(LEFT - 10, y + LANE / 2 + 0.36 * SMALLEST, f"rank {rank}", SMALLEST, "end",
                     "muted")
        for action, begin, end in actions:
            if begin >= until or end <= since:
                continue
            begin = max(begin, since)
            label = micro_batch_of(action) % (of_each or 1000)
            box(drawing, LEFT + (begin - since) * unit, y, (min(end, until) - begin) * unit - 1, LANE,
                color_of(action), str(label))
    return top + len(schedule["actions"]) * (LANE + GAP)


def title_of(schedule, until):
    name = NAMES[schedule["name"]].format(**schedule)
    more = f"; it takes {schedule['makespan']:g}" if schedule["makespan"] > until else ""
    return f"{name}. Bubble {schedule['bubble']:.3g}{more}"


def axis(drawing, y, unit, until, step=10, since=0):
    """Units of time below the lanes."""
    drawing.line((LEFT, y), (LEFT + (until - since) * unit, y), quiet=True, width=1.5)
    for time in range(-(-since // step) * step, int(until) + 1, step):
        x = LEFT + (time - since) * unit
        drawing.line((x, y), (x, y + 6), quiet=True, width=1.5)
        drawing.text(x, y + 28, str(time), SMALLEST, "start" if time == 0 else "middle", "muted")


def legend(drawing, y, second, split, unit="F = B = W = 1"):
    """Colors, in rows; second: what the lighter ones are, if there are any."""
    entries = [(FORWARD, "forward"), (BACKWARD, "backward"), (WEIGHTS, "of weights alone, W")]
    x = MARGIN
    for color, name in entries[:3 if split else 2]:
        box(drawing, x, y, 20, 20, color)
        drawing.text(x + 28, y + 17, name, SMALLEST)
        x += 52 + schematic.text_width(name, SMALLEST)
    if second:
        lighter = [color for color, _ in entries[:3 if split else 2]]
        for i, color in enumerate(lighter):
            box(drawing, MARGIN + 24 * i, y + 30, 20, 20, tint(color))
        drawing.text(MARGIN + 24 * len(lighter) + 4, y + 47, second, SMALLEST)
    drawing.text(WIDTH - MARGIN, y + (47 if second else 17), unit, SMALLEST, "end", "muted")


def draw(schedules, title, second="", until=None):
    """All of them below each other, up to a time; by default the longest but `naive` fills the width."""
    until = until or max(own["makespan"] for own in schedules if own["name"] != "naive")
    unit = (WIDTH - MARGIN - LEFT) / until
    height = sum(TITLE + own["ranks"] * (LANE + GAP) for own in schedules) + 134
    drawing = schematic.Drawing(height, title, "; ".join(
        f"{own['name']}: {own['makespan']:g} units, bubble {own['bubble']:.3g}" for own in schedules))
    y = 0
    for own in schedules:
        drawing.text(MARGIN, y + 34, title_of(own, until), bold=True)
        y = lanes(drawing, y + TITLE, own, unit, until)
    axis(drawing, y + 4, unit, until)
    split = any(action[0] in "W" for own in schedules for of_rank in own["actions"]
                for action, _, _ in of_rank)
    legend(drawing, y + 56, second, split)
    return drawing.svg()


def draw_halves(own, title, second):
    """A long schedule with micro-batches from both ends, its second half below the first."""
    half = -(-own["makespan"] // 2)
    unit, of_half = (WIDTH - MARGIN - LEFT) / half, own["ranks"] * (LANE + GAP) + AXIS
    drawing = schematic.Drawing(TITLE + 2 * of_half + 88, title,
                                f"{own['name']}: {own['makespan']:g} units, bubble {own['bubble']:.3g}")
    drawing.text(MARGIN, 34, title_of(own, own["makespan"]), bold=True)
    for part in range(2):
        since, until = part * half, min((part + 1) * half, own["makespan"])
        y = lanes(drawing, TITLE + part * of_half, own, unit, until, own["micro_batches"] // 2, since)
        axis(drawing, y + 4, unit, until, since=since)
    legend(drawing, y + AXIS + 6, second, split=True)
    return drawing.svg()


def figures(record):
    """{file: text} of the figures."""
    drawn = record["drawn"]
    both = [own for own in drawn if own["name"] == "dualpipe"]
    two = [own for own in drawn if own["name"] in TWO_STAGES]
    return {"schedules.svg": draw([own for own in drawn if own not in [*both, *two]],
                                  "Schedules on one time axis"),
            "stages_in_turn.svg": draw(two, "The first part of schedules with two stages on a rank",
                                       "the rank's second stage", until=BEGIN),
            "dualpipe.svg": draw_halves(both[0], "DualPipe", "enter at the last rank; counted from 0 anew")}
