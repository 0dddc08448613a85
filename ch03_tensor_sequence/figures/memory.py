"""What a rank holds under tensor and sequence parallelism: by formula, by a dry run, and
beside the book's figures of 70B and 3B (Fig3.10 to 3.13)."""
from tools.base import say
from tools.run import estimates

from . import runs

GIB = 2**30
DEVICE = 80 * GIB  # a GPU that is sold, and called by the book, as one of 80 GB
STATES = ("weights", "gradients", "optimizer")

# The book's figures of 70B, GiB: weights, gradients, optimizer states; activations by sequence.
LARGE = {"model": "70B", "dtype": "bf16", "micro_batch_size": 1, "dp_size": 1}
SEQ_LENS = (1024, 4096, 16384)
LAYOUTS = ((1, "tensor"), (8, "tensor"), (16, "tensor"), (8, "again"), (16, "again"))
BOOK_STATES = {1: (131.5, 131.5, 526.0), 8: (16.44, 16.44, 65.75), 16: (8.22, 8.22, 32.88)}
BOOK_ACTIVATIONS = {(1, "tensor"): (21.25, 85.0, 340.0), (8, "tensor"): (8.125, 32.5, 130.0),
                    (16, "tensor"): (7.188, 28.75, 115.0), (8, "again"): (2.656, 10.625, 42.5),
                    (16, "again"): (1.328, 5.312, 21.25)}
KEPT_TP = (8, 16)  # whose layers are taken apart
BESIDE_ZERO = {"dp_size": 2, "zero_stage": 1}  # two copies shard the optimizer states

# The book's 3B, which has as many kv heads as heads: the largest batch that fitted.
BATCHED = {"hidden_size": 3072, "num_layers": 28, "num_heads": 32, "num_kv_heads": 32,
           "ffn_hidden_size": 8192, "vocab_size": 131072, "tie_word_embeddings": None,
           "seq_len": 4096, "dtype": "bf16", "dp_size": 1}
BATCH_TP = (2, 4, 8, 16, 32)
BOOK_BATCHES = {"tensor": (3, 8, 12, 16, 20), "again": (4, 10, 20, 40, 100)}


def _estimate(program, tp, way, **flags):
    return estimates.estimate(program, {**flags, "tp_size": tp, **runs.WAYS[way]})


# --- a layer --------------------------------------------------------------------------------------


def kept_bytes(shape, tp, way):
    """(replicated, divided) bytes that a rank keeps of a layer for each token, 2 bytes a number.

    What enters the regions and lies between them is replicated; what lies within is divided.
    """
    h, h_ff, a = (shape[name] for name in ("hidden_size", "ffn_hidden_size", "num_heads"))
    a_kv = max(shape["num_kv_heads"], tp)  # copies count
    within = 2 * (a + 2 * a_kv) * h / a + 2 * h + 4 * a + 6 * h_ff
    between, entering = 4 * h + 8, 4 * h  # the two norms' x and rstd; what they hand on
    if way == "tensor":
        return between + entering, within
    return (entering, between + within) if way == "kept" else (0, between + entering + within)


def book_kept(tp, way):
    """The book's count, of GPT, in units of s b h bytes: 34 in all, without probabilities."""
    return {"tensor": 10 + 24 / tp, "kept": 4 + 30 / tp, "again": 34 / tp}[way]


def of_a_layer(case):
    """Bytes of a token that a layer leaves for backward, by the program's formulas."""
    tokens = case["shape"]["seq_len"] * case["shape"]["micro_batch_size"]
    return sum(case["layer"].values()) / tokens


def kept_table(record):
    """A layer of 70B under each way: formula, program, the book's GPT."""
    rows = []
    for case in record["kept"]:
        replicated, divided = kept_bytes(case["shape"], case["tp"], case["way"])
        predicted, found = replicated + divided / case["tp"], of_a_layer(case)
        rows.append([runs.WAY_NAMES[case["way"]], str(case["tp"]), f"{replicated:,.0f}",
                     f"{divided:,.0f}/{case['tp']}", f"{predicted:,.0f}", f"{found:,.0f}",
                     f"{found / predicted:.4f}", f"{book_kept(case['tp'], case['way']):.2f} h"])
    return runs.table(["", "`tp`", "replicated", "divided", "together", "`--estimate`", "ratio",
                       "the book's GPT"], rows,
                      "Bytes for each token that a layer of 70B leaves for backward, in bf16 with "
                      "blockwise attention.")


def replicated_table(record):
    """What plain tensor parallelism leaves replicated."""
    rows = []
    shape = record["kept"][0]["shape"]
    for tp in (1, *KEPT_TP):
        replicated, divided = kept_bytes(shape, tp, "tensor")
        rows.append([str(tp), f"{replicated:,.0f}", f"{divided / tp:,.0f}",
                     f"{100 * replicated / (replicated + divided / tp):.0f} %"])
    return runs.table(["`tp`", "replicated: 8 h + 8", "divided by `tp`", "share that is replicated"], rows)


