"""Judge of ch05.ex2: the chapter's program checks the reader's table, and lays it out in time."""
from tools.exercise import schedule_tables
from tools.exercise.lab import NotYet

RANKS, CHUNKS, MICRO_BATCHES = 3, 2, 3


def judge(answer, lab):
    """Lines for a table that runs, with little memory and a short step; NotYet for another one."""
    found = schedule_tables.written(lab, answer, RANKS, MICRO_BATCHES, CHUNKS)
    best = schedule_tables.named(lab, "interleaved", RANKS, MICRO_BATCHES, pp_chunks=CHUNKS)
    rows = [f"a step takes {found.length:g}, that of --pp_schedule interleaved {best.length:g}",
            f"chunks in flight, by rank: {counts(found)}, of interleaved {counts(best)}"]
    if found.length > best.length:
        rank = max(range(RANKS), key=lambda rank: waiting(found, rank))
        raise NotYet("the ranks no longer wait for ever, but too long: the pipeline does not "
                     "overlap as it could", f"rank {rank} waits longest, first for "
                     f"{found.gaps(rank)[0][2]}", *rows)
    for rank in reversed(range(RANKS)):
        if found.in_flight[rank] > best.in_flight[rank]:
            ahead = next(i for i, name in enumerate(found.order(rank)) if name[0] != "F")
            raise NotYet(f"it runs, but rank {rank} holds {found.in_flight[rank]} chunks where "
                         f"{best.in_flight[rank]} suffice: {ahead} forward passes come before its "
                         "first backward", *rows)
    return rows


def counts(schedule):
    return " ".join(map(str, schedule.in_flight))


def waiting(schedule, rank):
    """How long a rank waits between its first and its last action."""
    return sum(end - begin for begin, end, _ in schedule.gaps(rank))
