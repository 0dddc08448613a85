"""The book's claims about data parallelism and ZeRO, each beside what was measured here.

measure() trains small models for a few steps; table() sets what they, the other figures and the
bench say beside the book.
"""
import json
import re
import statistics
import tempfile
from pathlib import Path

from tools import machine
from tools.base import BookError, say
from tools.bench.bench import SMALL
from tools.look import runs
from tools.process import wait_for
from tools.run import build, estimates, mpi

from . import zero

QUIET = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}
BATCH, STEPS = 4, 20  # samples of a step, divided among the ranks
LAYOUTS = [(1, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3)]  # ranks, stage; the first: one rank
ACCUMULATED = 4       # micro-batches
RANKS = (1, 2, 4, 8)  # whose memory is compared
MANY = 1024           # ranks, on which stage 2 is close to its limit
LIMIT = {"model": "1B", "dtype": "bf16", "grad_accumulation": "bf16", "seq_len": 1024,
         "micro_batch_size": 1}
# The book's example: 4 M tokens a step in sequences of 4096, micro-batches of 2.
EXAMPLE = ("--plan", "4194304", "--seq_len", "4096", "--dtype", "bf16", "--model", "1B",
           "--micro_batch_size", "2")
EXAMPLE_RANKS = {128: 4, 512: 1}  # and the book's grad_acc_steps
# Tokens/s of a GPU on 8 to 256. The book's figure has runs with micro-batches of 2 on 8 and 128
# GPUs, 40,150 and 26,446; these two are the runs with 1, as on the others, from its explorer.
BOOK_SCALING = (39273, 37609.69, 35367.61, 31112.23, 24494, 15700.38)


def measure(chapter):
    """What the claims need beside the other figures."""
    say("book: what the claims about ranks need of runs")
    program = build.binary(build.RELEASE, chapter.name)
    return {**count(program), **estimate(program), "parts": _parts()}


def estimate(program):
    """What is known without training."""
    states = [sum(estimates.estimate(program, {**LIMIT, "dp_size": MANY, "zero_stage": stage})
                  ["simulated"][name] for name in zero.STATES) for stage in (0, 2)]
    return {"limit": states[0] / states[1],
            "plans": {str(ranks): _planned(program, ranks) for ranks in EXAMPLE_RANKS}}


def count(program):
    """Losses and bytes of small runs: none depends on how fast a machine is."""
    return {"layouts": _layouts(program), "accumulation": _accumulation(program),
            "memory": _memory(program)}


def _on_ranks(ranks, command):
    """What a program prints on so many ranks of one thread; BookError if it fails."""
    held = []
    command = mpi.find().command(ranks, command) if ranks > 1 else command
    code, signals = wait_for(command, {**machine.thread_environment(ranks=ranks),
                                       "OMP_NUM_THREADS": "1"}, held.append)
    if code != 0 or signals:
        raise BookError(f"`{' '.join(command)}` ended with exit code {code}:\n{''.join(held)}")
    return "".join(held)


def _run(program, ranks, **flags):
    """(records of metrics.jsonl, ledger.json) of a run on so many ranks."""
    with tempfile.TemporaryDirectory(prefix="book_claims_") as scratch:
        run_dir = Path(scratch) / "run"
        flags = {**QUIET, **flags, "run_dir": run_dir}
        _on_ranks(ranks, [str(program), *estimates.words_of(flags)])
        return (runs.read_metrics(run_dir)[0],
                json.loads((run_dir / "ledger.json").read_text(encoding="utf-8")))


