"""From how many tokens of a rank on does its computing hide the messages (QA3.3, QA3.4)?

Runs with more and more samples in a micro-batch are recorded. The ratio of the page on collectives says which
bandwidth hides half of a run's messages; replays on other links find it. Twice that is enough to hide them.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links
from tools.look import trace
from tools.run import build, estimates

from . import overlap

RANKS = 2
SAMPLES = (1, 2, 4, 8)  # of a micro-batch
SHAPE = {"num_layers": 12, "seq_len": 128, "bucket_mb": 0.8}
# {way: (flags, messages in units of (dp-1)/dp of the gradients, phases that hide them)}
WAYS = {"data parallelism": ({}, 2, ("backward",)), "ZeRO-3": ({"zero_stage": 3}, 3, ("forward", "backward"))}
OPERATIONS = {"forward": 2, "backward": 4}  # a parameter and token
BYTES = 4               # of a gradient, and of a weight
HALF = 0.5              # of the messages' time that is waited for on the links that are looked for
LINK_OF = 2             # samples with which data parallelism hides half of its messages on the link of the table
PASSES = 20             # of the search, in each of which the bandwidth is known twice as well
LIMITS = (0.001, 1000)  # GB/s, between which it lies


def measure(chapter):
    """{gb_per_s: the table's link, parameters, runs: [{way, samples, computing_ms: of the phases that hide,
    half_gb_per_s: by replays, exposed: share on the table's link}]}"""
    found, recordings = [], []
    program = build.binary(build.RELEASE, chapter.name)
    parameters = estimates.estimate(program, {**SHAPE, "dp_size": RANKS})["parameters"]
    with tempfile.TemporaryDirectory(prefix="book_tokens_") as scratch:
        for way, (flags, _, phases) in WAYS.items():
            for samples in SAMPLES:
                say(f"book: {way} with micro-batches of {samples}")
                recorded = overlap.run(chapter, Path(scratch) / f"{len(found)}", **SHAPE, **flags,
                                       micro_batch_size=samples)
                recordings.append(recorded)
                found.append({"way": way, "samples": samples, "computing_ms": computing(recorded, phases)})
        link_of = next(own for own in found if own["samples"] == LINK_OF)
        gb_per_s = half_hidden(link_of, parameters)
        for own, recorded in zip(found, recordings):
            own["half_gb_per_s"] = _search(recorded)
            own["exposed"] = exposed(recorded, gb_per_s)
    return {"gb_per_s": gb_per_s, "ranks": RANKS, "parameters": parameters, "runs": found}


def computing(recorded, phases):
    """Milliseconds of CPU time that a rank's phases take in a later step: medians over steps, mean of the ranks."""
    steps = sorted(trace.steps(recorded))[SKIPPED_STEPS:]
    return statistics.fmean(statistics.median(
        sum(span.cpu_duration for span in rank.spans
            if span.category == "phase" and span.name in phases and span.step == step) / 1000
        for step in steps) for rank in recorded.ranks)


def sent_bytes(way, parameters):
    """What a rank sends in a step, by formula."""
    return WAYS[way][1] * (RANKS - 1) / RANKS * BYTES * parameters


def half_hidden(own, parameters):
    """GB/s on which computing hides half of the messages: t_comm / t_compute is 2."""
    return sent_bytes(own["way"], parameters) / (2 * own["computing_ms"]) / 1e6


def exposed(recorded, gb_per_s):
    """The share of the messages' time in later steps that is waited for, on a link without latency."""
    laid_out = on_links(recorded, f"node=0,{gb_per_s!r}")
    waits = sum(wait.exposed for rank in laid_out.ranks for wait in rank.waits if wait.step > SKIPPED_STEPS)
    return waits / sum(item.duration for rank in laid_out.ranks for item in rank.communications
                       if item.step > SKIPPED_STEPS)


def _search(recorded):
    """The bandwidth on which HALF of the messages' time is waited for."""
    low, high = LIMITS
    for _ in range(PASSES):
        middle = (low * high)**0.5
        low, high = (low, middle) if exposed(recorded, middle) <= HALF else (middle, high)
    return high


def reached(own, parameters):
    """GFLOP/s of the phases that hide messages."""
    operations = sum(OPERATIONS[phase] for phase in WAYS[own["way"]][2])
    return operations * own["samples"] * SHAPE["seq_len"] * parameters / own["computing_ms"] / 1e6


def table(measured):
    """One link for all runs, and for each run the link that hides half."""
    parameters = measured["parameters"]
    lines = ["| | tokens of a rank | GFLOP/s | t_comm / t_compute | exposed, by formula | exposed, replayed | "
             "GB/s that hide half, by formula | replayed |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for own in measured["runs"]:
        half = half_hidden(own, parameters)
        ratio = 2 * half / measured["gb_per_s"]
        lines.append(f"| {own['way']} | {own['samples'] * SHAPE['seq_len']:,} | {reached(own, parameters):.0f} | "
                     f"{ratio:.2f} | {100 * max(0, 1 - 1 / ratio):.0f} % | {100 * own['exposed']:.0f} % | "
                     f"{half:.3g} | {own['half_gb_per_s']:.3g} |")
    return "\n".join(lines) + overlap.note(
        f"{measured['ranks']} ranks of one thread, {parameters:,} parameters in f32. Exposed shares are of the "
        f"messages' time, on a link of {measured['gb_per_s']:.3g} GB/s without latency. GFLOP/s are those of the "
        "passes that hide messages: backward under data parallelism, forward and backward under ZeRO-3.")


def claims(measured):
    """Rows of the table of claims."""
    def of_ways(value):
        return "; ".join(", ".join(value(own) for own in measured["runs"] if own["way"] == way) for way in WAYS)
    tokens = ", ".join(f"{samples * SHAPE['seq_len']:,}" for samples in SAMPLES)
    return [("QA3.3", "more tokens on a rank hide the messages of data parallelism and of ZeRO-3", "falls",
             of_ways(lambda own: f"{100 * own['exposed']:.0f} %"),
             f"share of the messages' time that is exposed with {tokens} tokens, replayed on one link; "
             f"{' and '.join(WAYS)}"),
            ("QA3.4", "where the ratio is 1, the messages are hidden", "1",
             of_ways(lambda own: f"{own['half_gb_per_s'] / half_hidden(own, measured['parameters']):.2f}"),
             "bandwidth that hides half of the messages, replayed over that of t_comm = 2 t_compute, the same runs")]
