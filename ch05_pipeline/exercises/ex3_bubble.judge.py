"""Judge of ch05.ex3: the chapter's program checks the reader's table, and lays it out in time."""
from tools.exercise import schedule_tables
from tools.exercise.lab import NotYet

RANKS, MICRO_BATCHES = 4, 8
MOST = 4      # chunks in flight, on any rank
SHORTEST = 3 * MICRO_BATCHES + RANKS - 1  # the last rank begins when p - 1 forward passes are done


def judge(answer, lab):
    """Lines for a table whose step is as short as one can be; NotYet for another one."""
    found = schedule_tables.written(lab, answer, RANKS, MICRO_BATCHES)
    known = schedule_tables.named(lab, "1f1b", RANKS, MICRO_BATCHES)
    rows = [f"a step takes {found.length:g}, that of 1F1B {known.length:g}, and none less than "
            f"{SHORTEST}",
            f"micro-batches in flight, by rank: {' '.join(map(str, found.in_flight))}"]
    rank = max(range(RANKS), key=found.in_flight.__getitem__)
    if found.in_flight[rank] > MOST:
        raise NotYet(words_for_memory(found, rank), *rows)
    if found.length > SHORTEST:
        raise NotYet(words_for_time(found, known), *gap_lines(found), *rows)
    return rows


def words_for_memory(found, rank):
    """Why a rank holds too much."""
    order = found.order(rank)
    backward = next(i for i, name in enumerate(order) if name[0] == "B")
    held = f"rank {rank} holds {found.in_flight[rank]} micro-batches, and has room for {MOST}"
    if backward > MOST:
        return f"{held}: it runs {backward} forward passes before its first backward"
    return (f"{held}: each is held until its W has run, and too many of them wait before the next "
            "forward pass")


def words_for_time(found, known):
    """Why a step is too long."""
    orders = [found.order(rank) for rank in range(RANKS)]
    if any(name.startswith("BW") for order in orders for name in order):
        return ("a rank that runs BW hands its gradient on after the W in it, which nobody waits "
                "for: B alone goes first")
    if all(order[i + 1] == f"W{name[1:]}" for order in orders
           for i, name in enumerate(order) if name[0] == "B"):
        return ("gradients go back earlier, but each W still runs right behind its B: it may wait "
                "until its rank has nothing to do")
    if found.length >= known.length:
        return "the step is no shorter than that of 1F1B"
    return ("the step is shorter than that of 1F1B, but a rank still waits where it could run a W, "
            "or runs a W where others wait for its B")


def gap_lines(found):
    """For each rank, when it waits."""
    for rank in range(RANKS):
        gaps = found.gaps(rank)
        if gaps:
            waited = sum(end - begin for begin, end, _ in gaps)
            begin, end, name = gaps[0]
            yield (f"rank {rank} waits {waited:g} in all, first from {begin:g} to {end:g}, "
                   f"for {name}")
