"""What ZeRO's stages hold, send and cost: measured, estimated, and beside the book.

Fig2.7 and 2.15, the timelines of Fig2.9, 2.11 and 2.14, and the table of stages in bench.md.
"""
import json
import statistics
import tempfile
from pathlib import Path

from tools.base import BookError, say
from tools.bench.steady import STEPS, steady
from tools.book.rounds import measure_again, with_range
from tools.look import trace
from tools.run import estimates, replay

from . import overlap

GIB = 2**30
STAGES = (0, 1, 2, 3)
NAMES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
STATES = ("weights", "gradients", "optimizer")
BUFFERS = ("gathered weights", "gradients to reduce", "reduced gradients", "scratch of reductions")
SCALARS = 8  # bytes of messages that only count or measure something
ROUNDS = 3  # in which the ways take turns

# The book's three ranks. Of a model with many layers few are gathered at a time.
HELD_RANKS = 3
HELD = {"num_layers": 12, "seq_len": 64, "micro_batch_size": 1, "dtype": "bf16", "steps": 3,
        "trace_steps": 3}

# How gradients and weights are exchanged; the first is plain data parallelism.
WAYS = {"bucketed": {"grad_sync": "bucketed"},
        "zero1_none": {"zero_stage": 1, "gather_overlap": "none"},
        "zero1_optimizer": {"zero_stage": 1, "gather_overlap": "optimizer"},
        "zero1_forward": {"zero_stage": 1, "gather_overlap": "forward"},
        "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}
DRAWN = ("zero1_forward", "zero2", "zero3")
# In tables, with the value of --gather_overlap.
WAY_NAMES = {"bucketed": "bucketed", "zero1_none": "ZeRO-1, `none`",
             "zero1_optimizer": "ZeRO-1, `optimizer`", "zero1_forward": "ZeRO-1, `forward`",
             "zero2": "ZeRO-2, `forward`", "zero3": "ZeRO-3"}

# The book's figure of 8B on 8 ranks, GiB: weights, gradients, optimizer; activations.
LARGE = {"model": "8B", "dtype": "bf16", "micro_batch_size": 1, "dp_size": 8}
LARGE_SEQ_LENS = (1024, 4096, 16384)
TABLED_SEQ_LENS = (4096, 16384)  # the figure has all
BOOK_STATES = {0: (15.0, 15.0, 60.0), 1: (15.0, 15.0, 7.5), 2: (15.0, 1.875, 7.5),
               3: (1.875, 1.875, 7.5)}
BOOK_ACTIVATIONS = {1024: 4.25, 4096: 17.0, 16384: 68.0}


# --- what a rank holds ----------------------------------------------------------------------------


def held_by_ranks(path):
    """[{what: bytes} of every rank] of a trace file: states when recording ended, each kind of
    buffer at its peak."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    ranks = [{} for _ in range(document["otherData"]["ranks"])]
    for event in document["traceEvents"]:
        if event["ph"] != "C":
            continue
        held = ranks[event["pid"]]
        (what, size), = event["args"].items()
        peak = event["name"] != "memory" or what not in STATES
        held[what] = max(held.get(what, 0), size) if peak else size
    return ranks


def measure_held(chapter, program):
    """Of every stage what the ranks hold, and what the accountant says that they do."""
    stages = []
    for stage in STAGES:
        say(f"book: what the ranks hold in stage {stage}")
        with tempfile.TemporaryDirectory(prefix="book_zero_") as scratch:
            run_dir = Path(scratch) / "run"
            overlap.run(chapter, run_dir, ranks=HELD_RANKS, **HELD, zero_stage=stage)
            ranks = held_by_ranks(run_dir / trace.RECORDED)
        buckets = {} if stage else {"bucket_mb": overlap.FLAGS["bucket_mb"]}  # as the run has
        found = estimates.estimate(program, {**_shape(HELD), **buckets, "dp_size": HELD_RANKS,
                                             "zero_stage": stage})
        predicted = {**{name: found["predicted"][name] for name in STATES},
                     **{name: sizes["predicted"] for name, sizes in found["buffers"].items()}}
        stages.append({"stage": stage, "predicted": predicted, "ranks": ranks})
    return {"parameters": found["parameters"], "flags": HELD, "stages": stages}


def _shape(flags):
    """The flags that say what is trained, without those of the run."""
    return {name: value for name, value in flags.items() if name not in ("steps", "trace_steps")}


def worst_ratio(held):
    """The ratio of measured and predicted bytes that is farthest from 1, over stages, ranks, kinds."""
    ratios = [rank.get(name, 0) / size for stage in held["stages"] for rank in stage["ranks"]
              for name, size in stage["predicted"].items() if size > 0]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


# --- a large model --------------------------------------------------------------------------------


def estimate_large(program):
    """Dry runs of the book's 8B, every stage and sequence."""
    say("book: estimating 8B on 8 ranks")
    return [{"stage": stage, "seq_len": seq_len,
             **estimates.estimate(program, {**LARGE, "seq_len": seq_len, "zero_stage": stage})}
            for seq_len in LARGE_SEQ_LENS for stage in STAGES]


def large_table(cases):
    """Ours beside the book's, in GiB, and why they differ."""
    lines = ["| tokens | | weights | gradients | optimizer | activations | buffers | together | "
             "peak of a step |", "|---|---|---|---|---|---|---|---|---|"]
    for case in (case for case in cases if case["seq_len"] in TABLED_SEQ_LENS):
        ours = [case["simulated"][name] / GIB for name in (*STATES, "activations")]
        buffers = sum(case["buffers"].get(name, {"bytes": 0})["bytes"] for name in BUFFERS) / GIB
        book = [*BOOK_STATES[case["stage"]], BOOK_ACTIVATIONS[case["seq_len"]]]
        cells = [f"{own:.1f} ({theirs:.4g})" for own, theirs in zip(ours, book)]
        lines.append(f"| {case['seq_len']:,} | {NAMES[case['stage']]} | {' | '.join(cells)} | "
                     f"{buffers:.2f} | {sum(ours) + buffers:.1f} ({sum(book):.4g}) | "
                     f"{case['simulated']['peak_total'] / GIB:.1f} |")
    return "\n".join(lines) + overlap.note(
        "GiB of a rank; in brackets the book's. Buffers: gathered weights, gradients in work and "
        "the scratch of reductions, each at its own peak. These peaks fall into different "
        "moments, so a step's peak may be below the sum.")


# --- what a step sends, and what of it shows ------------------------------------------------------


def measure_ways(chapter, keep):
    """A step of every way, on the link on which naive data parallelism spends its share waiting.
    Calls keep(way, run_dir) while the runs exist."""
    with tempfile.TemporaryDirectory(prefix="book_zero_") as scratch:
        say("book: ZeRO on an emulated link")
        link, naive = overlap.naive_on_its_link(chapter, Path(scratch) / "naive")
        found = {way: [] for way in WAYS}
        for number in range(ROUNDS):
            for way, flags in WAYS.items():
                run_dir = Path(scratch) / f"{way}_{number}"
                recorded = overlap.run(chapter, run_dir, link=link, **overlap.SHAPE, **flags)
                found[way].append(of_a_step(recorded))
                if number == 0:
                    keep(way, run_dir)
        for way, flags in WAYS.items():
            measure_again(found[way], way, lambda each: {"step_ms": each["step_ms"]}, lambda flags=flags: of_a_step(
                overlap.run(chapter, Path(tempfile.mkdtemp(dir=scratch)) / "run", link=link, **overlap.SHAPE, **flags)))
        ways = [{"way": "naive", **of_a_step(naive)},
                *({"way": way, **of_rounds(rounds)} for way, rounds in found.items())]
    return {"link": link, "ranks": overlap.RANKS, "gradient_bytes": overlap.gradient_bytes(naive),
            "num_layers": overlap.SHAPE["num_layers"], "ways": ways}


def of_a_step(recorded):
    """Messages and bytes that rank 0 sends in a step, and how long it is, measured and replayed."""
    messages = [item for item in recorded.ranks[0].communications if item.payload_bytes > SCALARS]
    counts = {kind: sum(item.kind == kind for item in messages) / STEPS
              for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    replayed = replay.replay(recorded, replay.choose_machine(recorded, cores=None))
    found = {"messages": counts,
             "sent_bytes": sum(item.wire_bytes for item in messages) / STEPS}
    for prefix, steps in (("", recorded), ("replayed_", replayed)):
        found[f"{prefix}step_ms"], found[f"{prefix}exposed_ms"] = steady(steps)
    return found


def of_rounds(rounds):
    """The medians of what of_a_step() found in each round, and the range of the steps."""
    steps = [found["step_ms"] for found in rounds]
    times = ("step_ms", "exposed_ms", "replayed_step_ms", "replayed_exposed_ms")
    return {**rounds[0], "step_range_ms": [min(steps), max(steps)],
            **{name: statistics.median(found[name] for found in rounds) for name in times}}


def step_and_range(found):
    """The step of a way as text, with its range where it was measured in several rounds."""
    text = f"{found['step_ms']:.0f}"
    if "step_range_ms" in found:
        return with_range(found["step_ms"], *found["step_range_ms"], form=".0f")
    return text


def find_way(measured, way):
    """The record of a way; BookError if it was not measured."""
    for found in measured["ways"]:
        if found["way"] == way:
            return found
    raise BookError(f"no way {way!r} was measured; remake the figures with ./book figures")


def sent_in_psi(measured, way):
    """Elements that a rank sends in a step, in units of (dp-1)/dp of the parameters; f32."""
    ranks = measured["ranks"]
    return find_way(measured, way)["sent_bytes"] / measured["gradient_bytes"] * ranks / (ranks - 1)


def ways_table(record):
    """Messages and bytes, then steps and what shows of communication: two tables as Markdown, each
    as wide as a phone."""
    measured = record["zero"]["ways"]
    sent = ["| | messages | MiB | in Ψ (dp-1)/dp |", "|---|---|---|---|"]
    took = ["| | step, ms | exposed | replayed | exposed |", "|---|---|---|---|---|"]
    for way, name in WAY_NAMES.items():
        found = find_way(measured, way)
        counts = ", ".join(f"{count:.4g} {kind.replace('_', '-')}s"
                           for kind, count in found["messages"].items() if count)
        sent.append(f"| {name} | {counts} | {found['sent_bytes'] / 2**20:.1f} | "
                    f"{sent_in_psi(measured, way):.2f} |")
        took.append(f"| {name} | {step_and_range(found)} | {found['exposed_ms']:.0f} | "
                    f"{found['replayed_step_ms']:.0f} | {found['replayed_exposed_ms']:.0f} |")
    return ("\n".join([*sent, "", *took])
            + overlap.note(
                f"A step of rank 0 of {measured['ranks']}, {measured['num_layers']} blocks in f32 "
                "with full recomputation; scalars left out. `bucketed` is data parallelism; `none`, "
                "`optimizer` and `forward` are values of `--gather_overlap`. Medians of the later of "
                f"{STEPS} steps on an emulated link of `{measured['link']}` (us, GB/s). The last two "
                "columns are replayed: every thread owns a core."))


# --- the bench ------------------------------------------------------------------------------------

COMPARED = {"data parallel": {}, **{way: WAYS[way] for way in WAYS if way != "bucketed"}}
TIMED_STEPS = 4
TARGETS = {0: 1.0, 1: 0.95, 2: 0.95, 3: 0.80}  # of data parallelism's tokens/s


def compare(run_once, dtypes, rounds):
    """Tokens/s and peak bytes of a rank of every way in configuration B, which take turns. The
    ratio to plain data parallelism is taken within a round: a machine is faster at one time than at
    another. run_once(dtype, **flags) trains and returns {tokens_per_s, peak_bytes}."""
    compared = []
    for dtype in dtypes:
        def measured():
            found = {}
            for way, flags in COMPARED.items():
                found[way] = run_once(dtype, **flags)
                say(f"book: {dtype} {way:<16} {found[way]['tokens_per_s']:9.0f} tokens/s")
            return found

        found = [measured() for _ in range(rounds)]
        measure_again(found, f"{dtype}, the ways of ZeRO", _speeds, measured)
        cases = {way: [each[way] for each in found] for way in COMPARED}
        base = [found["tokens_per_s"] for found in cases["data parallel"]]
        compared += [{"dtype": dtype, "way": way, "stage": COMPARED[way].get("zero_stage", 0),
                      "tokens_per_s": [found["tokens_per_s"] for found in found_in],
                      "ratio": statistics.median(found["tokens_per_s"] / plain
                                                 for found, plain in zip(found_in, base)),
                      "peak_bytes": found_in[-1]["peak_bytes"]}
                     for way, found_in in cases.items()]
    return compared


def _speeds(found):
    """Of one round, what is printed."""
    return {way: of["tokens_per_s"] for way, of in found.items()}


def ratios(compared, way, dtype, base="data parallel"):
    """Tokens/s of a way over those of another one, in every round."""
    speeds = {entry["way"]: entry["tokens_per_s"] for entry in compared if entry["dtype"] == dtype}
    return [own / other for own, other in zip(speeds[way], speeds[base])]


def compared_lines(compared):
    """What compare() found, as Markdown lines."""
    lines = ["", "| B, 2 ranks | | tokens/s | of data parallelism's, in its round | at least | "
             "peak of a rank, MiB |", "|---|---|---|---|---|---|"]
    for entry in compared:
        name = WAY_NAMES.get(entry["way"], entry["way"])
        found = ratios(compared, entry["way"], entry["dtype"])
        middle = statistics.median(found)
        shown = with_range(middle, min(found), max(found), " to ") if entry["stage"] else f"{middle:.2f}"
        lines.append(f"| {entry['dtype']} | {name} | "
                     f"{statistics.median(entry['tokens_per_s']):,.0f} | "
                     f"{shown} | "
                     f"{TARGETS[entry['stage']]:.2f} | {entry['peak_bytes'] / 2**20:,.0f} |")
    return lines
