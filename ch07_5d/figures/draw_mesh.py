"""Schematics of a mesh: sixteen ranks on two nodes, and what the ranks of a stage hold.

Which ranks lie where is computed here as MeshSizes does: coordinates().
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

SIZES = {"pp": 2, "dp": 2, "cp": 2, "tp": 2}
ORDER = ("pp", "dp", "cp", "tp")  # from the slowest axis to the fastest
RANKS, NODE = 16, 8
STAGE = 8      # ranks that work on the same layers
EP, HERE = 2, 2  # ranks among which the experts of a layer lie, and how many on each
TINTS = ("forward", "optimizer", "backward", "message")


def coordinates(rank, order=ORDER):
    """{axis: where the rank lies on it}"""
    at = {}
    for axis in reversed(order):
        rank, at[axis] = divmod(rank, SIZES[axis])
    return at


def members(axis, rank, order=ORDER):
    """The ranks that differ from this one on that axis alone."""
    own = {**coordinates(rank, order), axis: None}
    return [other for other in range(RANKS)
            if {**coordinates(other, order), axis: None} == own]


def mesh():
    """Sixteen ranks on two nodes, and rank 0's group along each axis."""
    groups = {axis: members(axis, 0) for axis in reversed(ORDER)}
    drawing = schematic.Drawing(470, "A mesh of 2 x 2 x 2 x 2 ranks", (
        f"Nodes of {NODE} ranks. " + "; ".join(
            f"rank 0 and rank {ranks[1]} share {axis}" for axis, ranks in groups.items())))
    column = (WIDTH - 2 * MARGIN - 40) / 4
    places = {}
    for node in range(RANKS // NODE):
        top = 12 + node * 196
        drawing.box(MARGIN, top, WIDTH - 2 * MARGIN, 184, "ghost")
        drawing.text(MARGIN + 14, top + 30, f"node {node}: pp {node}, rows: dp 0 and dp 1", bold=True)
        for place in range(NODE):
            rank = node * NODE + place
            at = coordinates(rank)
            x = MARGIN + 20 + (2 * at["cp"] + at["tp"]) * column
            y = top + 44 + at["dp"] * 68
            kind = "forward" if rank == 0 else "tp" if rank in sum(groups.values(), []) else "plain"
            drawing.box(x, y, column - 14, 56, kind, f"rank {rank}\ncp {at['cp']} tp {at['tp']}", 20)
            places[rank] = (x, y)
    drawing.text(MARGIN, 434, "Light blue, beside rank 0: " + ", ".join(
        f"{ranks[1]} in {axis}" for axis, ranks in groups.items()) + ".", 20)
    drawing.text(MARGIN, 460, "tp, which sends most, lies within a node; pp crosses.", 20)
    return drawing.svg()


def weight():
    """What the ranks of stage 0 hold of three weights."""
    column = (WIDTH - 2 * MARGIN) / STAGE
    drawing = schematic.Drawing(470, "Who holds what", (
        "Of eight ranks, those with one tp hold one half of q_proj; all of them hold the norm; "
        f"{EP} neighbors of dp, cp and tp hold all experts between them."))

    def row(top, title, labels, kinds, below):
        drawing.text(MARGIN, top, title, bold=True)
        for rank, (label, kind) in enumerate(zip(labels, kinds)):
            drawing.box(MARGIN + rank * column, top + 12, column - 5, 48, kind, label, 20)
        drawing.text(MARGIN, top + 86, below, 20, ink="muted")

    for rank in range(STAGE):
        drawing.text(MARGIN + rank * column + column / 2 - 2, 32, f"rank {rank}", 20, "middle")
    tp = [coordinates(rank)["tp"] for rank in range(STAGE)]
    row(72, "q_proj", [f"half {t}" for t in tp], [TINTS[t] for t in tp],
        "sharded over tp, copied and summed over dp_cp")
    row(202, "input_layernorm", ["whole"] * STAGE, [TINTS[0]] * STAGE,
        "copied over all; summed over dp_cp, then over tp")
    row(332, "experts", [f"E{rank % EP * HERE}, E{rank % EP * HERE + 1}" for rank in range(STAGE)],
        [TINTS[2 + rank % EP] for rank in range(STAGE)],
        "sharded over ep, copied and summed over edp")
    drawing.text(MARGIN, 460, "The same color: the same elements, which have to stay equal.", 20)
    return drawing.svg()


FIGURES = {"mesh.svg": mesh, "weight.svg": weight}