# --- 70B ------------------------------------------------------------------------------------------


def estimate_large(program):
    """Dry runs of 70B, every layout and sequence; layers taken apart; ZeRO-3."""
    say("book: estimating 70B on ranks that share its layers")
    cases = [{"tp": tp, "way": way, "seq_len": seq_len,
              **_estimate(program, tp, way, **LARGE, seq_len=seq_len)}
             for tp, way in LAYOUTS for seq_len in SEQ_LENS]
    kept = [{"tp": tp, "way": way, **_estimate(program, tp, way, **LARGE, seq_len=SEQ_LENS[1])}
            for tp in KEPT_TP for way in runs.WAYS]
    zero = estimates.estimate(program, {**LARGE, "seq_len": SEQ_LENS[1], "dp_size": KEPT_TP[0],
                                        "zero_stage": 3})
    fits = _estimate(program, *LAYOUTS[-1], **{**LARGE, **BESIDE_ZERO}, seq_len=SEQ_LENS[-1])
    return {"cases": cases, "kept": kept, "zero": zero, "fits": fits}


def find(cases, tp, way, seq_len):
    """The case of a layout and sequence."""
    return next(case for case in cases if (case["tp"], case["way"], case["seq_len"]) == (
        tp, way, seq_len))


def large_table(record):
    """Ours beside the book's, in GiB."""
    rows = []
    for tp, way in LAYOUTS:
        for number, seq_len in enumerate(SEQ_LENS):
            case = find(record["cases"], tp, way, seq_len)
            ours = [case["simulated"][name] / GIB for name in (*STATES, "activations")]
            book = [*BOOK_STATES[tp], BOOK_ACTIVATIONS[tp, way][number]]
            cells = [f"{own:.1f} ({theirs:.4g})" for own, theirs in zip(ours, book)]
            peak = case["simulated"]["peak_total"] / GIB
            rows.append([f"{tp}{', sequence parallel' * (way != 'tensor')}", f"{seq_len:,}", *cells,
                         f"{sum(ours):.1f} ({sum(book):.4g})",
                         f"{peak:.1f}{' ✓' * (peak <= DEVICE / GIB)}"])
    return runs.table(["`tp`", "tokens", *STATES, "activations", "together", "peak of a step"], rows,
                      "GiB of a rank, bf16 with gradients in f32; in brackets the book's. ✓: a step "
                      "fits into 80 GiB.")


def problem_table(record):
    """70B on 8 ranks: what each way to share leaves on one."""
    seq_len, ranks = SEQ_LENS[1], KEPT_TP[0]
    rows = []
    for name, case in (("one rank", find(record["cases"], 1, "tensor", seq_len)),
                       (f"ZeRO-3 on {ranks} ranks", record["zero"]),
                       (f"`tp` = {ranks}", find(record["cases"], ranks, "tensor", seq_len)),
                       (f"`tp` = {ranks}, [sequence parallel](sequence.md)",
                        find(record["cases"], ranks, "again", seq_len))):
        held = case["simulated"]
        states = sum(held[part] for part in STATES)
        rows.append([name, f"{states / GIB:.0f}", f"{held['activations'] / GIB:.0f}"])
    return runs.table(["70B in bf16", "weights, gradients, optimizer, GiB",
                       f"activations of one sequence of {seq_len:,} tokens, GiB"], rows)


# --- the largest micro-batch ----------------------------------------------------------------------


def largest_batch(peak):
    """The largest micro-batch whose peak(size) in bytes fits, 0 if none does."""
    return estimates.largest(peak, DEVICE)


def estimate_batches(program):
    """[{tp, way, batch}] of 3B."""
    say("book: the largest micro-batches of 3B")
    found = []
    for way in BOOK_BATCHES:
        for tp in BATCH_TP:
            known = {}

            def peak(size):
                if size not in known:
                    known[size] = _estimate(program, tp, way, **BATCHED, micro_batch_size=size)[
                        "simulated"]["peak_total"]
                return known[size]
            found.append({"tp": tp, "way": way, "batch": largest_batch(peak)})
    return found


def batches_table(found):
    """Ours and the book's."""
    rows = []
    for number, tp in enumerate(BATCH_TP):
        ours = [next(case["batch"] for case in found if (case["tp"], case["way"]) == (tp, way))
                for way in BOOK_BATCHES]
        book = [BOOK_BATCHES[way][number] for way in BOOK_BATCHES]
        rows.append([str(tp), *(f"{own} ({theirs})" for own, theirs in zip(ours, book)),
                     f"{ours[1] / ours[0]:.2f} ({book[1] / book[0]:.2f})" if ours[0] else ""])
    return runs.table(["`tp`", "tensor parallelism", "with sequence parallelism", "ratio"], rows,
                      "Sequences of 4,096 tokens in a micro-batch that fits into 80 GiB, by a dry "
                      "run; in brackets the book's.")
