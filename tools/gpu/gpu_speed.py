"""The parts of ./book gpu-check that measure speed. It fails none: they say whether what is asked of a
GPU is reached."""
import csv
import io
import json
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tools.base import ROOT
from tools.gpu.gpu_part import (BILLION, NO_TIME, SKIPPED_STEPS, SMALL_MODEL, Fail, Late, Skip, asked, billion,
                                difference, json_line, lacks_bf16, largest_difference, middle, needs_cublas, train,
                                words_of)
from tools.gpu.tolerances import TOLERANCES
from tools.process import output_of
from tools.run import gpu

FIND_TORCH_S = 25  # to load it from a cold disk
TRACED_STEPS = 8  # the last of them is looked at, those behind the first ones are timed
PROFILED_STEPS = 3
ROUNDS = 3  # of two programs in turns, as many as there is time for
TORCH_TRAINING = ROOT / "tools" / "bench" / "torch_bench.py"
TORCH_PRODUCTS = ROOT / "tools" / "bench" / "torch_products.py"
TORCH_ATTENTION = ROOT / "tools" / "bench" / "torch_attention.py"
SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "seq_len", "micro_batch_size", "dtype")
# What is asked of a GPU.
LEAST_OF_TORCH, LEAST_MFU, MOST_IDLE = 0.75, 0.30, 0.05
ON_TENSOR_CORES = "Attention ran on tensor cores"  # of a report
LEAST_OF_PRODUCTS, LEAST_OF_COPY, MOST_TRACED, MOST_FROM_PROFILER = 0.95, 0.8, 0.02, 0.05
LEAST_OF_FUSED = 0.9  # of the copy's rate
LEAST_OF_CUBLAS = {"mma": 0.6, "persistent": 0.95}
LARGE = 8192  # rows, columns and depth, at which the last rung is timed once more
LEAST_OF_COALESCED = 8  # times its time that naive's takes; the book has about 10
# Sizes with tails in every tile: each rung is compared there with what it is timed beside.
TAILS = tuple({**flags, "seconds": 0} for flags in (
    {"measure": "matmul", "m": 130, "n": 264, "k": 72},
    *({"measure": measure, "seq_len": 150, "num_heads": 2, "causal": True} for measure in ("attention", "backward")),
    {"measure": "decoding", "seq_len": 1000, "num_heads": 8}, {"measure": "ideas", "m": 33, "n": 70}))
# Of FlashAttention-3's rate, forward and, by kernels that sum in a fixed order, backward; of naive's time.
LEAST_OF_FLASH_3 = {"forward": 0.85, "backward": 0.46}
LEAST_OF_NAIVE = 5
LITTLE_SHARED = ("8.6", "8.9", "12.0", "12.1")  # too little for heads of 192 channels
# TFLOP/s that others have reached at 1,024, 2,048, 4,096 and 8,192 positions: docs/gpu.md says who. As many heads as
# make PUBLIC_ROWS queries.
PUBLIC_ROWS, LENGTHS = 131072, (1024, 2048, 4096, 8192)
PUBLIC = {("forward", True): (364, 560, 667, 685), ("forward", False): (541, 618, 628, 639),
          ("backward", True): (182, 316, 444, 539)}
# Model FLOPs of the data sheet's rate, of fused kernels with 65,536 tokens a step.
OF_A_STEP = {"dtype": "bf16", "seq_len": 4096, "attention": "blockwise", "kernels": "fused", "steps": 6}
AIMS = (("1B", 0.57, {"model": "1B", "micro_batch_size": 1, "grad_acc_steps": 16}),
        ("two layers of a 7B model's shape", 0.60, {
            "hidden_size": 4096, "num_layers": 2, "num_heads": 32, "num_kv_heads": 32, "ffn_hidden_size": 11008,
            "vocab_size": 32000, "micro_batch_size": 4, "grad_acc_steps": 4}))
