"""What a rank of a pipeline holds: 70B and 8B by a dry run, 8B beside the book's figure (Fig5.2),
and peaks by the number of micro-batches."""
import json

from tools.base import say
from tools.book.short_runs import look_into, table
from tools.run import estimates

GIB, MIB = 2**30, 2**20
STATES = ("weights", "gradients", "optimizer")
LARGE = {"dtype": "bf16", "micro_batch_size": 1, "dp_size": 1}
PROBLEM = {**LARGE, "model": "70B", "seq_len": 4096}
PROBLEM_PP = (1, 4, 8, 16)
# The book's figure, GiB, by pp: states, and activations by sequence, which it leaves the same.
SEQ_LENS = (1024, 4096, 16384)
BOOK_STATES = {1: (14.957, 14.957, 59.828), 8: (2.604, 2.604, 10.414)}
BOOK_ACTIVATIONS = (4.25, 17, 68)
# Of our layouts, {what it is: (pp, flags)}: as the book has it, and with the head counted as layers.
BOOK_CASES = {"1": (1, {}), "8, 4 layers each": (8, {"pp_layers": ",".join("4" * 8)}),
              "8, by default": (8, {})}
# A small model, whose stages all have as many layers.
SMALL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 8, "seq_len": 64, "micro_batch_size": 1, "dp_size": 1}
SMALL_RANKS, SMALL_LAYERS = 4, "2,2,2,2"
MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEDULES = ("afab", "1f1b", "zb_h1", "zb_h2")
# What ZeRO keeps whole of 8B: on 8 copies of each layout, whose step has 8 micro-batches of a copy.
ZERO = {"dtype": "bf16", "micro_batch_size": 1, "dp_size": 8, "model": "8B", "seq_len": 4096,
        "grad_acc_steps": 8, "recompute": "full"}
ZERO_LAYOUTS = {"accumulation": {}, "`1f1b`, `p` = 4": {"pp_size": 4},
                "`interleaved`, `p` = 4, `v` = 2": {
                    "pp_size": 4, "pp_schedule": "interleaved", "pp_chunks": 2}}
ZERO_SETTINGS = ((2, "micro_batch", None), (2, "step", None), (3, "micro_batch", "block"),
                 (3, "step", "block"), (3, "step", "chunk"), (3, "step", "step"))


def _parse(found):
    own = found["simulated"]
    return {key: own[key] for key in (*STATES, "activations", "peak_activations", "peak_total")}


def estimate(program, **flags):
    """Bytes of rank 0, by a dry run."""
    return estimates.read(program, flags, _parse)


def estimate_all(program):
    """Cases of 70B and 8B, and of the small model."""
    say("book: estimating pipelines of 70B and 8B")
    problem = [{"pp": pp, **estimate(program, **PROBLEM, pp_size=pp, grad_acc_steps=max(pp, 1))}
               for pp in PROBLEM_PP]
    book = [{"case": case, "pp": pp, "seq_len": seq_len, **estimate(
        program, **LARGE, model="8B", pp_size=pp, grad_acc_steps=pp, seq_len=seq_len, **flags)}
            for case, (pp, flags) in BOOK_CASES.items() for seq_len in SEQ_LENS]
    peaks = [{"schedule": name, "m": m, **estimate(program, **_small(name, m))}
             for name in SCHEDULES for m in MICRO_BATCHES]
    return {"problem": problem, "book": book, "peaks": peaks,
            "zero": [_estimate_zero(program, layout, *setting)
                     for layout in ZERO_LAYOUTS for setting in ZERO_SETTINGS]}


def _estimate_zero(program, layout, stage, reduce_after, reshard_after):
    """One setting: buffers of rank 0, and what it sends over the copies."""
    flags = {**ZERO, **ZERO_LAYOUTS[layout], "zero_stage": stage, "reduce_after": reduce_after}
    if reshard_after:
        flags["reshard_after"] = reshard_after

    def parse(found):
        buffers = {entry["name"]: entry["bytes"] for entry in found["buffers"]}
        return {"gathered": buffers.get("gathered weights", 0),
                "to_reduce": buffers["gradients to reduce"],
                "sent": sum(size for name, (_, size) in estimates.sent(found).items()
                            if name.split(".")[0] in ("dp", "dp_cp"))}

    return {"layout": layout, "stage": stage, "reduce_after": reduce_after,
            "reshard_after": reshard_after, **estimates.read(program, flags, parse)}


