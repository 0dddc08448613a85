"""What a rank holds under context parallelism: by formula, by a dry run, in small runs, and
beside the book's figure of 8B (Fig4.6)."""
import json
import time

from tools.base import say
from tools.run import estimates

from . import runs

GIB, MIB = 2**30, 2**20
DEVICE = 80 * GIB  # a GPU that is sold, and called by the book, as one of 80 GB
STATES = ("weights", "gradients", "optimizer")

# The book's figure, GiB: weights, gradients, optimizer states; activations by sequence.
LARGE = {"model": "8B", "dtype": "bf16", "micro_batch_size": 1, "dp_size": 1}
SEQ_LENS = (1024, 4096, 16384, 65536, 131072)
LAYOUTS = ((1, 1), (2, 1), (2, 4))  # tp, cp
BOOK_STATES = {1: (14.957, 14.957, 59.828), 2: (7.479, 7.479, 29.914)}
BOOK_ACTIVATIONS = {(1, 1): (4.25, 17, 68, 272, 544), (2, 1): (2.75, 11, 44, 176, 352),
                    (2, 4): (0.688, 2.75, 11, 44, 88)}

# A node's ranks share the layers; nodes share the sample, and with it the optimizer states.
NODE = {"tp_size": 8, "sequence_parallel": None}
PROBLEM_CP = 16
ZERO = {"zero_stage": 1}
FULL = {"recompute": "full"}
FITS_CP = (1, 2, 4, 8, 16)
FULL_CP = 8  # beyond it the program counts too many activations of the formula to print them
FITS_UNIT = 1024  # tokens: divides into the pieces of every cp, on ranks of tp

MILLION = 2**20
# Ranks of cp, and what is recomputed.
MILLION_MESHES = ((16, {}), (32, {}), (64, {}), (16, FULL), (32, FULL),
                  (16, {**FULL, "cp_recompute": "keep"}), (32, {**FULL, "cp_recompute": "keep"}))
PEAK, MFU = 989e12, 0.4  # of an H100 in bf16, and how much of it a good run reaches

HELD_CP = (1, 2, 4)
HELD_KEYS_CP = (2, 4, 8)
HELD_METHODS = ("ring", "all_gather", "ulysses")


def _parse(found):
    """What the tables use of an estimate."""
    of_cp = {name: values for name, values in estimates.sent(found).items()
             if name.startswith("cp_")}
    return {name: {key: found[name][key] for key in (*STATES, "activations", "peak_activations")}
            for name in ("predicted", "simulated")} | {
        "peak_total": found["simulated"]["peak_total"],
        "flops": found["simulated"]["flops"],
        "recomputed_flops": found["simulated"]["recomputed_flops"],
        "sent": sum(size for _, size in of_cp.values())}


def estimate(program, **flags):
    """A case of the tables: what a dry run comes to."""
    return estimates.read(program, flags, _parse)


# --- 8B -------------------------------------------------------------------------------------------


def estimate_large(program):
    """The book's layouts and sequences; what is left on a node's ranks; what fits; a million."""
    say("book: estimating 8B on ranks that share its samples")
    cases = [{"tp": tp, "cp": cp, "seq_len": seq_len,
              **estimate(program, **LARGE, tp_size=tp, cp_size=cp, seq_len=seq_len)}
             for tp, cp in LAYOUTS for seq_len in SEQ_LENS]
    problem = [{"seq_len": seq_len, "saved": [
        estimate(program, **LARGE, seq_len=seq_len, **flags)["simulated"]["activations"]
        for flags in ({}, NODE, {**NODE, **FULL}, {**NODE, "cp_size": PROBLEM_CP})]}
        for seq_len in (8192, 32768, 131072, MILLION)]
    return {"cases": cases, "problem": problem, "fits": estimate_fits(program),
            "million": [{"cp": cp, "flags": flags, **_million(program, cp, flags)}
                        for cp, flags in MILLION_MESHES]}


def _million(program, cp, flags):
    return estimate(program, **LARGE, **NODE, **ZERO, cp_size=cp, seq_len=MILLION, **flags)