LEAST_OF_COMPILED = 1.0  # of tokens a second of torch.compile, by fused kernels
WAITS_OF_A_STEP = 2  # at its end: for the loss and for the gradient norm
SHORTEST_US = 50  # of an operation whose time is compared: events and launches take some themselves


def _bench(check, measure, **flags):
    """What gpu_bench prints of it; on the emulated device of small tensors, each call once."""
    small = {"tokens": 16, "seconds": 0} if check.emulated else {}
    return json_line(check.output([check.program("gpu_bench"), "--measure", measure,
                                   *words_of({**flags, **small})]))


def run_products(check):
    """Squares and the products of the model's layers beside the data sheet and, in turns, beside
    torch.matmul."""
    needs_cublas(check)
    flags = {"model": "tiny"} if check.emulated else billion(check)
    flags = {"model": flags["model"],
             "tokens": flags.get("micro_batch_size", 1) * flags.get("seq_len", 1)}
    sheet = {} if check.emulated else gpu.data_sheet(check.gpus[0].name)
    python, text = (None, "not asked for") if check.emulated else find_torch()
    ours, theirs = [], []
    for _ in check.turns(ROUNDS if python else 1):
        ours.append(_bench(check, "products", **flags))
        try:
            if python:
                theirs.append(json_line(check.output([python, str(TORCH_PRODUCTS),
                                                      json.dumps(ours[-1])])))
        except Fail as fail:
            text += f": {fail}"
            theirs = []
            break
    text = f"{ours[0][0]['library']}; {text}" + (f" with {theirs[0][0]['library']}" if theirs else "")
    rows, of_torch = [], []
    for number, each in enumerate(ours[0]):
        rate = statistics.median(found[number]["tflops"] for found in ours)
        peak = sheet.get(each["dtype"])
        row = {name: each[name] for name in ("product", "dtype", "m", "n", "k")}
        row.update({"TFLOP/s": NO_TIME if check.emulated else round(rate, 2),
                    "data sheet": peak or "unknown", "fraction": f"{rate / peak:.2f}" if peak else ""})
        if theirs:
            share = statistics.median(mine[number]["tflops"] / other[number]["tflops"]
                                      for mine, other in zip(ours, theirs))
            row["torch.matmul"] = round(statistics.median(found[number]["tflops"]
                                                          for found in theirs), 2)
            row["of torch"] = f"{share:.2f}"
            if each["product"] != "square":
                of_torch.append(share)
        rows.append(row)
    return {f"products; {text}": rows, "what is asked": [asked(
        "rate of the model's products, of torch.matmul's, the lowest",
        min(of_torch, default=None), least=LEAST_OF_PRODUCTS)]}


def find_torch():
    """(The first Python whose torch sees a GPU or None, which torch in words)."""
    for python in gpu.find_pythons():
        found = output_of([python, "-c", "import torch; assert torch.cuda.is_available(); "
                                         "print(torch.__version__)"], timeout=FIND_TORCH_S)
        if found is not None:
            return python, f"torch {found.strip().splitlines()[-1]}"
    return None, "no Python here has a torch that sees the GPU"


def run_memory(check):
    """Memory-bound kernels beside a copy, and the copy beside the data sheet."""
    needs_cublas(check)
    rows = _bench(check, "memory")
    peak = None if check.emulated else gpu.data_sheet(check.gpus[0].name).get("memory")
    held = [row for row in rows if row["held"]]
    if not held:
        raise Fail("it timed no kernel")
    least = min(held, key=lambda row: row["of_copy"])
    fused = [row["of_copy"] for row in held if row["kernel"].startswith("fused")]
    return {f"memory; data sheet: {f'{peak} GB/s' if peak else 'unknown'}": [
        {"kernel": row["kernel"], "us": NO_TIME if check.emulated else row["us"],
         "GB/s": NO_TIME if check.emulated else row["gb_per_s"],
         "of the copy": NO_TIME if check.emulated else row["of_copy"],
         "memory-bound": "yes" if row["held"] else "no"} for row in rows],
        "what is asked": [asked(
            "rate of memory-bound kernels, of the copy's, the lowest"
            + ("" if check.emulated else f": {least['kernel']}"),
            None if check.emulated else least["of_copy"], least=LEAST_OF_COPY), asked(
            "of fused ones, the lowest", None if check.emulated else min(fused, default=None),
            least=LEAST_OF_FUSED)]}