def _small(name, m):
    return {**SMALL, "pp_size": SMALL_RANKS, "pp_layers": SMALL_LAYERS, "pp_schedule": name,
            "grad_acc_steps": m}


def count(program):
    """Peaks of rank 0 in runs of the small model."""
    return [{"schedule": name, "m": m, "peak": look_into(
        program, SMALL_RANKS, _peak_of_step, **_small(name, m), steps=2, trace_steps=2)}
            for name in SCHEDULES for m in MICRO_BATCHES]


def _peak_of_step(run_dir):
    """The most bytes of activations at a time, from the recorded steps' allocations."""
    events = json.loads((run_dir / "memory.json").read_text(encoding="utf-8"))["events"]
    alive = most = 0
    for _, size, category, *_ in events:
        alive += size if category == "activations" else 0
        most = max(most, alive)
    return most


def problem_table(found):
    """70B on a rank of a pipeline."""
    rows = []
    for own in found:
        states = [own[name] / GIB for name in STATES]
        rows.append([str(own["pp"]), *(f"{size:,.1f}" for size in states), f"{sum(states):,.1f}",
                     f"{own['peak_activations'] / GIB:,.1f}"])
    return table(["`p`", "weights", "gradients", "optimizer", "model states",
                  "activations, at most"], rows,
                 f"GiB of rank 0, 70B in bf16 with gradients in f32, {PROBLEM['seq_len']:,} tokens a "
                 "micro-batch, `m` = `p`, in the order 1F1B of [the idea](#2-the-idea). By a dry run.")


def find_book(found, case, seq_len):
    """The case of 8B and a sequence."""
    return next(own for own in found if (own["case"], own["seq_len"]) == (case, seq_len))


def book_table(found):
    """8B beside the book's figure."""
    rows = []
    for name, (pp, _) in BOOK_CASES.items():
        own, states = [find_book(found, name, seq_len) for seq_len in SEQ_LENS], BOOK_STATES[pp]
        rows.append([name, *(f"{own[0][part] / GIB:.1f} ({theirs:g})"
                             for part, theirs in zip(STATES, states)),
                     *(f"{case['peak_activations'] / GIB:.1f} ({theirs:g})"
                       for case, theirs in zip(own, BOOK_ACTIVATIONS))])
    return table(["`p`", *STATES, *(f"activations, {seq_len // 1024}k" for seq_len in SEQ_LENS)],
                 rows, "GiB of rank 0, 8B in bf16 with gradients in f32, `m` = `p`, 1F1B; in brackets "
                 "the book's.")


def peaks_table(counted, estimated):
    """Peaks of the small model over m."""
    rows = []
    for m in MICRO_BATCHES:
        row = [str(m)]
        for name in SCHEDULES:
            found = [next(case for case in cases if (case["schedule"], case["m"]) == (name, m))
                     for cases in (counted, estimated)]
            row.append(f"{found[0]['peak'] / MIB:.2f} ({found[1]['peak_activations'] / MIB:.2f})")
        rows.append(row)
    return table(["`m`", *(f"`{name}`" for name in SCHEDULES)], rows,
                 f"MiB of activations on rank 0 of {SMALL_RANKS} at most, in a run of a small model; in "
                 "brackets by a dry run.")


def zero_table(found):
    """What stays whole, and what is sent for it."""
    rows = [[own["layout"], str(own["stage"]), f"`{own['reduce_after']}`",
             f"`{own['reshard_after']}`" if own["reshard_after"] else "",
             *(f"{own[name] / GIB:.2f}" for name in ("gathered", "to_reduce", "sent"))]
            for own in found]
    return table(["8 micro-batches, 8 copies", "stage", "`--reduce_after`", "`--reshard_after`",
                  "gathered weights", "gradients to reduce", "sent in a step"], rows,
                 "GiB of rank 0 by a dry run, 8B in bf16 with gradients in f32. Buffers are at their peaks; what "
                 "is sent are weights and gradients, to the other copies.")
