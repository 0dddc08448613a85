"""The book's claims about the memory of one device, each beside what was measured here.

measure() trains small models for a few steps; table() sets what they, the estimates and the runs of
recomputation.py say beside the formulas.
"""
import tempfile
from pathlib import Path

from tools.base import BookError, say
from tools.bench.bench import SMALL
from tools.look import memory
from tools.run.estimates import find

from . import cases as estimated
from . import recomputation
from .cases import LLAMA_1B, MODES, shape_of

GIB = 2**30
STATES = ("weights", "gradients", "optimizer")
SPLITS = ((8, 1), (4, 2), (2, 4))  # micro-batch size, micro-batches: the same eight samples
BATCHES = ((2, 1), (4, 1), (8, 1), (2, 2), (2, 4))  # in configuration A
PROFILE_STEPS = 4
SEQUENCE = 4096  # of the rows that show one


def measure(program, keep_profile):
    """What the claims need of runs. Calls keep_profile(run_dir) with a run of the demo's model, of
    which PROFILE_STEPS steps were recorded."""
    say("book: what the claims about memory need of runs")
    return {"states": _states(program), "accumulation": _accumulation(program),
            "batches": _batches(program), "profile": _profile(program, keep_profile)}


def _in_scratch(program, look, **flags):
    """look(records, run.json, run directory) of a run."""
    with tempfile.TemporaryDirectory(prefix="book_claims_") as scratch:
        run_dir = Path(scratch) / "run"
        records, run = recomputation.run(program, run_dir, **flags)
        return look(records, run, run_dir)


def _states(program):
    """Bytes of weights, gradients and Adam's states, in f32 and in bf16 with f32 gradients too."""
    def look(records, run, _):
        peaks = records[-1]["peak_bytes"]
        return {"parameters": int(run["parameters"]), **{name: int(peaks[name]) for name in STATES}}

    return {dtype: _in_scratch(program, look, **{**recomputation.SHAPE, "dtype": dtype}, steps=2,
                               **more)
            for dtype, more in (("f32", {}), ("bf16", {"grad_accumulation": "both"}))}


def _accumulation(program):
    """Losses and gradient norms of the same steps, the batch split in several ways."""
    def look(records, _run, _run_dir):
        return [[float(record[name]) for name in ("loss", "grad_norm")] for record in records]

    return [{"micro_batch_size": size, "grad_acc_steps": count,
             "steps": _in_scratch(program, look, **SMALL, micro_batch_size=size,
                                  grad_acc_steps=count, steps=4)}
            for size, count in SPLITS]


def _batches(program):
    """Peaks in configuration A: of the activations, and of all together."""
    def look(records, _run, run_dir):
        return {"activations": int(records[-1]["peak_bytes"]["activations"]),
                "total": memory.load(run_dir).peak_total}

    return [{"micro_batch_size": size, "grad_acc_steps": count,
             **_in_scratch(program, look, **{**recomputation.SHAPE, "micro_batch_size": size},
                           grad_acc_steps=count, steps=2, trace_steps=1)}
            for size, count in BATCHES]


def _profile(program, keep_profile):
    """The demo's first steps: optimizer states before and after the first, peaks of two."""
    def look(_records, run, run_dir):
        keep_profile(run_dir)
        recorded = memory.load(run_dir)
        first, second = recorded.steps()[:2]
        return {"parameters": int(run["parameters"]),
                "optimizer_before": recorded.live_at(first.begin)["optimizer"],
                "optimizer_after": recorded.live_at(first.end)["optimizer"],
                "peak_first": recorded.peak_within(first),
                "peak_second": recorded.peak_within(second)}

    return _in_scratch(program, look, steps=PROFILE_STEPS, trace_steps=PROFILE_STEPS)