def _race(check, flags, small):
    """(The records of ladder_bench that have times, the others); on the emulated device of small sizes."""
    flags = {"seconds": 0.02, **flags, **({**small, "seconds": 0} if check.emulated else {})}
    text = check.output([check.program("ladder_bench"), *words_of(flags)])
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    timed = [record for record in records if "ms" in record]
    if not timed:
        raise Fail("it timed no rung")
    return timed, [record for record in records if "why" in record]


def _race_rows(check, timed, rate="tflops", head="TFLOP/s"):
    """A row of the report for each record; the first one of a type is what the others stand beside."""
    return [{"rung": record["name"], "type": record["type"], "difference": record["error"],
             **{name: NO_TIME if check.emulated else record[key]
                for name, key in (("ms", "ms"), ("spread", "spread"), (head, rate),
                                  (f"of {timed[0]['name']}", "of_first"))}} for record in timed]


def run_ladder(check):
    """The rungs of chapter 9's product, each compared and timed in turns with cuBLAS, of 4,096 x 4,096 matrices, and
    the last of them of larger ones; all rungs at sizes with tails; those of one idea."""
    needs_cublas(check)
    small = {"m": 64, "n": 72, "k": 80}
    tails = []
    for flags in TAILS:
        if flags["measure"] in ("backward", "decoding") and lacks_bf16(check):
            continue
        timed, _ = _race(check, flags, {})
        tails += [{"measure": flags["measure"], "rung": record["name"], "difference": record["error"]}
                  for record in timed]
    timed, left_out = _race(check, {}, small)
    ms = {record["name"]: record["ms"] for record in timed}
    share = {(record["name"], 4096): record["of_first"] for record in timed}
    figures = {"": _race_rows(check, timed)}
    if "persistent" in ms:
        large, _ = _race(check, {"rung": "persistent", **dict.fromkeys("mnk", LARGE)}, small)
        share |= {(record["name"], LARGE): record["of_first"] for record in large}
        figures[f"{LARGE:,}"] = _race_rows(check, large)
    ideas, _ = _race(check, {"measure": "ideas"}, small)
    figures["one idea; GB/s of a number in and a number out"] = [
        {name: row[name] for name in ("rung", "difference", "ms", "spread", "GB/s")}
        for row in _race_rows(check, ideas, "gb_per_s", "GB/s")]
    times = ms["naive"] / ms["coalesced"] if {"naive", "coalesced"} <= set(ms) else None
    asked_of = [(name, 4096, least) for name, least in LEAST_OF_CUBLAS.items()] + [
        ("persistent", LARGE, LEAST_OF_CUBLAS["persistent"])]
    return {**figures, "tails": tails,
            **({"not here": [{"rung": each["name"], "why": each["why"]} for each in left_out]} if left_out else {}),
            "what is asked": [
                *(asked(f"rate of {name} at {size:,}, of cuBLAS's", None if check.emulated else share.get((name, size)),
                        least=least) for name, size, least in asked_of),
                asked("time of naive, of coalesced's", None if check.emulated else times, least=LEAST_OF_COALESCED)]}


def _race_attention(check, shape, rungs=(None, None)):
    """{pass: {rung: record}} of chapter 9's rungs at a shape, in the words of ladder_bench: of all rungs, or of one
    in each pass."""
    found = {}
    for name, measure, rung in zip(("forward", "backward"), ("attention", "backward"), rungs):
        timed, _ = _race(check, {"measure": measure, **({"rung": rung} if rung else {}),
                                 **{flag: value for flag, value in shape.items() if value is not False}}, {})
        found[name] = {record["name"]: record for record in timed}
    return found


