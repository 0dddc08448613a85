"""A layer under every dimension: what a rank computes, of which shapes, and the messages between.

All of it is read from layer.txt, which --mesh_show shapes has printed.
"""
import re
from pathlib import Path

from tools.base import BookError
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

FOLDER = Path(__file__).resolve().parent
# Of a message's group, the kind of its box, and which dimension it belongs to.
GROUPS = {"pp": ("optimizer", "pipeline"), "dp_cp": ("gather", "ZeRO-3"), "edp": ("gather", "ZeRO-3"),
          "tp": ("tp", "tensor"), "cp_ring": ("message", "context"), "ep": ("backward", "experts")}
ROW, BAR, GAP, TEXT = 30, 36, 8, 20
SHAPE_END, AXES = 530, 550  # of a row: where its shape ends, where its axes begin


def cells(line, starts):
    """The cells of a row of a table whose columns begin there."""
    return [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None])]


def points(text):
    """The forward rows: {"operation", "weight", "here", "axes", "terms"}, axes without those of the terms."""
    lines = text.splitlines()
    head = next(at for at, line in enumerate(lines) if "on this rank" in line)
    starts = [0, *(lines[head].index(name) for name in ("weight", "on this rank", "on all", "tokens", "features", "terms"))]
    found = []
    for line in lines[head + 2:]:
        if line.startswith("tokens, features"):
            break
        operation, weight, here, _, tokens, features, terms = cells(line, starts)
        found.append({"operation": operation, "weight": weight, "here": here,
                      "axes": [*tokens.split(), *features.split()], "terms": terms.split()})
    return found


def group_of(point):
    """Of a message its group, None for what is computed."""
    message = re.fullmatch(r"\w+ over (\w+)", point["operation"])
    return message[1] if message else None


def shown(all_points):
    """The points but those that change no shape beside a neighbor: sums, and further steps of the same size. A send
    and the receive that goes with it are one."""
    kept = []
    for point in all_points:
        before = kept[-1] if kept else None
        if before and group_of(point) is not None and group_of(point) == group_of(before) and \
                before["operation"].startswith("send") and point["operation"].startswith("recv"):
            kept[-1] = {**point, "operation": f"send, recv over {group_of(point)}", "group": group_of(point)}
            continue
        same = before and (before["here"], before["axes"]) == (point["here"], point["axes"])
        if same and group_of(point) is None and not point["weight"]:
            continue
        kept.append({**point, "group": group_of(point)})
    return kept


def label(point):
    """A weight with its shape, which names the operation, or else the operation."""
    return point["weight"] or point["operation"].replace("_forward", "")


def cut(point):
    """Axes whose ranks have other parts, "+" before those that have other terms of a sum."""
    return " ".join([*point["axes"], *(f"+{axis}" for axis in point["terms"])])


def draw(text):
    """The drawing of what layer.txt has."""
    drawn = shown(points(text))
    if not drawn or any(point["group"] not in (None, *GROUPS) for point in drawn):
        raise BookError("layer.txt has no layer, or messages of a group that has no color")
    messages = [point for point in drawn if point["group"]]
    height = 96 + sum(BAR + GAP if point["group"] else ROW for point in drawn) + 2 * GAP * len(messages) + 64
    ranks = re.search(r"a layer on (.*)", text)[1]
    drawing = schematic.Drawing(height, f"A layer on {ranks}", (
        "From top to bottom what a rank computes forward, with the shape that it has and the axes whose ranks have other "
        "parts; in color its messages: " + "; ".join(f"{point['operation']} {point['here']}" for point in messages) + "."))
    drawing.text(MARGIN, 32, ranks, bold=True)
    drawing.text(MARGIN + 10, 66, "weight, or what is computed", TEXT, ink="muted")
    drawing.text(SHAPE_END, 66, "on this rank", TEXT, "end", "muted")
    drawing.text(AXES, 66, "cut over", TEXT, ink="muted")
    y = 80
    at = 0
    while at < len(drawn):
        if drawn[at]["group"]:
            point = drawn[at]
            kind, _ = GROUPS[point["group"]]
            drawing.box(MARGIN, y, WIDTH - 2 * MARGIN, BAR, kind, f"{point['operation']}  {point['here'].replace('->', '→')}", TEXT)
            y, at = y + BAR + GAP, at + 1
            continue
        stretch = []
        while at < len(drawn) and not drawn[at]["group"]:
            stretch.append(drawn[at])
            at += 1
        drawing.box(MARGIN, y, WIDTH - 2 * MARGIN, ROW * len(stretch) + GAP, "plain")
        for number, point in enumerate(stretch):
            line = y + 26 + number * ROW
            drawing.text(MARGIN + 10, line, label(point), TEXT)
            drawing.text(SHAPE_END, line, point["here"], TEXT, "end")
            drawing.text(AXES, line, cut(point), TEXT)
        y += ROW * len(stretch) + 2 * GAP
    bottom = drawing.legend(y + 8, dict(GROUPS[point["group"]] for point in messages))
    drawing.height = bottom + 4
    return drawing.svg()


def layer():
    """The layer of layer.txt."""
    return draw((FOLDER / "layer.txt").read_text(encoding="utf-8"))


FIGURES = {"layer.svg": layer}
