"""What recomputation costs and saves, measured: memory, operations, time.

Every mode and every kind of attention take turns, in configuration A of `./book bench`.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.bench import CONFIGS, QUIET_FLAGS, SKIPPED_STEPS
from tools.book.rounds import measure_again, with_range
from tools.look import memory, runs
from tools.run import estimates

from .cases import MODES

ROUNDS, STEPS = 5, 10
SHAPE = {**CONFIGS["A"], "dtype": "f32"}
CASES = [(attention, mode) for attention in ("naive", "blockwise") for mode in MODES]


def run(program, run_dir, **flags):
    """Trains quietly; (records of metrics.jsonl, run.json). BookError if it fails."""
    flags = {**QUIET_FLAGS, **flags, "run_dir": run_dir}
    estimates.output_of([str(program), *estimates.words_of(flags)])
    return runs.read_metrics(run_dir)[0], runs.read_run(run_dir)


def one_round(program, attention, mode):
    """What one run of a case measures; its first step is recorded and, with others, not timed."""
    with tempfile.TemporaryDirectory(prefix="book_recomputation_") as scratch:
        run_dir = Path(scratch) / "run"
        records, _ = run(program, run_dir, **SHAPE, attention=attention, recompute=mode,
                         steps=STEPS, trace_steps=1)
        recorded = memory.load(run_dir)
    timed = records[SKIPPED_STEPS:]
    forward = recorded.first("forward", 1)
    return {**{name: statistics.median(float(record[name]) for record in timed)
               for name in ("step_ms", "mfu", "hfu", "flops")},
            "kept_bytes": recorded.live_at(forward.end)["activations"],
            "peak_bytes": int(records[-1]["peak_bytes"]["activations"])}


def summarise(cases):
    """Adds to every case the medians over its rounds."""
    for case in cases:
        for name in case["rounds"][0]:
            case[name] = statistics.median(r[name] for r in case["rounds"])
    return cases


def relative(case, base):
    """(ratio, low, high) of two cases' steps: of their medians, and the extremes within a round."""
    within = [own["step_ms"] / other["step_ms"]
              for own, other in zip(case["rounds"], base["rounds"])]
    return case["step_ms"] / base["step_ms"], min(within), max(within)


def measure(program):
    """[{attention, recompute, predicted_..., rounds, and medians over them}]"""
    cases = []
    for attention, mode in CASES:
        found = estimates.estimate(program, {**SHAPE, "attention": attention, "recompute": mode})
        cases.append({"attention": attention, "recompute": mode,
                      "predicted_bytes": found["predicted"]["activations"],
                      "predicted_flops": found["predicted"]["flops"], "rounds": []})
    for number in range(ROUNDS):
        for case in cases:
            case["rounds"].append(one_round(program, case["attention"], case["recompute"]))
            say(f"book: round {number + 1}/{ROUNDS}  {case['attention']} {case['recompute']}  "
                f"{case['rounds'][-1]['step_ms']:.0f} ms")
    for case in cases:
        own = (case["attention"], case["recompute"])
        measure_again(case["rounds"], " ".join(own), lambda each: {"step_ms": each["step_ms"]},
                      lambda own=own: one_round(program, *own))
    return summarise(cases)


def without(record):
    """{kind of attention: its case without recomputation}"""
    return {case["attention"]: case for case in record["recomputation"]
            if case["recompute"] == "none"}


def table(record):
    """What every case keeps and computes, as Markdown: the same on every machine."""
    rows = [f"| {case['attention']} | {case['recompute']} | {mib(case['predicted_bytes'])} | "
            f"{mib(case['kept_bytes'])} | {case['kept_bytes'] / case['predicted_bytes']:.3f} | "
            f"{mib(case['peak_bytes'])} | {1e-9 * case['predicted_flops']:.2f} | "
            f"{1e-9 * case['flops']:.2f} | {case['flops'] / case['predicted_flops']:.4f} |"
            for case in record["recomputation"]]
    return ("| attention | recompute | kept, predicted | kept, measured | ratio | peak | "
            "GFLOP, predicted | GFLOP, executed | ratio |\n|---|---|---|---|---|---|---|---|---|\n"
            + "\n".join(rows) + "\n\nActivations in MiB: what forward leaves for backward, and the "
            "most at any time. Operations of one step.\n")


def times_table(record):
    """How long a step of every case takes, as Markdown."""
    rows, base = [], without(record)
    needed = base["naive"]["predicted_flops"]  # nothing is computed twice
    for case in record["recomputation"]:
        operations = case["predicted_flops"] / base[case["attention"]]["predicted_flops"]
        ratio, low, high = relative(case, base[case["attention"]])
        found = "" if case["recompute"] == "none" else with_range(ratio, low, high)
        rows.append(f"| {case['attention']} | {case['recompute']} | {operations:.2f} | "
                    f"{case['step_ms']:.1f} | {found} | {1e-6 * needed / case['step_ms']:.0f} | "
                    f"{1e-6 * case['flops'] / case['step_ms']:.0f} |")
    return ("| attention | recompute | operations, × none | step, ms | time, × none (in one round) | "
            "needed GFLOP/s | executed GFLOP/s |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(rows) + "\n\nMedians of "
            f"{len(record['recomputation'][0]['rounds'])} interleaved rounds; in brackets the lowest "
            "and the highest ratio of two runs of one round.\n")


def mib(size):
    return f"{size / 2**20:,.1f}"
