"""Schematics of a mixture of experts: the way of a token, the groups of ranks that hold experts, and
experts on a mesh of their own.

Which ranks form a group is computed here as Mesh does: groups_of().
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

# The way of a token: ranks, experts on each, and the scores that the router gives them.
WAY_RANKS, HERE = 2, 2
SCORES = (0.10, 0.55, 0.05, 0.30)
CHOICES = 2
# The meshes.
RANKS = 8
COLUMN = (WIDTH - 2 * MARGIN) / RANKS
OWN = ("forward", "optimizer", "backward", "message")  # colours of the shares of the experts


def chosen():
    """The experts of the highest scores, by number."""
    best = sorted(range(len(SCORES)), key=lambda expert: (-SCORES[expert], expert))[:CHOICES]
    return sorted(best)


def groups_of(ep, size=1):
    """(groups ep, groups edp) of RANKS ranks; of so many neighbors the experts' mesh sees one."""
    units = range(RANKS // size)
    return ([[unit for unit in units if unit // ep == first] for first in range(len(units) // ep)],
            [[unit for unit in units if unit % ep == place] for place in range(ep)])


def way():
    """One token on two ranks: router, dispatch, experts, combine."""
    picked = chosen()
    result = " + ".join(f"{SCORES[expert]:.2f} E{expert}(x)" for expert in picked)
    drawing = schematic.Drawing(576, "The way of a token", (
        f"Rank 0 has token x. Its router scores experts 0 to {len(SCORES) - 1} and chooses "
        f"{' and '.join(map(str, picked))}. Dispatch brings x to each of them, on whichever rank. "
        f"The experts compute. Combine brings the outputs back: y = x + {result}."))
    half, width = (WIDTH - 2 * MARGIN) / 2, 148
    for rank in range(WAY_RANKS):
        left = MARGIN + rank * half
        drawing.box(left, 10, half - 12, 556, "ghost")
        drawing.text(left + 14, 38, f"rank {rank}", bold=True)
    middle = MARGIN + (half - 12) / 2
    # The token, and what its router says.
    drawing.box(middle - 45, 50, 90, 40, "optimizer", "x", bold=True)
    drawing.arrow((middle, 92), (middle, 112))
    drawing.box(MARGIN + 24, 114, half - 60, 42, "gather", "router", bold=True)
    cell = (half - 60) / len(SCORES)
    for expert, score in enumerate(SCORES):
        x = MARGIN + 24 + expert * cell
        drawing.box(x, 162, cell - 4, 54, "gather" if expert in picked else "plain",
                    f"E{expert}\n{score:.2f}", 20)
    # Other tokens are on their way, too.
    other = MARGIN + half
    drawing.box(other + (half - 12) / 2 - 45, 50, 90, 40, "ghost", "others", 20)
    drawing.text(other + (half - 12) / 2, 142, "the same, for its", 20, "middle", "muted")
    drawing.text(other + (half - 12) / 2, 168, "own tokens", 20, "middle", "muted")
    # The experts, and what comes to them.
    top = 324
    places = {}
    for expert in range(len(SCORES)):
        rank, place = divmod(expert, HERE)
        x = MARGIN + rank * half + 10 + place * (width + 16)
        places[expert] = x + width / 2
        drawing.box(x, top, width, 66, "forward" if expert in picked else "plain",
                    f"expert {expert}", bold=expert in picked)
    for expert in picked:
        x = places[expert]
        start = MARGIN + 24 + expert * cell + cell / 2
        drawing.arrow((start, 218), (x, top - 32), strong=expert >= HERE)
        drawing.box(x - 26, top - 32, 52, 30, "optimizer", "x", 20)  # in the colour of rank 0, whose token it is
        drawing.box(x - 40, top + 70, 80, 32, "optimizer", f"E{expert}(x)", 20)
        drawing.arrow((x, top + 104), (middle + 30 * (1 if expert >= HERE else -0.2), 490),
                      strong=expert >= HERE)
    drawing.text(WIDTH - MARGIN - 24, 250, "dispatch:", 22, "end", bold=True)
    drawing.text(WIDTH - MARGIN - 24, 278, "all-to-all", 22, "end")
    drawing.text(WIDTH - MARGIN - 24, 470, "combine:", 22, "end", bold=True)
    drawing.text(WIDTH - MARGIN - 24, 498, "all-to-all", 22, "end")
    drawing.box(MARGIN + 10, 492, half - 32, 60, "optimizer", f"y = x + {SCORES[picked[0]]:.2f} "
                f"E{picked[0]}(x)\n+ {SCORES[picked[1]]:.2f} E{picked[1]}(x)", 20)
    return drawing.svg()


def row_of(drawing, top, labels, kinds, size=1, height=62):
    """Boxes for the ranks, or one for so many neighbors."""
    for place, (label, kind) in enumerate(zip(labels, kinds)):
        drawing.box(MARGIN + place * size * COLUMN, top, size * COLUMN - 5, height, kind, label, 20)


def bracket(drawing, top, first, last, label, size=1):
    """A line under the ranks of a group, and its name."""
    left, right = MARGIN + first * size * COLUMN, MARGIN + (last + 1) * size * COLUMN - 5
    drawing.line((left + 3, top), (left + 3, top + 9), (right - 3, top + 9), (right - 3, top), width=2)
    drawing.text((left + right) / 2, top + 32, label, 20, "middle")


def across(drawing, y, ranks):
    """A red line under ranks of a group that are not neighbors, with a tick at each."""
    xs = [MARGIN + rank * COLUMN + COLUMN / 2 - 2 for rank in ranks]
    drawing.line((xs[0], y - 8), (xs[0], y), (xs[-1], y), (xs[-1], y - 8), strong=True, width=2)
    for x in xs[1:-1]:
        drawing.line((x, y - 8), (x, y), strong=True, width=2)


def experts_at(place, ep, experts):
    """Those of a place of the group, such as "E2, E3"."""
    here = experts // ep
    return ", ".join(f"E{place * here + i}" for i in range(here))


def ranks_head(drawing, top):
    for rank in range(RANKS):
        drawing.text(MARGIN + rank * COLUMN + COLUMN / 2 - 2, top, f"rank {rank}", 20, "middle")


def groups():
    """Groups ep and edp of 8 ranks with 8 experts, ep = 4."""
    ep, experts = 4, 8
    inner, outer = groups_of(ep)
    drawing = schematic.Drawing(300, "Groups ep and edp", "; ".join(
        [f"ranks {', '.join(map(str, ranks))} hold the {experts} experts" for ranks in inner]
        + [f"ranks {' and '.join(map(str, ranks))} hold experts {experts_at(place, ep, experts)}"
           for place, ranks in enumerate(outer)]))
    ranks_head(drawing, 32)
    row_of(drawing, 44, [experts_at(rank % ep, ep, experts) for rank in range(RANKS)],
           [OWN[rank % ep] for rank in range(RANKS)])
    for ranks in inner:
        bracket(drawing, 114, ranks[0], ranks[-1], "ep: tokens travel")
    for place, ranks in enumerate(outer):
        across(drawing, 170 + place * 26, ranks)
    drawing.text(MARGIN, 286, "edp, in red: copies of the same experts sum gradients.", 20)
    return drawing.svg()


def folding():
    """The same 8 ranks for attention, and for experts in two ways."""
    tp = 2
    dp = RANKS // tp
    drawing = schematic.Drawing(552, "Attention and experts on meshes of their own", (
        f"Attention: dp = {dp}, tp = {tp}. Experts: ep = {RANKS} over dp and tp, whole experts; or, "
        f"with --expert_tp, ep = {dp} over dp, where each expert lies in {tp} parts on the ranks of "
        "tp."))
    ranks_head(drawing, 32)
    drawing.text(MARGIN, 66, f"Attention: dp = {dp}, tp = {tp}", bold=True)
    row_of(drawing, 80, [f"dp {rank // tp}\ntp {rank % tp}" for rank in range(RANKS)],
           [("tp", "tp_gather")[rank % tp] for rank in range(RANKS)])
    drawing.text(MARGIN, 186, f"Experts: ep = {RANKS}, over dp and tp", bold=True)
    row_of(drawing, 200, [f"whole\n{experts_at(rank, RANKS, RANKS)}" for rank in range(RANKS)],
           [OWN[rank // 2] for rank in range(RANKS)])
    bracket(drawing, 270, 0, RANKS - 1, "ep: each rank's own tokens travel")
    drawing.text(MARGIN, 344, f"Experts with --expert_tp: ep = {dp}, over dp", bold=True)
    row_of(drawing, 358, [f"half of\n{experts_at(rank // tp, dp, RANKS)}" for rank in range(RANKS)],
           [OWN[rank // 2] for rank in range(RANKS)])
    for place in range(dp):
        bracket(drawing, 428, place * tp, place * tp + tp - 1, "tp")
    for place in range(tp):
        across(drawing, 484 + place * 22, range(place, RANKS, tp))
    drawing.text(MARGIN, 536, "Red: ep. Ranks of tp have the same tokens, add up halves.", 20)
    return drawing.svg()


FIGURES = {"way.svg": way, "groups.svg": groups, "folding.svg": folding}