def run_attention(check):
    """The rungs of chapter 9's attention, in turns with PyTorch's and with FlashAttention-3."""
    needs_cublas(check)
    if lacks_bf16(check):
        raise Skip(lacks_bf16(check))
    shape = {"seq_len": 64, "num_heads": 1, "head_dim": 64} if check.emulated else {
        "seq_len": 4096, "num_heads": 16, "head_dim": 128}
    python, text = (None, "not asked for") if check.emulated else find_torch()
    figures, asked_of_lengths = _other_shapes(check)
    shares, runs = {}, {causal: ([], []) for causal in (False, True)}
    for _ in check.turns(ROUNDS if python else 1):
        for causal, (ours, theirs) in runs.items():
            ours.append(_race_attention(check, {**shape, "causal": causal}))
            if python:
                try:
                    theirs.append(json_line(check.output([python, str(TORCH_ATTENTION),
                                                          json.dumps({**shape, "causal": causal})])))
                except Fail as fail:
                    python, text = None, f"{text}: {fail}"
    for causal, (ours, theirs) in runs.items():
        rows, why = _attention_rows(check, ours, theirs)
        figures[f"{'causal' if causal else 'no mask'}; {text}"] = rows
        if why:
            figures[f"{'causal' if causal else 'no mask'}: not here"] = why
        for side, rung in (("forward", "flash_3"), ("backward", "flash_3_backward")):
            shares[side, causal] = _ratio(ours, theirs, side, rung)
        if not causal:
            of_naive = None if check.emulated or "flash_3" not in ours[0]["forward"] else statistics.median(
                each["forward"]["naive"]["ms"] / each["forward"]["flash_3"]["ms"] for each in ours)
    return {**figures, "what is asked": [
        *(asked(f"rate of {'flash_3' if side == 'forward' else 'flash_3_backward'}"
                f"{', causal' if causal else ''}, of FlashAttention-3's", share, least=LEAST_OF_FLASH_3[side])
          for (side, causal), share in shares.items() if side == "forward" or causal),
        asked("time of naive in f32, of flash_3's in bf16", of_naive, least=LEAST_OF_NAIVE), *asked_of_lengths]}


