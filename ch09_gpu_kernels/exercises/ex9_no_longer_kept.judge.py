"""Judge of ch09.ex9: what the accountant counts with kernels of one operation each, less what it counts with fused ones."""
from tools.exercise import check, quantity
from tools.exercise.lab import NotYet
from tools.run import estimates

FLAGS = {"model": "1B", "dtype": "bf16", "seq_len": 2048, "micro_batch_size": 3, "recompute": "none"}
LAYERS, FFN, BYTES, ROWS = 16, 8192, 2, 512
TOLERANCE = 0.01
WHY = {"gate_up": "backward of SwiGLU needs gate and up: it computes their product anew, but these two it reads",
       "norm": "the product's weight gradient needs its input, whether or not it is fused with what follows",
       "lse": "this one number a row is what makes the logits superfluous",
       "residual": "the residual's add is fused, too, but the sum is the next layer's input and stays"}


def kept(lab, kernels):
    """{tensor: its bytes in all layers}"""
    def by_name(found):
        sums = {}
        for entry in found["activations"]:
            sums[entry["name"]] = sums.get(entry["name"], 0) + entry["bytes"]
        return sums
    return estimates.read(lab.program("ch09"), {**FLAGS, "kernels": kernels}, by_name)


def read(answer):
    """{tensor: bytes} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, size = line.partition(":")
        if not colon or len(name.split()) != 1:
            raise NotYet(f"this line has no name and bytes: '{line.strip()}'", "a line is such as: norm: 1 MB")
        found[name.strip()] = quantity.parse(size.strip(), "bytes")
    return found


def judge(answer, lab):
    """Lines for the right names and bytes; NotYet for the first that is wrong."""
    given = read(answer)
    before, after = kept(lab, "reference"), kept(lab, "fused")
    gone = {name: size - after.get(name, 0) for name, size in before.items() if size != after.get(name, 0)}
    for name in given:
        if name not in before:
            raise NotYet(f"forward keeps no tensor that is called '{name}'", f"it keeps {', '.join(before)}")
        if name not in gone:
            raise NotYet(WHY.get(name, "neither pair of operations has this tensor between its two"),
                         f"{name}: {before[name]} bytes with both kinds of kernels")
    missing = len(gone) - len(given)
    if missing:
        raise NotYet(f"{missing} more tensor{'s are' * (missing > 1)}{' is' * (missing == 1)} no longer kept")
    for name, size in given.items():
        try:
            check.compare_number(size, gone[name], "bytes", TOLERANCE, suspects(name, gone[name]))
        except NotYet as wrong:
            raise NotYet(wrong.lines[0], f"{name}: {wrong.lines[1]}") from None
    return [f"{name}: {quantity.show(size, 'bytes')} of {quantity.show(sum(before.values()), 'bytes')} that are kept"
            for name, size in gone.items()]


def suspects(name, size):
    """[(a wrong answer, its words)]"""
    tokens = FLAGS["seq_len"] * FLAGS["micro_batch_size"]
    common = [(size / BYTES, "these are numbers: one of bf16 has 2 bytes"),
              (size * 2, "numbers of bf16 have 2 bytes, not 4"),
              (size / FLAGS["micro_batch_size"], "this is one of the three sequences")]
    if name == "logits":
        return [(size * LAYERS, "logits are of the head alone: there is one"),
                (size * (1 - ROWS / tokens), "the chunk of rows that is at work is never kept for backward"), *common]
    return [(size / LAYERS, "this is one layer"),
            (2 * size, "gate and up are two tensors, but their product is one"),
            (size / FFN * 2048, "the MLP is wider than h inside"), *common]
