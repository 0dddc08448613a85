"""Judge of ch07.ex8: is backward the transpose of forward? By two products on two ranks."""
import re

from tools.exercise.lab import NotYet


def all_gather(parts):
    return [parts[0] + parts[1]] * 2


def all_reduce(parts):
    return [[a + b for a, b in zip(*parts)]] * 2


def reduce_scatter(parts):
    total = all_reduce(parts)[0]
    return [total[:1], total[1:]]


def nothing(parts):
    return parts


def own_row(parts):
    return [parts[0][:1], parts[1][1:]]


SPLIT, SAME, TERMS = [[2], [3]], [[2, 3], [2, 3]], [[1, 4], [5, -2]]
GRADIENT, OF_ROWS = [[3, -1], [3, -1]], [[3], [-1]]
# (pair, forward, backward, x, dy, words for a first product that is wrong, and for a second one)
PAIRS = (
    ("1", all_gather, reduce_scatter, SPLIT, TERMS, "dy is another one on each rank, so both ranks' products are added",
     "each rank has a row of x, and a row of the summed gradient"),
    ("2", all_gather, own_row, SPLIT, TERMS, "dy is another one on each rank, so both ranks' products are added",
     "what the other rank has for a row is dropped, and not added"),
    ("3", nothing, all_reduce, SAME, TERMS, "dy is another one on each rank, so both ranks' products are added",
     "x and its gradient are the same on both ranks: the product counts once"),
    ("4", all_reduce, nothing, TERMS, GRADIENT, "the sum and dy are the same on both ranks: the product counts once",
     "x is another one on each rank, so both ranks' products are added"),
    ("5", all_reduce, all_reduce, TERMS, GRADIENT, "the sum and dy are the same on both ranks: the product counts once",
     "the all-reduce adds dy to itself, as both ranks have it"),
    ("6", reduce_scatter, all_gather, TERMS, OF_ROWS, "each rank has a row of the sum, and a row of dy",
     "x is another one on each rank, so both ranks' products are added"))
EDGES = (("f", "f*", "backward of f is an all-reduce: which edge's forward is one?"),
         ("g", "g*", "backward of g is a reduce-scatter: which edge's forward is one?"))


def product(one, other):
    """Over both ranks; where both factors are the same on them, it counts once."""
    of_ranks = [sum(a * b for a, b in zip(*pair)) for pair in zip(one, other)]
    is_same = one[0] == one[1] and other[0] == other[1]
    return of_ranks[0] if is_same else sum(of_ranks)


def read(answer):
    """{name: words} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([1-6]): (-?\d+) (-?\d+)|([fg]): ([fg]\*?)", line.strip())
        if not match:
            raise NotYet(f"this line has no products and names no edge: '{line.strip()}'",
                         "a line is such as: 1: 4 4, or: f: g")
        if match[1]:
            found[match[1]] = (int(match[2]), int(match[3]))
        else:
            found[match[4]] = match[5]
    return found


def judge(answer, lab):  # pylint: disable=unused-argument
    """Lines for a right table; NotYet for the first number or edge that is wrong."""
    found = read(answer)
    for name in [pair[0] for pair in PAIRS] + [edge[0] for edge in EDGES]:
        if name not in found:
            raise NotYet(f"a line is missing: {name}")
    for name, forward, backward, x, dy, *words in PAIRS:
        right = (product(forward(x), dy), product(x, backward(dy)))
        for got, wanted, side, why in zip(found[name], right, ("forward(x), dy", "x, backward(dy)"), words):
            if got != wanted:
                raise NotYet(why, f"pair {name}: <{side}> is not {got}")
    for name, other, why in EDGES:
        if found[name] != other:
            raise NotYet(why, f"{name}: not {found[name]}")
    return ["pairs 1, 3, 4 and 6 have equal products, 2 and 5 have not", "f* is the transpose of f, and g* of g"]