def _other_shapes(check):
    """(Figures of other lengths, wide heads and a single query, rows of what is asked): as many as there is time for,
    on cards that have flash_3."""
    wide = {"seq_len": 4096, "num_heads": 16, "head_dim": 192, "causal": True}
    small = {"seq_len": 70, "num_heads": 1, "head_dim": 64} if check.emulated else {}
    lacks_shared = any(each.capability in LITTLE_SHARED for each in check.gpus[:1])
    found = {} if lacks_shared else _race_attention(check, {**wide, **small, "head_dim": 192})
    decoding = [dict(row, keys=keys) for keys in (4096, 65536)[:1 if check.emulated else 2] for row in _race_rows(
        check, _race(check, {"measure": "decoding", "num_heads": 32, "seq_len": keys},
                     {"num_heads": 4, "seq_len": 256, "head_dim": 64})[0], "gb_per_s", "GB/s")]
    figures = {"heads of 192 channels, values of 128, causal": [
        {"pass": side, **row} for side, records in found.items() for row in _race_rows(check, [*records.values()])],
        "one query": decoding}
    rows, asked_of = [], []
    cases = [(length, causal) for length in LENGTHS for causal in (True, False)]
    cases = cases[:1] if check.emulated else cases if "flash_3" in found.get("forward", ()) else []
    for _, (length, causal) in zip(check.turns(len(cases)), cases):
        shape = {"seq_len": length, "num_heads": PUBLIC_ROWS // length, "head_dim": 128, **small, "causal": causal}
        records = _race_attention(check, shape, ("flash_3", "flash_3_backward"))
        for side, rung in (("forward", "flash_3"), ("backward", "flash_3_backward")):
            rate = None if check.emulated else records[side][rung]["tflops"]
            rows.append({"pass": side, "mask": "causal" if causal else "none", "positions": length,
                         "TFLOP/s": rate or NO_TIME})
            if (side, causal) in PUBLIC:
                asked_of.append(asked(
                    f"rate of {rung}{', causal' if causal else ''}, at {length:,}, of the public one",
                    rate and rate / PUBLIC[side, causal][LENGTHS.index(length)], least=LEAST_OF_FLASH_3[side]))
    return {**figures, **({"flash_3 and its backward": rows} if rows else {})}, asked_of


def _ratio(ours, theirs, side, rung, name="FlashAttention-3"):
    """Of the rates of a rung and of theirs in its round, the median; None where one was not timed."""
    found = [other[name][side] / mine[side][rung]["ms"] for mine, other in zip(ours, theirs)
             if side in other.get(name, {}) and rung in mine[side]]
    return statistics.median(found) if found else None


def _attention_rows(check, ours, theirs):
    """(A row for each rung and for each of theirs, a row for each of theirs that does not run)."""
    def row(side, name, kind, times, flops):
        ms = statistics.median(times)
        return {"pass": side, "by": name, "type": kind, **dict(zip(("ms", "TFLOP/s"), (
            (NO_TIME, NO_TIME) if check.emulated else (round(ms, 4), round(flops / ms, 1)))))}

    rows = []
    for side in ("forward", "backward"):
        records = ours[0][side]
        flops = next(record["tflops"] * record["ms"] for record in records.values())
        rows += [row(side, name, record["type"], [each[side][name]["ms"] for each in ours], flops)
                 for name, record in records.items()]
        rows += [row(side, name, "bf16", [each[name][side] for each in theirs if side in each[name]], flops)
                 for name in (theirs[0] if theirs else ()) if side in theirs[0][name]]
    why = [{"by": name, "why": found["why"]} for name, found in (theirs[0].items() if theirs else ())
           if "why" in found]
    return rows, why


def _train_torch(check, python, config, **flags):
    """The milliseconds of the median step of PyTorch on a model of that shape."""
    words = words_of({**{name: config[name] for name in SHAPE}, "device": "cuda",
                      "steps": BILLION["steps"], **flags})
    text = check.output([python, str(TORCH_TRAINING), *words])
    return float(middle([json.loads(line) for line in text.splitlines()
                         if line.startswith("{")])["step_ms"])


def _one_training(check, flags):
    """(The median step, run.json) of the first chapter."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        step = middle(train(check, "cuda", flags, Path(scratch) / "run"))
        run = json.loads((Path(scratch) / "run" / "run.json").read_text(encoding="utf-8"))
    return step, run


def _of_peak(check, mfu, run):
    """Model FLOPs of the data sheet's dense rate; None where we know none."""
    peak = gpu.data_sheet(check.gpus[0].name).get("bf16")
    return mfu * float(run["matmul_gflops"]) / 1000 / peak if peak else None


def _training_row(check, flags, steps, run):
    """(A row of the report, MFU of the data sheet) of median steps."""
    found = {name: statistics.median(float(record[name]) for record in steps)
             for name in ("tokens_per_s", "step_ms", "mfu")}
    of_peak = _of_peak(check, found["mfu"], run)
    return {**{name: flags[name] for name in ("model", "dtype", "attention", "seq_len",
                                              "micro_batch_size")},
            "rounds": len(steps), "tokens/s": found["tokens_per_s"], "step ms": found["step_ms"],
            "MFU, of the measured products": f"{found['mfu']:.3f}",
            "MFU, of the data sheet": "unknown" if of_peak is None else f"{of_peak:.3f}"}, of_peak


def run_training(check):
    """The speed of the first chapter on a model of a billion parameters, in turns with PyTorch."""
    needs_cublas(check)
    flags = billion(check)
    python, text = find_torch()
    ours, theirs = [], []
    # Each in a process of its own: the GPU's memory does not hold both.
    for _ in check.turns(ROUNDS if python else 1):
        step, run = _one_training(check, flags)
        ours.append(step)
        if python:
            try:
                theirs.append(_train_torch(check, python, run["config"]))
            except Fail as fail:
                text += f": {fail}"
                break
    row, of_peak = _training_row(check, flags, ours, run)
    of_torch = None
    if theirs:
        row["step ms, PyTorch"] = round(statistics.median(theirs), 3)
        of_torch = statistics.median(ms / float(record["step_ms"])
                                     for ms, record in zip(theirs, ours))
    return {f"the median step; {text}": [row], "what is asked": [
        asked("tokens/s, of PyTorch's", of_torch, least=LEAST_OF_TORCH),
        asked("MFU, of the data sheet", of_peak, least=LEAST_MFU)]}


def idle_share(events):
    """The part of the time from a step's first kernel to its last in which the device had none.

    events: the step's operations. Where the host was late, the device counts as idle until all
    kernels of the operation were queued. Gaps between kernels of one operation are not seen.
    """
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["args"]["queued"])
                   for event in events)
    if not spans:
        raise Fail("the trace has no operations of the step")
    first, done, _ = spans[0]
    idle = 0.0
    for begin, end, queued in spans[1:]:
        begin = min(max(begin, queued), end)
        idle += max(0.0, begin - done)
        done = max(done, end)
    return idle / (done - first)