def table(cases, runs_record):
    """The claims as Markdown, from estimates (a list of cases) and from runs (what is recorded of
    measure() and of recomputation.measure())."""
    measured = runs_record["claims"]
    modes = {(case["attention"], case["recompute"]): case for case in runs_record["recomputation"]}
    rows = [
        ("1", "weights, gradients and Adam take 16 bytes a parameter, 20 with gradients also "
         "accumulated in f32", *_bytes_per_parameter(measured["states"])),
        ("2", "activations grow with the batch, and with the sequence as a parabola",
         *_growth(cases)),
        ("3", "full recomputation costs 30–40 % of a step", *_time_of_full(modes)),
        ("4", "at GPT-3's shape, selective recomputation saves 70 % of the activations for "
         "2.7 % more operations", *_gpt3(cases)),
        ("5", "a layer keeps 34 + 5 a s / h, 34 or 2 bytes for each of its s b h",
         *_per_layer(cases)),
        ("6", "gradient accumulation changes no gradient",
         *_accumulated(measured["accumulation"])),
        ("7", "peak memory does not grow with the number of micro-batches, but linearly with "
         "their size", *_batch_memory(measured["batches"])),
        ("8", "optimizer states appear at the end of the first step, and the second peaks "
         "higher", *_second_step(measured["profile"])),
        ("9", "a bare CUDA context takes 1–2 GB", "", "not measured", "needs a GPU"),
        ("10", "MFU is at most HFU, and equal where nothing is recomputed",
         *_utilisation(modes)),
        ("11", "Llama 1B in f32: 4.60 GiB of weights, 4.60 of gradients, 9.21 of Adam's states",
         *_llama_1b(cases)),
    ]
    appendix = [
        ("QA2.1", "weights of all layers, with a gated MLP: 16 h² L", *_weights_of_layers(cases)),
        ("QA2.2", "a token takes 6 Ψ + 12 L h s operations", *_operations_of_a_token(cases)),
    ]
    return ("| | the book | formula | measured | where |\n|---|---|---|---|---|\n"
            + "".join(f"| {' | '.join(row)} |\n" for row in [*((f"Q1.{row[0]}", *row[1:]) for row in rows), *appendix]))


def _weights_of_layers(cases):
    case = find(cases, shape_of("8B", SEQUENCE))
    shape = case["shape"]
    of_layers = case["parameters"] - 2 * shape["vocab_size"] * shape["hidden_size"]
    found = of_layers / (16 * shape["hidden_size"] ** 2 * shape["num_layers"])
    return ("1", f"{found:.2f}", "parameters of 8B without embedding and head, over the formula's: its MLP is "
            f"{shape['ffn_hidden_size'] / shape['hidden_size']:g} h wide where the book has 4 h, and it has "
            f"{shape['num_kv_heads']} kv heads for {shape['num_heads']}")


def _operations_of_a_token(cases):
    case = find(cases, shape_of("8B", SEQUENCE))
    shape, counted = case["shape"], case["simulated"]["flops"] / SEQUENCE
    attention = 12 * shape["num_layers"] * shape["hidden_size"] * SEQUENCE
    multiplied = case["parameters"] - shape["vocab_size"] * shape["hidden_size"]
    ours = 6 * multiplied + attention * (SEQUENCE + 1) / (2 * SEQUENCE)
    return ("1", f"{counted / (6 * case['parameters'] + attention):.3f}; {counted / ours:.3f}",
            f"operations of 8B at {SEQUENCE} tokens that a dry run counted, over the formula; over the same "
            "without the embedding, which multiplies nothing, and with the pairs that the causal mask lets through")


def _bytes_per_parameter(states):
    found = [sum(states[dtype][name] for name in STATES) / states[dtype]["parameters"]
             for dtype in ("f32", "bf16")]
    return ("16; 20 bytes", f"{found[0]:.3f}; {found[1]:.3f} bytes",
            "runs of configuration A: f32; bf16 with `--grad_accumulation both`")


def _growth(cases):
    """Twice the batch; and the longest sequence from a parabola through 0 and the two shortest."""
    def activations(seq_len, **more):
        case = find(cases, shape_of("8B", seq_len, **more))
        return case["simulated"]["activations"], case["book"]["activations"]

    short, twice, *_, longest = estimated.BY_MODEL["seq_lens"]
    one, two, far = (activations(seq_len)[0] for seq_len in (short, twice, longest))
    quadratic = (two / twice - one / short) / (twice - short)
    parabola = longest * (one / short + quadratic * (longest - short))
    batch = activations(short, micro_batch_size=estimated.LARGER_BATCHES[0])[0] / one
    book = [ours / theirs for ours, theirs in map(activations, estimated.BY_MODEL["seq_lens"])]
    return ("batch × 2: 2; parabola: 1", f"batch × 2: {batch:.3f}; parabola: {far / parabola:.3f}",
            f"estimates of 8B, {short}…{longest} tokens: {min(book):.2f} to {max(book):.2f} of the "
            "book's formula")


def _time_of_full(modes):
    def found(attention):
        values = recomputation.relative(modes[attention, "full"], modes[attention, "none"])
        more, low, high = (100 * (value - 1) for value in values)
        return f"{more:+.0f} % ({low:+.0f} to {high:+.0f}; {attention})"

    return ("+33 %: 4 units of work for 3", "; ".join(map(found, ("naive", "blockwise"))),
            "interleaved runs of configuration A; in brackets, within one round")