def _layouts(program):
    """Losses and gradient norms of the same steps in f64, on one rank and on several."""
    def steps(ranks, stage):
        flags = {**SMALL, "micro_batch_size": BATCH // ranks, "steps": STEPS}
        records, _ = _run(program, ranks, **flags, **({"zero_stage": stage} if stage else {}))
        return [[float(record[name]) for name in ("loss", "grad_norm")] for record in records]

    return [{"ranks": ranks, "stage": stage, "steps": steps(ranks, stage)}
            for ranks, stage in LAYOUTS]


def _accumulation(program):
    """Bytes of gradients that a step hands over, with one micro-batch and with several."""
    def handed_over(count):
        _, ledger = _run(program, 2, **SMALL, micro_batch_size=1, grad_acc_steps=count, steps=2)
        return ledger["dp.all_reduce"]["payload_bytes"] / 2

    return {"one": handed_over(1), "several": handed_over(ACCUMULATED)}


def _memory(program):
    """[{ranks, own, communication}]: peak bytes of rank 0 under data parallelism."""
    found = []
    for ranks in RANKS:
        records, _ = _run(program, ranks, **SMALL, micro_batch_size=1, steps=2)
        peaks = {name: int(size) for name, size in records[-1]["peak_bytes"].items()}
        found.append({"ranks": ranks, "communication": peaks.pop("communication"),
                      "own": sum(peaks.values())})
    return found


def _parts():
    """What comm_bench says of an all-reduce and its parts."""
    build.prepare(build.RELEASE, "comm_bench")
    program = str(build.binary(build.RELEASE, "comm_bench"))
    return json.loads(_on_ranks(2, [program, "--parts"]).splitlines()[-1])


def _planned(program, ranks):
    """grad_acc_steps that --plan comes to."""
    text = _on_ranks(1, [str(program), *EXAMPLE, "--dp_size", str(ranks)])
    return int(re.search(r"grad_acc_steps .* = (\d+)\n", text).group(1))


# --- the table ------------------------------------------------------------------------------------


def table(record, overlap, compared=None, numbers=range(1, 12)):
    """Claims of these numbers as Markdown, from the record of ./book figures, what overlap.json
    holds, and what bench.json says of the stages, if it is there."""
    claims, ways = record["claims"], record["zero"]["ways"]
    rows = [
        ("1", "data-parallel gradients are those of one process with the whole batch",
         *_equal(claims["layouts"], (0,))),
        ("2", "overlapped gradients beat late ones, buckets beat single tensors; not "
         "synchronising saves (grad_acc-1)/grad_acc of the traffic", *_overlap(overlap, claims)),
        ("3", "memory of a rank does not depend on their number", *_constant(claims["memory"])),
        ("4", "throughput of a rank falls faster and faster: -6.3, -6.0, -12.0, -15.0, -40.6 % from "
         f"8 to 256 ranks; with one micro-batch size throughout {_drops(BOOK_SCALING)} %",
         *_scaling(overlap)),
        ("5", "a stage holds what the table of formulas says; stage 2 ends at 1/8",
         *_formula(record["zero"]["held"], claims["limit"])),
        ("6", "sent in a step: 2Ψ, 2Ψ, 2Ψ, 3Ψ", *_traffic(ways)),
        ("7", "stage 3 gathers 2 L - 1 times", *_gathers(ways)),
        ("9", "loss curves of all stages are the same", *_equal(claims["layouts"], (1, 2, 3))),
        ("10", "stage 2 costs no time over stage 1", *_second_stage(ways, compared)),
        ("11", "1024 samples = 2 · 4 · 128 = 2 · 1 · 512", *_example(claims["plans"])),
    ]
    return HEAD + "".join(f"| Q2.{' | '.join(row)} |\n" for row in rows if int(row[0]) in numbers)


HEAD = "| | the book | expected | measured | where |\n|---|---|---|---|---|\n"


def appendix_table(record, demo, tour):
    """Claims of the book's appendix A0 on collectives, from what the tour printed, the demo sent and the
    bench of parts took."""
    stops = stops_of(tour)
    held = [name for name in DEFINED if stops.get(name) == _defined(name)]
    slept = stops["barrier"]
    sent = demo["ledger"]["dp.all_reduce"]["wire_bytes"] / demo["ledger"]["dp.all_reduce"]["payload_bytes"]
    ranks = int(demo["config"]["dp_size"])
    rows = [
        ("QA0.1", "listings of seven collectives on 3 ranks, with what they print", str(len(DEFINED)), str(len(held)),
         "collectives of `./book run ch02/collectives`, with the book's tensors, after which each rank holds what "
         "the definition says"),
        ("QA0.2", "in a ring all-reduce a rank sends 2 (N-1) K/N values", f"{2 * (ranks - 1) / ranks:.3f}",
         f"{sent:.3f}", f"bytes that rank 0 of {ranks} sent in the demo, over those of its gradients"),
        ("Q2.8, QA0.4", "a reduce-scatter takes half the time of an all-reduce", *_halves(record["claims"]["parts"])),
        ("QA0.5", "all ranks leave a barrier with the slowest", str(max(before for before, _ in slept)[0]),
         ", ".join(str(after[0]) for _, after in slept), "seconds after which each of 3 ranks came out of the tour's "
         "barrier; they had slept for " + ", ".join(str(before[0]) for before, _ in slept)),
    ]
    return rows_text(rows)


def rows_text(rows):
    """Claims as a table."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


TOUR_RANKS = 3
DEFINED = ("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter")


def stops_of(tour):
    """{collective: [(what a rank held before, after)]} of the tour's output; the first of several stops with a
    name counts."""
    found = {}
    for stop in tour.split("\n\n"):
        rows = re.findall(r"^  rank \d+ +(\[.*?\]) +-> (\[.*\])$", stop, re.M)
        if rows:
            found.setdefault(re.match(r"\w+", stop)[0], [tuple(map(json.loads, row)) for row in rows])
    return found


def _defined(name):
    """[(before, after)] of the book's listing by what the collective's name means."""
    ranks = range(TOUR_RANKS)
    before = [[rank + 1] * 5 for rank in ranks]
    joined = [value for values in before for value in values]
    if name == "broadcast":
        before = [[1, 2, 3, 4, 5], *([0] * 5 for _ in ranks[1:])]
        return [(own, before[0]) for own in before]
    if name == "scatter":
        return list(zip([joined, *([0] * 15 for _ in ranks[1:])], before))
    if name == "all_gather":
        return [(own, joined) for own in before]
    if name == "gather":
        return [(own, [0] * 15 if rank else joined) for rank, own in enumerate(before)]
    if name == "reduce_scatter":
        before = [[(value * (rank + 1)) ** (power + 1) for power in ranks for value in (1, 2)] for rank in ranks]
    total = [sum(values) for values in zip(*before)]
    if name == "reduce_scatter":
        return [(own, total[2 * rank:2 * rank + 2]) for rank, own in enumerate(before)]
    return [(own, own if name == "reduce" and rank else total) for rank, own in enumerate(before)]


def _equal(layouts, stages):
    reference = layouts[0]["steps"]
    chosen = [layout for layout in layouts[1:] if layout["stage"] in stages]
    largest = max(abs(a / b - 1) for layout in chosen
                  for own, base in zip(layout["steps"], reference) for a, b in zip(own, base))
    ranks = " and ".join(str(n) for n in sorted({layout["ranks"] for layout in chosen}))
    return ("0", f"at most {largest:.0e}", f"relative difference of losses and gradient norms over "
            f"{len(reference)} steps in f64, {ranks} ranks for one")


def _overlap(overlap, claims):
    """Replayed on links of several latencies: what one message a tensor gains depends on them."""
    ways = overlap["overlap"]["ways"]
    latencies = [found["latency_us"] for found in ways[0]["by_latency"]]
    steps = "; ".join(f"{latency} us: " + ", ".join(
        f"{way['grad_sync']} {way['by_latency'][at]['step_ms']:.0f}" for way in ways)
        for at, latency in enumerate(latencies) if at in (0, len(latencies) - 1))
    accumulation = claims["accumulation"]
    saved = 1 - accumulation["several"] / (ACCUMULATED * accumulation["one"])
    return (f"falling; {100 * (1 - 1 / ACCUMULATED):.0f} % for grad_acc = {ACCUMULATED}",
            f"{steps} ms; {100 * saved:.0f} %",
            "steps, replayed on links of the least and the largest latency of the table of other latencies; "
            "bytes by the ledger")


def _constant(memory):
    alone = memory[0]["own"]
    ratios = ", ".join(f"{entry['own'] / alone:.3f}" for entry in memory)
    more = ", ".join(f"{entry['communication'] / alone:.3f}" for entry in memory)
    return ("1", f"{ratios}; communication {more}",
            f"peaks by category of rank 0 of {', '.join(str(e['ranks']) for e in memory)}, beside "
            "those of one rank; communication: scratch of the all-reduce, at most 8 MiB")


def _drops(rates):
    """What each rate is below the one before it, in percent."""
    return ", ".join(f"{100 * (after / before - 1):+.1f}"
                     for before, after in zip(rates, rates[1:]))


def _scaling(overlap):
    points = overlap["scaling"]["replayed"]
    drops = _drops([point["tokens_per_s_per_rank"] for point in points])
    return ("each lower than the one before", f"{drops} %",
            f"{points[0]['ranks']} to {points[-1]['ranks']} ranks, replayed from 2 on the links "
            f"`{' '.join(overlap['scaling']['links'])}`, nodes of {overlap['scaling']['node_size']}")


def _formula(held, limit):
    return (f"1; 8 as ranks are added, {16 / (2 + 14 / MANY):.3f} for {MANY}",
            f"{zero.worst_ratio(held):.4f}; {limit:.3f}",
            "bytes over the formula's, the worst of all stages, categories and "
            f"{zero.HELD_RANKS} ranks; states of stage 0 over stage 2, estimated")


def _traffic(ways):
    names = ("bucketed", "zero1_forward", "zero2", "zero3")
    found = ", ".join(f"{zero.sent_in_psi(ways, way):.3f}" for way in names)
    return ("2, 2, 2, below 3", found, f"elements by the ledger of {ways['ranks']} ranks in f32, "
            "over Ψ (dp-1)/dp; stage 3 gathers neither the last block nor embedding and head twice")


def _gathers(ways):
    counted = zero.find_way(ways, "zero3")["messages"]["all_gather"]
    layers = ways["num_layers"]
    return (f"{2 * layers - 1} of layers, 2 of embedding and head", f"{counted:.4g}",
            f"in a step of {layers} blocks, one micro-batch")


def _halves(parts):
    found = "; ".join(f"{part['reduce_scatter_ms'] / part['all_reduce_ms']:.2f}" for part in parts)
    link, size = parts[0]["link"], parts[0]["bytes"] / 2**20
    return ("0.50", found, f"{size:.0f} MiB on 2 ranks: emulated link of {link[0]:g} us and "
            f"{link[1]:g} GB/s; this machine's memory, where the sum takes time that the gather does "
            "not")


def _second_stage(ways, compared):
    one, two = (zero.find_way(ways, way) for way in ("zero1_forward", "zero2"))
    found = f"{two['exposed_ms']:.0f} for {one['exposed_ms']:.0f} ms exposed"
    where = "stage 2 for stage 1 on the emulated link"
    for dtype in dict.fromkeys(entry["dtype"] for entry in compared or []):
        steps = zero.ratios(compared, "zero1_forward", dtype, base="zero2")
        found += f"; {dtype} {statistics.median(steps):.2f} ({min(steps):.2f} to {max(steps):.2f})"
    if compared:
        where += "; ratio of their steps in a round, B"
    return ("the same", found, where)


def _example(plans):
    expected = ", ".join(map(str, EXAMPLE_RANKS.values()))
    return (expected, ", ".join(map(str, plans.values())),
            "grad_acc_steps of `--plan` on 128 and 512 ranks")