def problem_table(record):
    """What 8B leaves for backward, GiB."""
    rows = [[f"{case['seq_len']:,}", *(f"{size / GIB:,.1f}" for size in case["saved"])]
            for case in record["problem"]]
    return runs.table(["tokens of a sample", "one rank", "`tp` = 8, sequence parallel",
                       "`tp` = 8, full recomputation", f"`tp` = 8, `cp` = {PROBLEM_CP}: {8 * PROBLEM_CP} ranks"], rows,
                      "GiB of activations on a rank, 8B in bf16, one sample, sequence parallelism; `tp` = 8 alone is 8 ranks.")


def find(cases, tp, cp, seq_len):
    """The case of a layout and sequence."""
    return next(case for case in cases if (case["tp"], case["cp"], case["seq_len"]) == (
        tp, cp, seq_len))


def large_table(record):
    """Ours beside the book's, in GiB."""
    rows, ratios = [], []
    for tp, cp in LAYOUTS:
        found = [find(record["cases"], tp, cp, seq_len) for seq_len in SEQ_LENS]
        states = [found[0]["simulated"][name] / GIB for name in STATES]
        saved = [case["simulated"]["activations"] / GIB for case in found]
        book = (*BOOK_STATES[tp], *BOOK_ACTIVATIONS[tp, cp])
        ratios += [case["simulated"][name] / case["predicted"][name]
                   for case in found for name in (*STATES, "activations")]
        rows.append([f"{tp}, {cp}", *(f"{own:,.1f} ({theirs:,.4g})"
                                      for own, theirs in zip((*states, *saved), book))])
    first, *others = (f"{seq_len // 1024}k" for seq_len in SEQ_LENS)
    spread = dict.fromkeys(f"{ratio:.4f}" for ratio in (min(ratios), max(ratios)))
    return runs.table(["`tp`, `cp`", *STATES, f"activations: {first}", *others], rows,
                      "GiB of a rank by a dry run, bf16 with gradients in f32, one sample; in "
                      "brackets the book's. Each over the bytes of the chapter's formula: "
                      f"{' to '.join(spread)}.")


# --- what fits ------------------------------------------------------------------------------------


def estimate_fits(program):
    """[{cp, recompute, seq_len}]: the longest sample of which a step fits."""
    say("book: the longest samples of 8B")
    found = []
    for flags in ({}, FULL):
        for cp in FITS_CP:
            if flags and cp > FULL_CP:
                continue
            known = {}

            def peak(size):
                if size not in known:
                    known[size] = estimate(program, **LARGE, **NODE, **ZERO, **flags, cp_size=cp,
                                           seq_len=size * FITS_UNIT)["peak_total"]
                return known[size]
            found.append({"cp": cp, "recompute": flags.get("recompute", "none"),
                          "seq_len": FITS_UNIT * estimates.largest(peak, DEVICE)})
    return found


def fits_table(found):
    """Tokens over cp."""
    rows = []
    for cp in FITS_CP:
        lengths = [case["seq_len"] for case in found if case["cp"] == cp]  # none, full
        cells = [text for length in lengths for text in (f"{length:,}", f"{length // cp:,}")]
        rows.append([str(cp), str(8 * cp), *cells, *[""] * (4 - len(cells))])
    return runs.table(["`cp`", "GPUs", "tokens", "tokens of a rank", "full recomputation: tokens",
                       "full recomputation: tokens of a rank"], rows,
                      "The longest of which a step fits, by a dry run: bf16, sequence parallelism, "
                      f"ZeRO-1, units of {FITS_UNIT:,}.")


# --- a million tokens -----------------------------------------------------------------------------


def time_million(program):
    """[seconds] that the dry runs took."""
    took = []
    for cp, flags in MILLION_MESHES:
        begin = time.monotonic()
        _million(program, cp, flags)
        took.append(time.monotonic() - begin)
    return took


