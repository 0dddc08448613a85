"""Small runs on this machine: what they send, how many operations a step has, what they keep."""
from tools.book.short_runs import look_into, run, table
from tools.book.showcase import read_json
from tools.lab import lab, on_card
from tools.look import runs
from tools.run import estimates

# A vocabulary that is large for such a model.
MODEL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_layers": 2, "vocab_size": 4096,
         "seq_len": 128, "micro_batch_size": 4, "dtype": "f32", "steps": 3}
FUSED = {"kernels": "fused", "loss_rows": 128}
SHARED = {"tp_size": 2, "sequence_parallel": None, "dp_size": 1}
WAYS = {"reference": {}, "fused": FUSED}
STEP = 2  # the one whose trace is read
MIB = 1 << 20
# By a name of our own: the fused operation, and which two the reference has one after the other.
FUSIBLE = {"residual": ("linear_forward_add", ("linear_forward", "add")),
           "squares": ("sum_squares", None), "adamw": ("adamw", None)}
ELEMENTWISE = ("swiglu_forward", "swiglu_backward", "rmsnorm_forward", "rmsnorm_backward_input", "rmsnorm_backward_weight",
               "add", "rope")  # what expected.py has a formula for, and tests/course/test_gpu.py compares
TITLES = {"residual": "a product, and the residual added", "squares": "squares of the gradients", "adamw": "AdamW"}


def facts_of(run_dir):
    """Operations of a traced step by name, their bytes, work of the head; and the peak of activations."""
    events = [event for event in read_json(run_dir / "trace.json")["traceEvents"]
              if event.get("args", {}).get("step") == STEP]
    ops = [event for event in events if event.get("cat") == "op"]
    head = [event for event in events if event["name"] == "linear_cross_entropy"]
    records = runs.read_metrics(run_dir)[0]
    return {"ops": len(ops), "bytes": sum(event["args"].get("bytes", 0) for event in ops),
            "calls": len(head), "head_flops": sum(event["args"]["flops"] for event in head),
            "losses": [record["loss"] for record in records], "flops": records[-1]["flops"],
            "peak": records[-1]["peak_bytes"]["activations"]}


def calls_of(run_dir):
    """Of a traced step, calls and bytes of what is fused: as one operation, and as the two that follow each other."""
    ops = sorted((event for event in read_json(run_dir / "trace.json")["traceEvents"]
                  if event.get("cat") == "op" and event["args"].get("step") == STEP), key=lambda event: event["ts"])
    found = {name: {"calls": 0, "bytes": 0} for name in FUSIBLE}
    for name, (one, parts) in FUSIBLE.items():
        for first, second in zip(ops, [*ops[1:], None]):
            if first["name"] == one:
                together = [first]
            elif second and (first["name"], second["name"]) == parts:
                together = [first, second]
            else:
                continue
            found[name]["calls"] += len(together)
            found[name]["bytes"] += sum(event["args"].get("bytes", 0) for event in together)
    alone = [event for event in ops if event["name"] in ELEMENTWISE]
    return {**found, "elementwise": {"calls": len(alone), "bytes": sum(event["args"]["bytes"] for event in alone)}}


def calls_predicted():
    """{operation: (calls, bytes that its parts move besides)} of a fused step in bf16, one micro-batch."""
    layers, tokens = MODEL["num_layers"], MODEL["micro_batch_size"] * MODEL["seq_len"]
    return {"residual": (2 * layers, 2 * layers * 2 * tokens * MODEL["hidden_size"] * 2),  # written and read again, in bf16
            "squares": (1, 0), "adamw": (layers + 2, 0)}


def predicted(program, flags):
    """Bytes of activations by formula."""
    without = {name: value for name, value in flags.items() if name != "steps"}
    return estimates.read(program, without, lambda found: {
        name: found["predicted"][name] for name in ("activations", "peak_activations", "recomputed_flops")})


def count_all(program):
    _, ledger = run(program, 2, **MODEL, **FUSED, **SHARED)
    found = {}
    for name, flags in WAYS.items():
        found[name] = {**look_into(program, 1, facts_of, **{**MODEL, **flags, "trace_steps": 3}),
                       "predicted": predicted(program, {**MODEL, **flags})}
    calls = {name: look_into(program, 1, calls_of, **{**MODEL, **flags, "dtype": "bf16", "trace_steps": 3})
             for name, flags in WAYS.items()}
    return {"runs": found, "calls": calls, "model": MODEL, "rows": FUSED["loss_rows"], "ledger": {
        name: {key: entry[key] for key in ("calls", "payload_bytes", "wire_bytes")} for name, entry in ledger.items()}}


def run_table(record):
    found = record["runs"]
    return table(("kernels", "operations a step", "MiB that they read and write", "peak by formula, MiB", "peak measured, MiB",
                  "measured over formula"), [
        (name, str(row["ops"]), f"{row['bytes'] / MIB:.1f}", f"{row['predicted']['peak_activations'] / MIB:.2f}",
         f"{row['peak'] / MIB:.2f}", f"{row['peak'] / row['predicted']['peak_activations']:.4f}") for name, row in found.items()],
        f"Two layers of {MODEL['hidden_size']} channels with a vocabulary of {MODEL['vocab_size']:,}, "
        f"{MODEL['micro_batch_size']} samples of {MODEL['seq_len']} tokens in f32 on one rank, {record['rows']} rows of the logits at "
        "once. Operations are calls of a kernel; bytes are those of their operands.")


