"""Schematics of rows on their way: what computes meanwhile, and which way they take to another node.

What crosses nodes in the drawing is counted as the code does: copies().
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

LANE, STEP, WAY = 38, 42, 128
# (what it is, [(kind, label, width)] that a rank computes, the same of what travels below it); a kind
# of None is a gap.
FORWARD = (
    ("Nothing else to do",
     (("forward", "attention, router", 190), ("wait", "", 130), ("forward", "experts", 130),
      ("wait", "", 130), ("forward", "sum", 80)),
     ((None, "", 190), ("message", "rows", 130), (None, "", 130), ("message", "outputs", 130))),
    ("Shared experts, while rows travel",
     (("forward", "attention, router", 190), ("forward", "shared", 100), ("wait", "", 30),
      ("forward", "experts", 130), ("wait", "", 130), ("forward", "sum", 80)),
     ((None, "", 190), ("message", "rows", 130), (None, "", 130), ("message", "outputs", 130))),
    ("Forward of micro-batch 1, backward of 0, in turns",
     (("forward", "attention 1", 140), ("backward", "experts 0", 130), ("forward", "experts 1", 130),
      ("backward", "attention 0", 140), ("forward", "sum 1", 80)),
     (("message", "grads 0", 130), (None, "", 10), ("message", "rows 1", 126), (None, "", 4),
      ("message", "grads 0", 126), (None, "", 4), ("message", "outputs 1", 130))))
# Two nodes of two ranks; a token of rank 0, its experts' ranks.
NODE_SIZE, NODES, HOME, CHOSEN = 2, 2, 0, (1, 2, 3)


def node_of(rank):
    return rank // NODE_SIZE


def copies(by_node):
    """[(from, to)] of one token's copies, each over one link: the way to its experts."""
    if not by_node:
        return [(HOME, rank) for rank in CHOSEN if rank != HOME]
    found = []
    for node in sorted({node_of(rank) for rank in CHOSEN}):
        first = node * NODE_SIZE + HOME % NODE_SIZE  # the rank there with the same place in its node
        if first != HOME:
            found.append((HOME, first))
        found += [(first, rank) for rank in CHOSEN if node_of(rank) == node and rank != first]
    return found


def crossing(ways):
    """Of these, those between nodes."""
    return [way for way in ways if node_of(way[0]) != node_of(way[1])]


def turns():
    """A layer forward, with nothing, shared experts and another micro-batch beside its messages."""
    drawing = schematic.Drawing(14 + WAY * len(FORWARD) + 42, "What computes while rows travel", "; ".join(
        f"{way}: {', '.join(label or 'waits' for _, label, _ in computed)}"
        for way, computed, _ in FORWARD))
    for number, (way, *lanes) in enumerate(FORWARD):
        top = 14 + number * WAY
        drawing.text(MARGIN, top + 22, way, bold=True)
        for row, boxes in enumerate(lanes):
            x = MARGIN
            for kind, label, width in boxes:
                if kind:
                    drawing.box(x, top + 34 + row * STEP, width - 4, LANE, kind, label, 20)
                x += width
    drawing.legend(14 + WAY * len(FORWARD) + 8, {"forward": "forward", "backward": "backward",
                                                 "message": "messages", "wait": "the rank waits"})
    return drawing.svg()


def ways():
    """A token on its way to three experts: a copy for each, or one for each node."""
    width, top, height = 136, 60, 88
    titles = {False: "direct: a copy for each expert", True: "by_node: a copy for each node"}
    drawing = schematic.Drawing(512, "Two ways to another node", "; ".join(
        f"{title}: {', '.join(f'rank {a} to rank {b}' for a, b in copies(by_node))}, "
        f"{len(crossing(copies(by_node)))} between nodes" for by_node, title in titles.items()))
    left = [MARGIN + rank * (width + 20) + 40 * node_of(rank) for rank in range(NODES * NODE_SIZE)]
    for number, (by_node, title) in enumerate(titles.items()):
        y = number * 250
        drawing.text(MARGIN, y + 30, f"{title}. Between nodes: {len(crossing(copies(by_node)))}",
                     bold=True)
        for node in range(NODES):
            first = left[node * NODE_SIZE]
            drawing.box(first - 12, y + top - 14, 2 * width + 44, height + 28, "ghost")
        for rank, x in enumerate(left):
            kind = "optimizer" if rank == HOME else "forward" if rank in CHOSEN else "plain"
            label = f"rank {rank}\ntoken" if rank == HOME else f"rank {rank}\nexpert"
            drawing.box(x, y + top, width, height, kind, label, 20)
        for place, (a, b) in enumerate(copies(by_node)):
            down = y + top + height + 22 + 22 * place
            start, end = (left[rank] + width / 2 for rank in (a, b))
            start += 14 * (place - 1) if a == HOME else 14
            strong = node_of(a) != node_of(b)
            drawing.arrow((start, y + top + height + 2), (start, down), (end, down),
                          (end, y + top + height + 2), strong=strong)
    drawing.text(MARGIN, 500, "Red: between nodes (dashed). Rails: ranks 0 and 2, 1 and 3.", 20)
    return drawing.svg()


FIGURES = {"turns.svg": turns, "ways_to_nodes.svg": ways}
