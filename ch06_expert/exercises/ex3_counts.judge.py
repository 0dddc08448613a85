"""Judge of ch06.ex3: when what begins, with counts on the rows' group and on one of their own."""
import re

from tools.exercise.lab import NotYet

ROUTE, COUNTS, PERMUTE, EXPERTS, ROWS = 2, 1, 1, 5, 8
NAMES = ("counts of b", "permute b", "rows of b", "experts of a", "outputs of a")
CASES = {"one group": True, "own group": False}
LINE = re.compile(r"(one group|own group): ([a-z ]+?) +(\S+)")


def times(shared):
    """{what: when it begins}; `shared`: counts travel on the group of the rows."""
    rows_free = ROWS  # when the group of the rows has carried those of a
    counts = max(ROUTE, rows_free) if shared else ROUTE
    if shared:
        rows_free = counts + COUNTS
    permute = counts + COUNTS
    rows = max(permute + PERMUTE, rows_free)
    experts = max(permute + PERMUTE, ROWS)
    return dict(zip(NAMES, (counts, permute, rows, experts, max(experts + EXPERTS, rows + ROWS))))


def read(answer):
    """{(case, what): ms} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if not match or match[2] not in NAMES:
            raise NotYet(f"this line is no time of the table: '{line.strip()}'",
                         "a line is such as: own group: permute b 3")
        try:
            found[match[1], match[2]] = float(match[3])
        except ValueError:
            raise NotYet(f"'{match[3]}' is no number of ms", line.strip())
    return found


def judge(answer, _lab):
    """Lines for a right table; NotYet for the first time that is wrong."""
    found = read(answer)
    for case, shared in CASES.items():
        wanted = times(shared)
        for name in NAMES:
            if (case, name) not in found:
                raise NotYet(f"a line is missing: {case}: {name}")
            own = found[case, name]
            if own != wanted[name]:
                raise NotYet(words(name, shared, own, found, case),
                             f"{case}: {name} does not begin at {own:g}")
    one, own = (times(shared) for shared in (True, False))
    return [f"on a group of their own, counts let everything after them begin "
            f"{one['rows of b'] - own['rows of b']} ms sooner",
            f"the rank waits {one['permute b'] - ROUTE} ms for counts on one group, "
            f"{own['permute b'] - ROUTE} ms on two"]


def words(name, shared, own, found, case):
    """What to say of a time that is wrong; those of the lines above it are right."""
    if name == "counts of b":
        if shared:
            return ("the rows of a are on their way on this group: what is posted later arrives later"
                    if own < ROWS else "only the rows of a are ahead of the counts")
        return ("no message is ahead of the counts on a group of their own" if own > ROUTE else
                "the counts are known when b is routed, not sooner")
    permuted = found[case, "permute b"] + PERMUTE if name != "permute b" else 0
    if name == "permute b":
        return ("without the counts nobody knows how large the buffers are: permuting waits for them"
                if own < times(shared)["permute b"] else "the counts take 1 ms")
    if name == "rows of b":
        if own < permuted:
            return "rows of b are there to be sent when b is permuted, not sooner"
        return ("the rows of b share a group with those of a, which are still on their way"
                if own < times(shared)[name] else "nothing is ahead of the rows of b any more")
    if name == "experts of a":
        if own < ROWS:
            return "the experts of a wait for the rows of a"
        return ("the rank computes one thing at a time: b is permuted first"
                if own < times(shared)[name] else
                "the experts of a need their rows and the rank, not the rows of b")
    return ("the outputs of a travel on the group of the rows: those of b are ahead"
            if own < times(shared)[name] else
            "the outputs of a wait for their experts and for the rows of b, for nothing else")
