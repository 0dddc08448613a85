"""How much of tensor parallelism's communication shows: a step of each way on an emulated link.

The link is so slow that the way that hides nothing spends a given share of its step on it.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links, sent_in_a_step, steady, train
from tools.book.rounds import measure_again, with_range
from tools.run import replay

from . import runs

RANKS = 2
SHAPE = {"hidden_size": 384, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 1024,
         "num_layers": 4, "seq_len": 256, "micro_batch_size": 4}
# {way: flags beside --tp_size}
OVERLAPS = ("none", "weight_grad", "chunks", "batch_halves")
WAYS = {**{way: {"tp_overlap": way} for way in OVERLAPS},
        "again": {**runs.WAYS["again"], "tp_overlap": "weight_grad"}}
NAMES = {**{way: f"`{way}`" for way in OVERLAPS},
         "again": "`weight_grad` and `--sequence_parallel`"}
ROUNDS = 3       # in which the ways take turns
BATCHES = (2, 4, 8)  # micro-batches of which the share of messages is compared
LATENCY_US = 100
LATENCIES_US = (10, 100, 1000)  # of links on which the same runs are replayed
SHARE = 0.4      # of the step of the way that hides nothing


def run(chapter, run_dir, **flags):
    """Trains for a few traced steps on ranks that share all layers; the trace."""
    return train(chapter, run_dir, RANKS, tp_size=RANKS, **{**SHAPE, **flags})


def link_for(recorded):
    """The --link on which the messages of a recorded run would take SHARE of its step."""
    step, exposed = steady(recorded)
    count, sent = sent_in_a_step(recorded)
    communication = (step - exposed) * SHARE / (1 - SHARE)  # ms
    # An all-reduce of two ranks: two messages, one after the other.
    gb_per_s = sent / (communication - count * 2 * LATENCY_US / 1000) / 1e6
    return f"node={LATENCY_US},{gb_per_s:.4g}"


def of_a_step(recorded, link):
    """What a step took and sent, measured and replayed with a core for every thread."""
    rate = replay.parse_link(link)[1].gb_per_s
    count, sent = sent_in_a_step(recorded)
    found = {"messages": count, "sent_bytes": sent,
             "by_latency": [[latency, *_replayed(recorded, f"node={latency},{rate:g}")]
                            for latency in LATENCIES_US]}
    found["step_ms"], found["exposed_ms"] = steady(recorded)
    found["replayed_step_ms"], found["replayed_exposed_ms"] = _replayed(recorded, link)
    return found


def _replayed(recorded, link):
    """(step, exposed communication) in ms of a run laid out on a link, a core for every thread."""
    return steady(on_links(recorded, link))


def of_rounds(rounds):
    """Medians of what of_a_step() found in each round, and the range of the rounds' steps."""
    steps = [found["step_ms"] for found in rounds]
    times = ("step_ms", "exposed_ms", "replayed_step_ms", "replayed_exposed_ms")
    return {**{name: rounds[0][name] for name in ("messages", "sent_bytes", "by_latency")},
            "step_range_ms": [min(steps), max(steps)],
            **{name: statistics.median(found[name] for found in rounds) for name in times}}


def measure(chapter, keep):
    """A step of every way; calls keep(way, run_dir) while the runs of the first round exist."""
    with tempfile.TemporaryDirectory(prefix="book_tensor_") as scratch:
        say("book: tensor parallelism on an emulated link")
        link = link_for(run(chapter, Path(scratch) / "unlinked", **WAYS["none"]))
        found = {way: [] for way in WAYS}
        for number in range(ROUNDS):
            for way, flags in WAYS.items():
                run_dir = Path(scratch) / f"{way}_{number}"
                found[way].append(of_a_step(run(chapter, run_dir, link=link, **flags), link))
                if number == 0:
                    keep(way, run_dir)
        for way, flags in WAYS.items():
            measure_again(found[way], way, lambda each: {"step_ms": each["step_ms"]}, lambda flags=flags: of_a_step(
                run(chapter, Path(tempfile.mkdtemp(dir=scratch)) / "run", link=link, **flags), link))
        return {"ranks": RANKS, "link": link, "num_layers": SHAPE["num_layers"],
                "ways": [{"way": way, **of_rounds(rounds)} for way, rounds in found.items()],
                "batches": [_of_batch(chapter, link, size) for size in BATCHES]}


def _of_batch(chapter, link, size):
    """Of steps with micro-batches of a size: what shows of messages, and what forward and backward
    compute, in ms; every message is waited for, on the link's bandwidth and without latency."""
    rate = replay.parse_link(link)[1].gb_per_s
    with tempfile.TemporaryDirectory(prefix="book_tensor_") as scratch:
        recorded = run(chapter, Path(scratch) / "run", **WAYS["none"], micro_batch_size=size)
        laid_out = on_links(recorded, f"node=0,{rate:g}")
        exposed = steady(laid_out)[1]
        return {"micro_batch_size": size, "exposed_ms": exposed,
                "computed_ms": _in_layers(laid_out) - exposed}


def _in_layers(laid_out):
    """Milliseconds of forward and backward in a later step of rank 0; the update is left out."""
    found = {}
    for span in laid_out.ranks[0].spans:
        if span.category == "phase" and span.name in ("forward", "backward"):
            found[span.step] = found.get(span.step, 0) + span.duration / 1000
    return statistics.median(list(found.values())[SKIPPED_STEPS:])


def latency_table(measured):
    """The runs of the first round, replayed on links of other latencies."""
    rate = replay.parse_link(measured["link"])[1].gb_per_s
    rows = [[NAMES[way["way"]], f"{way['messages']:.4g}",
             *(f"{time:.0f}" for _, *times in way["by_latency"] for time in times)]
            for way in measured["ways"]]
    head = [text for latency in LATENCIES_US for text in (f"{latency} us: step", "exposed")]
    return runs.table(["", "messages", *head], rows, "Milliseconds of a step: a run of each way, "
                      f"replayed on a link of {rate:g} GB/s and these latencies.")


def table(measured):
    """What the ways leave of their communication, measured and replayed."""
    rows = [[NAMES[way["way"]], f"{way['messages']:.4g}", f"{way['sent_bytes'] / 2**20:.1f}",
             f"{way['exposed_ms']:.0f}", f"{way['replayed_exposed_ms']:.0f}",
             with_range(way["step_ms"], *way["step_range_ms"], " to ", ".0f"),
             f"{way['replayed_step_ms']:.0f}"] for way in measured["ways"]]
    none = measured["ways"][0]
    share = none["exposed_ms"] / none["step_ms"]
    return runs.table(
        ["", "messages", "sent, MiB", "exposed, ms", "exposed, replayed", "step, ms",
         "step, replayed"], rows,
        f"A step of rank 0 of {measured['ranks']}, {measured['num_layers']} layers in f32; scalars "
        f"left out. Medians of {ROUNDS} rounds, in brackets the shortest and the longest. The "
        f"emulated link is `{measured['link']}` (us, GB/s): messages take {100 * share:.0f} % of the "
        "step of `none`. Exposed is the time of the slower rank; in a replay every thread owns a core.")