def _gpt3(cases):
    none, selective = (find(cases, {**estimated.COMMON, **estimated.GPT3, "recompute": mode})
                       for mode in ("none", "selective"))
    shape = none["shape"]
    saved = 1 - (estimated.book_per_layer(shape, "selective")
                 / estimated.book_per_layer(shape, "none"))
    # 2.7 % is attention's whole share of a step, scores of all pairs of positions, forward and
    # backward.
    share = shape["seq_len"] / (6 * shape["hidden_size"])
    head = shape["vocab_size"] / (12 * shape["hidden_size"] * shape["num_layers"])
    more = share / (1 + share + head)
    found = selective["simulated"]["activations"] / none["simulated"]["activations"] - 1
    flops = f"{100 * (selective['simulated']['flops'] / none['simulated']['flops'] - 1):+.1f} %"
    return (f"{-100 * saved:.1f} %; {100 * more:+.1f} %", f"{100 * found:.1f} %; {flops}",
            "estimates at that shape, with SwiGLU and without dropout; attention's forward alone "
            "is repeated, for the pairs that the causal mask lets through")


def _per_layer(cases):
    expected, found = [], []
    for mode in MODES:
        case = find(cases, shape_of("8B", SEQUENCE, mode))
        expected.append(f"{estimated.book_per_layer(case['shape'], mode):g}")
        size = sum(case["layer"].values()) / estimated.token_channels(case["shape"])
        found.append(f"{size:.2f}")
    return ("; ".join(expected), "; ".join(found), f"estimates of 8B at {SEQUENCE} tokens: "
            + ", ".join(MODES))


def _accumulated(splits):
    reference = splits[0]["steps"]
    largest = max(abs(a / b - 1) for split in splits[1:]
                  for own, base in zip(split["steps"], reference) for a, b in zip(own, base))
    ways = ", ".join(f"{split['grad_acc_steps']} × {split['micro_batch_size']}" for split in splits)
    return ("0", f"at most {largest:.0e}", f"relative difference of losses and gradient norms over "
            f"{len(reference)} steps in f64, batches of {ways}")


def _batch_memory(batches):
    of = {(b["micro_batch_size"], b["grad_acc_steps"]): b for b in batches}
    small = min(b["micro_batch_size"] for b in batches)
    counts = sorted(count for size, count in of if size == small)
    constant = of[small, counts[-1]]["total"] / of[small, 1]["total"]
    one, two, four = (of[factor * small, 1]["activations"] for factor in (1, 2, 4))
    slope = (four - two) / (2 * (two - one))
    return (f"× {counts[-1]} micro-batches: 1; slope: 1",
            f"× {counts[-1]} micro-batches: {constant:.3f}; slope: {slope:.3f}",
            f"runs of configuration A; slope of the activations from {2 * small} to {4 * small} "
            f"samples, over that from {small} to {2 * small}")


def _second_step(profile):
    states, parameters = profile["optimizer_after"], profile["parameters"]
    return ("0, then 8 Ψ bytes; peak + 8 Ψ",
            f"{profile['optimizer_before']}, then {states / parameters:.3f} Ψ bytes; peak + "
            f"{(profile['peak_second'] - profile['peak_first']) / parameters:.3f} Ψ",
            "the run of the memory profile, in f32")


def _utilisation(modes):
    needed = modes["naive", "none"]["predicted_flops"]

    def ratios(attention):
        return ", ".join(f"{modes[attention, mode]['flops'] / needed:.3f}" for mode in MODES)

    return ("naive: 1, > 1, > 1; blockwise: > 1",
            f"naive: {ratios('naive')}; blockwise: {ratios('blockwise')}",
            f"HFU / MFU: operations that runs of configuration A counted ({', '.join(MODES)}), over "
            "those that the formula needs; blockwise attention always computes its scores again")


def _llama_1b(cases):
    case = find(cases, LLAMA_1B)
    parameters = estimated.llama_parameters(case["shape"])
    if parameters != case["parameters"]:
        raise BookError(f"Llama 1B has {case['parameters']} parameters, by its shape {parameters}")
    expected = [each * parameters / GIB for each in (4, 4, 8)]
    found = [case["simulated"][name] / GIB for name in STATES]
    return ("; ".join(f"{value:.2f}" for value in expected),
            "; ".join(f"{value:.2f}" for value in found) + " GiB",
            f"estimate, {parameters:,} parameters with tied embeddings")
