"""Memory of Llama 3's 8B on eight ranks, one dimension at a time, beside the book's figure."""
from tools.base import say
from tools.book.short_runs import table
from tools.run import estimates

GIB = 2**30
RANKS = 8
SHAPE = {"model": "8B", "dtype": "bf16", "grad_accumulation": "bf16", "micro_batch_size": 1,
         "recompute": "selective", "attention": "naive"}
LENGTHS = (1024, 4096, 16384)
WAYS = {"none": {}, "DP 8, ZeRO-3": {"dp_size": 8, "zero_stage": 3},
        "TP 8": {"tp_size": 8}, "TP 8, SP": {"tp_size": 8, "sequence_parallel": None},
        "PP 8": {"pp_size": 8}, "CP 8": {"cp_size": 8}}
# Of the book's figure, GiB, as its panels have them: parameters, gradients and optimizer, and the activations at
# three lengths with selective recomputation.
BOOK = {"none": (14.96, 14.96, 59.83, 4.25, 17, 68), "DP 8, ZeRO-3": (1.87, 1.87, 7.48, 4.25, 17, 68),
        "TP 8": (1.87, 1.87, 7.48, 1.62, 6.5, 26), "PP 8": (2.60, 2.60, 10.41, 4.25, 17, 68),
        "CP 8": (14.96, 14.96, 59.83, 0.07, 0.27, 1.06)}
STATES = ("weights", "gradients", "optimizer")


def estimate_all(program):
    say("book: memory of 8B")
    return {"memory": [{"way": way, "length": length, **estimates.read(
        program, {**SHAPE, **flags, "seq_len": length}, _parse)}
        for way, flags in WAYS.items() for length in LENGTHS]}


def _parse(found):
    return {name: {part: found[name][part] for part in (*STATES, "activations")}
            for name in ("predicted", "simulated")}


def of(found, way, length=LENGTHS[0]):
    return next(own for own in found if own["way"] == way and own["length"] == length)


def memory_table(found):
    rows = []
    for way in WAYS:
        first, cells = of(found, way), [way]
        for place, name in enumerate(STATES):
            book = f" ({BOOK[way][place]:.2f})" if way in BOOK else ""
            cells.append(f"{first['simulated'][name] / GIB:.2f}{book}")
        for place, length in enumerate(LENGTHS):
            book = f" ({BOOK[way][3 + place]:g})" if way in BOOK else ""
            cells.append(f"{of(found, way, length)['simulated']['activations'] / GIB:.2f}{book}")
        rows.append(cells)
    return table(["", *STATES, *(f"activations, {length // 1024}k" for length in LENGTHS)], rows,
                 "GiB of rank 0, by a dry run; in brackets the book's figure. bf16 with gradients in bf16, "
                 "selective recomputation.")