def calls_table(record):
    parts, fused = (record["calls"][name] for name in WAYS)
    return table(("operation", "calls, reference", "fused, predicted", "fused, counted",
                  "MiB of operands less, predicted", "counted", "time saved"), [
        (TITLES[name], str(parts[name]["calls"]), str(calls), str(fused[name]["calls"]), f"{less / MIB:.2f}",
         f"{(parts[name]['bytes'] - fused[name]['bytes']) / MIB:.2f}", "not measured")
        for name, (calls, less) in calls_predicted().items()],
        f"Two layers of {MODEL['hidden_size']} channels, {MODEL['micro_batch_size']} samples of {MODEL['seq_len']} tokens in bf16, "
        "one micro-batch a step. Bytes are those of the operands. How much time this saves, only a card can tell.")


def claims_table(record, labs):
    reference, fused = (record["runs"][name] for name in WAYS)
    ratio = fused["peak"] / reference["peak"]
    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("T9.7", "fused kernels keep intermediate results out of memory", "a lower peak",
         f"{ratio:.3f}", "yes" if ratio < 1 else "no", "peak of activations, fused over reference, in the small run above"),
        *(claims_of_labs(labs) if labs else ())])


def claims_of_labs(labs):
    """What counts say of claims about times."""
    def pair(of, count, *rungs):
        by = {rung["name"]: rung[count] for rung in labs[of]["rungs"]}
        return [by[name] for name in rungs]

    def row(number, claim, wanted, holds, found, where):
        return number, claim, wanted, found, "yes, by counts" if holds else "no", f"{where}; time: not measured"
    naive, coalesced, tiled = pair("ch09.matmul", "bytes", "naive", "coalesced", "tiled")
    before, after = pair("ch09.stalls", "fmas_per_request", "tiled", "coarsened_2d")
    chain, fused = pair("ch09.fusion", "bytes", "op_by_op", "fused")
    held, scores = pair("ch09.attention", "scores_bytes", "naive", "blockwise")
    asked, flash = pair("ch09.attention", "bytes", "naive", "blockwise")
    norm, = pair("ch09.layer_norm", "predicted_flops_per_byte", "row_in_shared")
    balance = lab.SHEET["f32"] * 1e3 / lab.SHEET["memory"]
    by_lane, by_warp = pair("ch09.divergence", "divergent_branches", "by_lane", "by_warp")
    ladder = "[the ladder](ladder.md#5-predict-then-measure)"
    clock = lab.SHEET["f32"] * 1e3 / (2 * 132 * on_card.CORES)  # each core multiplies and adds once a cycle
    return [
        row("Q9.1", "coalescing makes the naive product about 10 times as fast", "fewer sectors", naive > coalesced,
            f"{naive / coalesced:.1f} times fewer", f"sectors, naive over coalesced, {ladder}"),
        row("Q9.2", "tiles take 43 % off its time", "fewer bytes", coalesced > tiled,
            f"{coalesced / tiled:.1f} times fewer", f"bytes, coalesced over tiled, {ladder}"),
        row("Q9.3", "coarsening takes stalls for the memory units away", "more FMAs a request", after > before,
            f"{after / before:.1f} times as many", f"FMAs a request, coarsened_2d over tiled, {ladder}"),
        row("Q9.4", "a fused chain of point-wise operations is about 5 times as fast", "5 times fewer bytes", 4.5 < chain / fused < 5.5,
            f"{chain / fused:.2f} times fewer", "bytes, op_by_op over fused, [the lab](labs.md#fusion)"),
        row("Q9.5", "branches that part a warp cost up to their sum, branches between warps nothing",
            "divergent branches only within a warp", by_lane > 0 and by_warp == 0, f"{by_lane:,} and {by_warp:,}",
            "divergent branches, by lane and by warp, [the lab](labs.md#divergence)"),
        row("Q9.6", "FlashAttention is exact, takes O(S) memory and is several times as fast", "bytes of scores: 0; fewer of all",
            scores == 0 < held and asked > flash, f"{scores} of {held:,}; {asked / flash:.1f} times fewer",
            "bytes of the scores, and of all that is asked of memory, blockwise and naive in f32, [attention](attention.md); "
            "values are compared with the exact ones by its tests"),
        ("Q9.14", "an H100 has 132 · 128 = 16,896 cores", "16,896", f"16,896 at {clock:.2f} GHz reach the data sheet's f32 rate",
         "yes, by the data sheet", "`./book lab ch09.primer` asks a card: not measured"),
        ("QA1.1", "a clock around a launch that nobody waits for measures too little", "less than by events", "not measured",
         "not measured", "`python3 ch09_gpu_kernels/examples/layer_norm.py` needs a GPU"),
        row("QA1.2", "LayerNorm is bound by memory: 78 % of its bandwidth, 24 % of its arithmetic",
            f"fewer operations a byte than {balance:.0f}", norm < balance, f"{norm:.2f}",
            "operations a byte of row_in_shared, [the lab](labs.md#layernorm-the-appendixs-example); an H100's balance in f32 by its data sheet")]


def tables(record, labs):
    return {"run.md": run_table(record), "calls.md": calls_table(record), "claims.md": claims_table(record, labs)}