def _device_ops(run_dir):
    """The operations of a trace as the device carried them out."""
    trace = json.loads((Path(run_dir) / "trace.json").read_text(encoding="utf-8"))
    return [event for event in trace["traceEvents"] if event.get("cat") == "device op"]


def run_steps(check):
    """What a step leaves to the host: how long the device is idle, how often the host waits; and what
    it costs to trace a step, in turns with steps that are not traced."""
    needs_cublas(check)
    flags = {**(SMALL_MODEL if check.emulated else billion(check)), "steps": TRACED_STEPS}
    traced, untraced, counts, events = [], [], [], []
    for number in check.turns(1 if check.emulated else ROUNDS):
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
            run_dir = Path(scratch) / "traced"
            records = train(check, "cuda", {**flags, "trace_steps": TRACED_STEPS}, run_dir)
            if number == 0:
                # The counter goes on from step to step, and so counts nothing before the first one's
                # end.
                counts, events = [record["host_waits"] for record in records], _device_ops(run_dir)
            traced.append(float(middle(records)["step_ms"]))
            records = train(check, "cuda", flags, Path(scratch) / "untraced")
            untraced.append(float(middle(records)["step_ms"]))
    waits = max((after - before for before, after in zip(counts, counts[1:])), default=None)
    last = [event for event in events if event["args"]["step"] == TRACED_STEPS]
    figures = {"": [
        asked("host waits of a step, for its loss and its norm", waits, most=WAITS_OF_A_STEP),
        asked("idle share between the first and the last kernel",
              None if check.emulated else idle_share(last), most=MOST_IDLE),
        asked("what tracing adds to a step", None if check.emulated else statistics.median(
            ours / without for ours, without in zip(traced, untraced)) - 1, most=MOST_TRACED)]}
    if waits is None or waits > WAITS_OF_A_STEP:
        raise Fail("the host waits for the device before the end of a step", figures)
    return figures


