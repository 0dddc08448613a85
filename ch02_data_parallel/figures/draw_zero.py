"""Schematics of ZeRO: who holds what in stages 0 to 3, and what a step sends."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

RANKS = 3
STAGES = ("no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# (what, bytes of a parameter in bf16 with gradients in f32, the stage that shards it)
STATES = (("weights", 2, 3), ("gradients", 4, 2), ("states", 12, 1))
LABELS = {"weights": "weights", "gradients": "gradients", "states": "optimizer"}


def bytes_per_parameter(stage, ranks):
    """What a rank holds, of whole parameters and of its share of the others."""
    return sum(size / (ranks if stage >= since else 1) for _, size, since in STATES)


def formula(stage):
    """2 + (4 + 12)/dp"""
    whole = [str(size) for _, size, since in STATES if stage < since]
    shared = [str(size) for _, size, since in STATES if stage >= since]
    if not shared:
        return " + ".join(whole)
    inside = shared[0] if len(shared) == 1 else f"({' + '.join(shared)})"
    return " + ".join([*whole, f"{inside}/dp"])


def zero_shards():
    """A bar for every rank and stage: full where a rank holds a part, dashed where others do."""
    unit, first, pitch = 9, 144, 184
    drawing = schematic.Drawing(560, "Who holds what under ZeRO",
                                "Bytes of a parameter that a rank holds: " + "; ".join(
                                    f"{name}: {formula(stage)}"
                                    for stage, name in enumerate(STAGES)))
    drawing.text(MARGIN, 38, f"dp = {RANKS}")
    for rank in range(RANKS):
        drawing.text(first + rank * pitch + 82, 38, f"rank {rank}", anchor="middle", bold=True)
    for stage, name in enumerate(STAGES):
        y = 58 + stage * 112
        drawing.text(MARGIN, y + 34, name, bold=True)
        for rank in range(RANKS):
            x = first + rank * pitch
            for kind, size, since in STATES:
                width = size * unit
                if stage < since:
                    drawing.box(x, y, width, 52, kind)
                else:
                    drawing.box(x, y, width, 52, "ghost")
                    drawing.box(x + rank * width / RANKS, y, width / RANKS, 52, kind)
                x += width + 1.5
        held = bytes_per_parameter(stage, RANKS)
        drawing.text(first, y + 80, f"bytes per parameter: {formula(stage)} = {held:.3g}", 20)
    below = drawing.legend(58 + len(STAGES) * 112 + 2, {kind: LABELS[kind] for kind, *_ in STATES}
                           | {"ghost": "on other ranks"})
    assert below <= drawing.height
    return drawing.svg()


UNITS = 3  # of parameters, in the drawing of a step
# (what a rank keeps only a shard of, elements that a rank sends in a step)
STEPS = (("ZeRO-1: optimizer states sharded", "2 Ψ"), ("ZeRO-2: gradients freed, too", "2 Ψ"),
         ("ZeRO-3: weights freed, too", "3 Ψ"))
FORWARD, BACKWARD, MESSAGE = 56, 80, 40  # widths, of a unit


def zero_steps():
    """A step of each stage: what is computed, and below it what travels."""
    drawing = schematic.Drawing(640, "A step under ZeRO 1, 2 and 3",
                                "; ".join(f"{label}, {sent} elements sent by a rank"
                                          for label, sent in STEPS))
    begin = MARGIN + MESSAGE + 4
    back = begin + UNITS * FORWARD + 4  # where backward begins
    done = back + UNITS * BACKWARD
    for number, (label, sent) in enumerate(STEPS):
        stage, y = number + 1, 20 + number * 172
        drawing.text(MARGIN, y + 20, label, bold=True)
        drawing.text(WIDTH - MARGIN, y + 20, f"sends {sent}", anchor="end", bold=True)

        def message(x, kind, unit, top=y + 92):
            drawing.box(x, top, MESSAGE - 2, 36, kind, str(unit), 20)

        reduced = y + (134 if stage == 3 else 92)  # where both travel there are two lanes

        for unit in range(UNITS):
            x = begin + unit * FORWARD
            drawing.box(x, y + 36, FORWARD - 4, 46, "forward", str(unit))
            if stage == 3:  # one unit ahead; the last is still there when backward begins
                message(x - MESSAGE if unit == 0 else x - FORWARD + 8, "gather", unit)
                if unit < UNITS - 1:
                    freed(drawing, x + FORWARD - 2, y + 59)
        for at, unit in enumerate(reversed(range(UNITS))):
            x = back + at * BACKWARD
            drawing.box(x, y + 36, BACKWARD - 4, 46, "backward", str(unit))
            message(x + BACKWARD, "message", unit, reduced)
            if stage >= 2:
                freed(drawing, x + BACKWARD + MESSAGE, reduced + 18)
            if stage == 3:
                freed(drawing, x + BACKWARD - 2, y + 59)
                if unit > 0:
                    message(x, "gather", unit - 1)
        drawing.box(done + MESSAGE + 4, y + 36, 48, 46, "optimizer")
        if stage < 3:
            for unit in range(UNITS):
                message(done + MESSAGE + 56 + unit * MESSAGE, "gather", unit)
    y = drawing.legend(562, {"forward": "forward", "backward": "backward", "optimizer": "update"})
    drawing.legend(y, {"message": "reduce-scatter", "gather": "all-gather"})
    freed(drawing, 444, y + 10)
    drawing.text(458, y + 17, "freed", 20)
    return drawing.svg()


def freed(drawing, x, y):
    """The mark of memory that is given back, as in the timelines."""
    drawing.line((x, y - 20), (x, y + 20), width=5)


FIGURES = {"zero_shards.svg": zero_shards, "zero_steps.svg": zero_steps}
