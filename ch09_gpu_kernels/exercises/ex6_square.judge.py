"""Judge of ch09.ex6: what attention with scores in memory asks for, and what attention without them does."""
import re

from tools.exercise import check, quantity
from tools.exercise.lab import NotYet

LENGTHS, WIDTH = (96, 192), 64
HEADS, BYTES, TILE = 2, 4, 32
KINDS = ("naive", "blockwise")
TOLERANCE = 0.02
LINE = re.compile(rf"({'|'.join(KINDS)}) ({'|'.join(map(str, LENGTHS))}): *(.+)")


def read(answer):
    """{(rung, length): bytes} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if not match:
            raise NotYet(f"this line has no rung, length and bytes: '{line.strip()}'",
                         "a line is such as: naive 96: 1 MB")
        found[match[1], int(match[2])] = quantity.parse(match[3], "bytes")
    return found


def judge(answer, lab):
    """Lines for right numbers; NotYet for the first that is wrong."""
    given = read(answer)
    wanted = [(kind, length) for kind in KINDS for length in reversed(LENGTHS)]
    for kind, length in wanted:
        if (kind, length) not in given:
            raise NotYet(f"a line is missing: {kind} {length}")
    rungs = {length: lab.kernels("ch09.attention", length, WIDTH) for length in LENGTHS}
    measured = {(kind, length): rungs[length][kind]["bytes"] for kind, length in wanted}
    for each in wanted:
        compare(each, given[each], measured)
    return [f"from {LENGTHS[0]} to {LENGTHS[1]} {kind} asks for "
            f"{measured[kind, LENGTHS[1]] / measured[kind, LENGTHS[0]]:.2f} times the bytes" for kind in KINDS]


def compare(each, given, measured):
    """NotYet unless the number is that of this rung and length."""
    try:
        check.compare_number(given, measured[each], "bytes", TOLERANCE, suspects(each, measured))
    except NotYet as wrong:
        kind, length = each
        raise NotYet(wrong.lines[0], f"{kind} {length}: {wrong.lines[1]}") from None


def suspects(each, measured):
    """[(a wrong answer, its words)]"""
    kind, length = each
    scores, down = length * length * BYTES, length // TILE

    def of(passes, pieces):
        return HEADS * (passes * scores + pieces * TILE * WIDTH * BYTES)

    common = [(measured[each] / HEADS, "this is one head"),
              (measured[each] / BYTES, "these are numbers: one of f32 has 4 bytes")]
    if length == LENGTHS[1]:
        common += [(4 * measured[kind, LENGTHS[0]],
                    "four times the bytes of half the length: but outputs, and the queries that are read once, only "
                    "double"),
                   (2 * measured[kind, LENGTHS[0]], "twice the bytes of half the length: but every query meets "
                                                    "every key")]
    if kind == "naive":
        return [(of(5, 2 * down * down + 2 * down), "naive reads the queries of each tile anew"),
                (of(5, 3 * down * down), "the outputs are written, too"),
                (of(2, 3 * down * down + down), "scores are written once and read twice, weights written and read"),
                (of(3, 3 * down * down + down), "these are the passes of scores: weights are written and read, too"),
                *common]
    return [(of(0, 4 * down), "each matrix once is what a cache without end would leave: each block of queries reads "
                              "all keys and values"),
            (of(5, 2 * down * down + 2 * down), "blockwise has no scores in memory"),
            (of(0, 3 * down * down + down), "a block of blockwise reads its queries once"),
            (of(0, 2 * down * down + down), "queries are read and outputs are written: one piece for each block, "
                                            "both times"),
            (of(0, 2 * down * down), "queries and outputs pass, too: once for each block"),
            *common]