def _fused_row(check, chapter, flags):
    """(A row of the report, metrics.jsonl, its configuration) of a run with these kernels. Of the steps
    that are timed the first is traced."""
    traced = SKIPPED_STEPS + 1
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        run_dir = Path(scratch) / "run"
        records = train(check, "cuda", {**flags, "trace_steps": traced}, run_dir, chapter=chapter,
                        env={**check.rank_environment(), "USP_MATMUL_SECONDS": "0"})
        step = middle(records)
        events = [event for event in _device_ops(run_dir) if event["args"]["step"] == traced]
        report = (run_dir / "report.md").read_text(encoding="utf-8")
        config = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["config"]
    row = {"kernels": flags["kernels"], "launches a step": records[-1]["launches"] - records[-2]["launches"],
           "attention on tensor cores": "yes" if ON_TENSOR_CORES in report else "no"}
    times = {"tokens/s": float(step["tokens_per_s"]), "step ms": float(step["step_ms"]),
             "idle share": idle_share(events)}
    return {**row, **(dict.fromkeys(times, NO_TIME) if check.emulated else times)}, records, config


def _fused_chapter(check):
    """The newest chapter; Skip where it has no fused kernels."""
    chapter = list(check.place.layouts)[-1] if check.place.layouts else ""
    if not chapter or "--kernels" not in check.output([check.program(chapter), "--help"],
                                                      env=check.rank_environment()):
        raise Skip("no chapter with fused kernels is here")
    return chapter


def run_fused(check):
    """The newest chapter's fused kernels beside its reference ones, which are chapter 1's, in turns: what
    they learn, tokens a second, launches of a step, idle share. Once beside them PyTorch, compiled."""
    needs_cublas(check)
    chapter = _fused_chapter(check)
    flags = {**SMALL_MODEL, "dtype": "bf16", "head_dim": 64} if check.emulated else billion(check)
    python, text = (None, "not asked for") if check.emulated else find_torch()
    found, compiled = {"reference": [], "fused": []}, None
    for number in check.turns(1 if check.emulated else ROUNDS):
        for kernels, runs in found.items():
            runs.append(_fused_row(check, chapter, {**flags, "attention": "blockwise", "kernels": kernels}))
        if python and number == 0:  # to compile takes longer than a round
            try:
                compiled = _train_torch(check, python, found["fused"][0][2], compile=True)
            except Fail as fail:
                text += f": {fail}"
    rows = []
    for runs in found.values():
        last = dict(runs[-1][0])
        if not check.emulated:
            last.update({name: round(statistics.median(row[name] for row, *_ in runs), 4)
                         for name in ("tokens/s", "step ms", "idle share")})
        rows.append({**last, "rounds": len(runs)})
    figures = {f"{chapter}, {flags.get('model', 'a small model')} in bf16, --attention blockwise; {text}": rows,
               "what is asked": [asked("tokens/s of fused kernels, of compiled PyTorch's",
                                       compiled and compiled / rows[1]["step ms"], least=LEAST_OF_COMPILED)]}
    far = largest_difference(found["fused"][0][1], found["reference"][0][1], "loss")
    if not far <= TOLERANCES["steps"]["bf16"]:
        raise Fail(f"fused kernels learn otherwise than the reference: losses differ by {far:.1e}", figures)
    return figures


def run_aims(check):
    """Model FLOPs of the newest chapter's fused kernels with 65,536 tokens a step, of the data sheet's rate."""
    needs_cublas(check)
    if lacks_bf16(check):
        raise Skip(lacks_bf16(check))
    chapter = _fused_chapter(check)
    rows, aims = [], []
    for name, least, flags in AIMS:
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
            try:
                step = middle(train(check, "cuda", {**OF_A_STEP, **flags}, Path(scratch) / "run", chapter=chapter,
                                    env=check.rank_environment()))
            except Late:
                aims.append(asked(f"MFU of {name}, of the data sheet", None, least=least))
                continue
            run = json.loads((Path(scratch) / "run" / "run.json").read_text(encoding="utf-8"))
        of_peak = _of_peak(check, float(step["mfu"]), run)
        rows.append({"model": name, "tokens/s": step["tokens_per_s"], "step ms": step["step_ms"]})
        aims.append(asked(f"MFU of {name}, of the data sheet", of_peak, least=least))
    if not rows:
        raise Skip("no time is left")
    return {f"{chapter}, fused, {OF_A_STEP['seq_len']} positions": rows, "what is asked": aims}


