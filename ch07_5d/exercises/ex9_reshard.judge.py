"""Judge of ch07.ex9: what a rank reads of a checkpoint that another layout has saved, by --mesh_show json of both."""
import itertools
import json
import math
import re
from collections import Counter

from tools.exercise.lab import NotYet
from tools.run import estimates

MODEL = {"num_layers": 4, "hidden_size": 24, "num_heads": 6, "num_kv_heads": 6, "ffn_hidden_size": 120,
         "vocab_size": 96}
OLD = {**MODEL, "tp_size": 2, "dp_size": 2, "pp_size": 2, "zero_stage": 1, "grad_acc_steps": 2, "mesh_show": "json"}
NEW = {**MODEL, "tp_size": 3, "dp_size": 4, "zero_stage": 1, "mesh_show": "json"}
EMBEDDING, DOWN, HEAD, NORM = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight",
                               "model.layers.2.input_layernorm.weight")
ROWS = {"a": (7, EMBEDDING), "b": (7, DOWN), "c": (7, HEAD), "d": (7, NORM), "e": (1, NORM)}


def parts_of(lab, flags, name):
    """Of a layout the parts of one weight."""
    layout = json.loads(estimates.output_of([str(lab.program("ch07")), *estimates.words_of(flags)]))
    return [part for part in layout["parameters"] if part["name"] == name]


def elements(part):
    """Numbers in the whole weight of a part's elements, in their order on a rank."""
    axes = [range(size) for size in part["shape"]]
    for axis, begin, length in part["slices"]:
        axes[axis] = axes[axis][begin:begin + length]
    strides = [math.prod(part["shape"][axis + 1:]) for axis in range(len(axes))]
    return [sum(map(int.__mul__, place, strides)) for place in itertools.product(*axes)]


def updated(parts, rank):
    """Elements that a rank updates."""
    return [element for part in parts for owner in part["owners"] if owner["rank"] == rank
            for element in elements(part)[owner["begin"]:owner["end"]]]


def savers(parts):
    """{element: the rank that saves it}"""
    return {element: owner["rank"] for part in parts for owner in part["owners"] if owner["saves"]
            for element in elements(part)[owner["begin"]:owner["end"]]}


def holders(parts):
    """Ranks that hold some of the weight."""
    return {rank for part in parts for rank in part["ranks"]}


def read(answer):
    """{row: {old rank: elements}} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-e]): (nothing|\d+ \d+(?:, \d+ \d+)*)", line.strip())
        if not match:
            raise NotYet(f"this line is no row of the table: '{line.strip()}'", "a line is such as: a: 0 10, 1 20")
        pairs = [part.split() for part in match[2].split(", ") if part != "nothing"]
        found[match[1]] = {int(rank): int(count) for rank, count in pairs}
        if len(found[match[1]]) != len(pairs):
            raise NotYet(f"{match[1]} names an old rank twice", "add up what it has of the weight")
    return found


def what_is_wrong(given, wanted, old, new, rank):
    """Words for a row that is not what the layouts say."""
    has_saved = set(savers(old).values())
    if given and not wanted:
        return f"new rank {rank} updates no element of this weight: it gets them from the ranks that do"
    for one in given:
        if one not in holders(old):
            return f"old rank {one} holds no element of this weight: it lies on another stage"
        if one not in has_saved:
            return f"old rank {one} holds elements of this weight, but another rank saves them"
    held = [part for part in new if rank in part["ranks"]]
    if sum(given.values()) == sum(len(elements(part)) for part in held) != sum(wanted.values()):
        return f"new rank {rank} holds as many elements, but it does not update them all"
    if sum(given.values()) != sum(wanted.values()):
        return f"new rank {rank} updates another number of elements"
    if set(given) != set(wanted):
        return "as many elements as it updates, but other old ranks have them"
    return "the right old ranks, but one of them has more of these elements, and another has fewer"


def judge(answer, lab):
    """Lines for a right table; NotYet for the first row that is wrong."""
    found, lines = read(answer), []
    for row, (rank, name) in ROWS.items():
        if row not in found:
            raise NotYet(f"a line is missing: {row}")
        old, new = parts_of(lab, OLD, name), parts_of(lab, NEW, name)
        saved = savers(old)
        wanted = dict(Counter(saved[element] for element in updated(new, rank)))
        if found[row] != wanted:
            given = ", ".join(f"{one} {count}" for one, count in found[row].items()) or "nothing"
            raise NotYet(what_is_wrong(found[row], wanted, old, new, rank), f"{row}: not {given}")
        lines.append(f"{row}: new rank {rank} reads {sum(wanted.values())} of {len(saved)} elements; "
                     f"old ranks that have saved some of these: {len(set(saved.values()))}")
    return lines
