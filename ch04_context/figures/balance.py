"""How evenly layouts divide the cells of the mask, counted: whole samples, and documents."""
from . import runs
from .draw_masks import begins, positions

TOKENS, RANKS = 4096, (2, 4, 8, 16)
LAYOUTS = {"contiguous": "contiguous", "zigzag": "zig-zag", "striped": "striped"}
MIXES = {"one document": (4096,), "4 equal": (1024,) * 4, "16 equal": (256,) * 16,
         "one long, then short": (2048,) + (256,) * 8,
         "short, then one long": (256,) * 8 + (2048,),
         "3,000 and shorter": (3000, 500, 300, 200, 96)}
MIXED_RANKS = 4


def work(layout, ranks, lengths=(TOKENS,)):
    """Cells of each rank: a query sees the keys of its document up to itself."""
    starts = begins(lengths)
    return [sum(position - starts[position] + 1
                for position in positions(layout, rank, TOKENS, ranks)) for rank in range(ranks)]


def uneven(counts):
    """The most of a rank, in means: 1 is even, and the slowest rank decides a step's time."""
    return max(counts) * len(counts) / sum(counts)


def blocks(layout, ranks, lengths):
    """Of a ring's blocks, those in which a query sees a key: the others are skipped."""
    starts = begins(lengths)
    held = [positions(layout, rank, TOKENS, ranks) for rank in range(ranks)]
    seen = 0
    for queries in held:
        # The keys that a query sees are a stretch that ends at it.
        reached = set()
        for query in queries:
            reached.update(range(starts[query], query + 1))
        seen += sum(not reached.isdisjoint(keys) for keys in held)
    return seen


def work_table():
    """Cells of the first and the last rank, and how uneven they are, over cp."""
    rows = []
    for ranks in RANKS:
        contiguous = work("contiguous", ranks)
        rows.append([str(ranks), f"{contiguous[0]:,} to {contiguous[-1]:,}",
                     *(f"{uneven(work(layout, ranks)):.3f}" for layout in LAYOUTS)])
    return runs.table(["`cp`", "contiguous, first to last rank",
                       *(f"{name}: most / mean" for name in LAYOUTS.values())], rows,
                      f"Cells of the causal mask of {TOKENS:,} tokens, counted.")


def documents_table():
    """The same where the mask ends at documents."""
    rows = []
    for name, lengths in MIXES.items():
        assert sum(lengths) == TOKENS
        rows.append([name, *(f"{uneven(work(layout, MIXED_RANKS, lengths)):.2f}"
                             for layout in LAYOUTS),
                     *(f"{blocks(layout, MIXED_RANKS, lengths)} of {MIXED_RANKS**2}"
                       for layout in ("contiguous", "zigzag"))])
    return runs.table([f"{TOKENS:,} tokens on {MIXED_RANKS} ranks",
                       *(f"{name}: most / mean" for name in LAYOUTS.values()),
                       "blocks, contiguous", "blocks, zig-zag"], rows,
                      "Cells of a rank over their mean, and the ring's blocks that are not empty, "
                      "counted.")