def run_examples(check):
    """Chapter 9's examples in PyTorch: our LayerNorm and the book's ELU beside PyTorch's."""
    examples = ROOT / "ch09_gpu_kernels" / "examples"
    if not examples.is_dir():
        raise Skip("a bundle has no examples")
    python, text = find_torch()
    if python is None:
        raise Skip(text)
    figures = {}
    for name in ("layer_norm", "elu"):
        try:
            lines = check.output([python, str(examples / f"{name}.py")]).splitlines()
        except Late as late:
            if not figures:
                raise Skip(f"there is too little time to compile: {late}") from late
            break
        figures.update(read_table(lines))
    return figures


def read_table(lines):
    """{title: rows} of an example's output: a title, a line of heads, and lines of as many numbers."""
    at = next((i for i, line in enumerate(lines) if re.match(r"\w+ of .* on ", line)), None)
    if at is None or at + 2 >= len(lines):
        raise Fail("it printed no table")
    heads = re.split(r"\s{2,}", lines[at + 1].strip())
    rows = []
    for line in lines[at + 2:]:
        cells = line.split()
        rows.append(dict(zip(heads if len(cells) == len(heads) else ["by", *heads], cells)))
    return {lines[at]: rows}


def read_ranges(text):
    """{range: (how often, median us)}: what Nsight Systems prints, with --format csv, of the ranges
    of NVTX from the first to the last kernel of each."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if re.match(r'"?Range"?,', line)), None)
    if head is None:
        return {}
    return {row["Range"].lstrip(":"): (int(row["Range Instances"].replace(",", "")),
                                       float(row["Proj Med (ns)"].replace(",", "")) / 1e3)
            for row in csv.DictReader(io.StringIO("\n".join(lines[head:])))
            if row.get("Proj Med (ns)")}


def compare_spans(events, ranges):
    """(rows, the largest difference): by name, spans of the device and what a profiler has of them."""
    durations = defaultdict(list)
    for event in events:
        durations[event["name"]].append(float(event["dur"]))
    rows, worst = [], None
    for name, found in sorted(durations.items()):
        times, theirs = ranges.get(name, (0, float("nan")))
        ours = statistics.median(found)
        if ours < SHORTEST_US:
            continue
        far = difference(ours, theirs)
        worst = max(far, worst or 0.0)
        rows.append({"operation": name, "spans": len(found), "ranges": times,
                     "median us": f"{ours:.1f}", "Nsight Systems, us": f"{theirs:.1f}",
                     "difference": f"{far:.3f}"})
    return rows, worst


def run_timeline(check):
    """Spans of the device's lane beside Nsight Systems' times of the same operations."""
    needs_cublas(check)
    profiler = gpu.find_tool("nsys")
    if profiler is None:
        raise Skip("nsys (Nsight Systems) is not here")
    flags = {**billion(check), "steps": PROFILED_STEPS, "trace_steps": PROFILED_STEPS}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        report = Path(scratch) / "steps.nsys-rep"
        train(check, "cuda", flags, Path(scratch) / "run", before=[
            profiler, "profile", "--trace", "cuda,nvtx", "--sample", "none", "--cpuctxsw", "none",
            "--output", str(report)])
        ranges = read_ranges(check.output([profiler, "stats", "--report", "nvtx_gpu_proj_sum",
                                           "--format", "csv", str(report)]))
        rows, worst = compare_spans(_device_ops(Path(scratch) / "run"), ranges)
    if not ranges:
        raise Fail("nsys shows no ranges of NVTX")
    return {f"operations of at least {SHORTEST_US} us": rows, "what is asked": [asked(
        "largest difference from Nsight Systems", worst, most=MOST_FROM_PROFILER)]}