def million_table(record, took):
    """A sample of a million tokens on meshes."""
    rows = []
    for number, case in enumerate(record["million"]):
        held, way = case["simulated"], case["flags"].get("recompute", "none")
        way += ", `keep`" if "cp_recompute" in case["flags"] else ""
        rows.append([f"8 · {case['cp']}", way, f"{sum(held[name] for name in STATES) / GIB:.1f}",
                     f"{held['activations'] / GIB:.1f}",
                     f"{case['peak_total'] / GIB:.1f}{' ✓' * (case['peak_total'] <= DEVICE)}",
                     f"{case['sent'] / GIB:.1f}",
                     f"{100 * case['recomputed_flops'] / case['flops']:.0f} %",
                     f"{case['flops'] / PEAK / MFU:.0f}",
                     f"{took[number]:.2f}" if took else ""])
    return runs.table(["`tp · cp`", "recompute", "states", "activations", "peak",
                       "sent over `cp`", "recomputed", "step at 40 % of peak, s", "dry run, s"],
                      rows, f"8B in bf16, one sample of {MILLION:,} tokens, sequence parallelism and "
                      "ZeRO-1 within `cp`; GiB of a rank. ✓: it fits into 80 GiB. Recomputed: of all "
                      "operations, of which blockwise attention repeats some in any case.")


# --- small runs -----------------------------------------------------------------------------------


def count(program):
    """Peaks of small runs beside the formulas, and blocks of keys that methods hold."""
    held = []
    for cp in HELD_CP:
        flags = {**runs.SHAPE, "seq_len": 256, "dp_size": 1, "cp_size": cp, "micro_batch_size": 2}
        peaks = runs.run(program, cp, **flags, steps=2)[0][-1]["peak_bytes"]
        held.append({"cp": cp, "predicted": estimate(program, **flags)["predicted"],
                     "measured": {name: int(peaks[name]) for name in (*STATES, "activations")}})
    keys = [{"method": method, "cp": cp, **_keys(program, method, cp)}
            for method in HELD_METHODS for cp in HELD_KEYS_CP]
    return {"held": held, "keys": keys}


KEYS = {**runs.SHAPE, "num_kv_heads": 8, "seq_len": 256, "micro_batch_size": 1, "dp_size": 1}


def _keys(program, method, cp):
    """Blocks of received keys and values that are alive at most; peaks of activations."""
    flags = {**KEYS, "cp_size": cp, **runs.by_method(method)}

    def look(run_dir):
        return most_alive(json.loads((run_dir / "memory.json").read_text(encoding="utf-8")), "keys")

    alive = runs.look_into(program, cp, look, **flags, steps=2, trace_steps=2)
    block = 2 * KEYS["hidden_size"] * KEYS["seq_len"] // cp * 4  # of f32
    case = estimate(program, **flags)
    return {"blocks": alive / block, "peak": case["simulated"]["peak_activations"],
            "predicted": case["predicted"]["peak_activations"]}


def most_alive(recorded, name):
    """The most bytes of tensors of a name that are alive at a time, of a run's memory.json."""
    names = recorded["names"]
    live = most = 0
    for _, size, _, _, which in recorded["events"]:
        if (names[which] if isinstance(which, int) else which) == name:
            live += size
            most = max(most, live)
    return most


def held_table(held):
    """Formula and measurement of a small model."""
    rows = []
    for case in held:
        states = [sum(case[how][name] for name in STATES) for how in ("predicted", "measured")]
        saved = case["predicted"]["peak_activations"], case["measured"]["activations"]
        rows.append([str(case["cp"]), *(f"{size:,}" for size in states),
                     *(f"{size:,}" for size in saved), f"{saved[1] / saved[0]:.4f}"])
    return runs.table(["`cp`", "states, by formula", "measured", "activations at their peak, by "
                       "formula", "measured", "ratio"], rows,
                      "Bytes of rank 0 of a small model in f32. States: weights, gradients and the "
                      "optimizer's, without ZeRO.")


def held_keys_table(keys):
    """What methods hold."""
    rows = []
    for case in keys:
        ring = next(other["peak"] for other in keys
                    if (other["method"], other["cp"]) == ("ring", case["cp"]))
        expected = {"ring": min(2, case["cp"] - 1), "all_gather": case["cp"], "ulysses": 0}
        rows.append([f"`{case['method']}`", str(case["cp"]), f"{expected[case['method']]}",
                     f"{case['blocks']:.4g}", f"{case['predicted']:,}", f"{case['peak']:,}",
                     f"{case['peak'] / ring:.2f}"])
    return runs.table(["", "`cp`", "blocks of keys, by formula", "counted",
                       "peak of activations, by formula", "by a dry run", "of the ring's"],
                      rows, "Bytes of rank 0, small model in f32. Blocks: how many ranks' keys and values are there at the "
                      "same time at most, besides the rank's own; a gather counts its own among them.")
