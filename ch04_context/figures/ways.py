"""How much of the exchange of keys shows: a step of each method on an emulated link.

On the link the keys, values and gradients of a ring take a given share of attention's time.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import on_links, sent_in_a_step, steady
from tools.book.rounds import measure_again, with_range
from tools.run.replay import parse_link

from . import runs, workload

RANKS = 2              # measured on this machine's cores
MORE_RANKS = 4         # replayed
SHAPE = {**workload.SHAPE, "seq_len": 2048, "hidden_size": 256, "ffn_hidden_size": 704}
MORE_SHAPE = {**SHAPE, "seq_len": 4096, "steps": 9, "trace_steps": 9}
WAYS = {"ring": {"cp_method": "ring"},
        "ring_waits": {"cp_method": "ring", "cp_overlap": "none"},
        "all_gather": {"cp_method": "all_gather"},
        "gather_waits": {"cp_method": "all_gather", "cp_overlap": "none"},
        "ulysses": {"cp_method": "ulysses"}}
NAMES = {"ring": "`ring`", "ring_waits": "`ring`, `--cp_overlap none`",
         "all_gather": "`all_gather`", "gather_waits": "`all_gather`, `--cp_overlap none`",
         "ulysses": "`ulysses`"}
DRAWN = ("ring", "ring_waits", "all_gather", "ulysses")
ROUNDS = 3             # in which the ways take turns
LATENCY_US = 100
SHARE = 0.4            # of attention's time
TIMES = ("step_ms", "exposed_ms", "replayed_step_ms", "replayed_exposed_ms")

RECOMPUTE_SHAPE = {**workload.SHAPE, "hidden_size": 256, "ffn_hidden_size": 704, "num_layers": 4,
                   "seq_len": 1024}
RECOMPUTE = {"none": {}, "full": {"recompute": "full"},
             "keep": {"recompute": "full", "cp_recompute": "keep"}}
RECOMPUTE_NAMES = {"none": "`none`", "full": "`full`",
                   "keep": "`full`, `--cp_recompute keep`"}


def link_for(recorded):
    """The --link on which what a rank of a ring sends would take SHARE of its attention's time."""
    own = max(workload.time_of(rank) for rank in workload.attention(recorded))
    messages, sent = sent_in_ring(recorded)
    gb_per_s = sent / (SHARE * own - messages * LATENCY_US / 1000) / 1e6
    return f"node={LATENCY_US},{gb_per_s:.4g}"


def sent_in_ring(recorded):
    """(messages, bytes) of rank 0 in a step, over rings."""
    items = [item for item in recorded.ranks[0].communications
             if item.dimension.startswith("cp_ring") and item.kind == "send"]
    steps = len({item.step for item in items})
    return len(items) / steps, sum(item.wire_bytes for item in items) / steps


def measure(chapter, keep):
    """Steps of every way; calls keep(way, trace) with replays of more ranks."""
    with tempfile.TemporaryDirectory(prefix="book_context_") as scratch:
        say("book: methods of context parallelism on an emulated link")
        link = link_for(workload.run(chapter, Path(scratch) / "unlinked", RANKS, **SHAPE))
        found = {way: [] for way in WAYS}

        def measured(flags):
            run_dir = Path(tempfile.mkdtemp(dir=scratch)) / "run"
            recorded = workload.run(chapter, run_dir, RANKS, **SHAPE, link=link, **flags)
            return _of_a_step(recorded, link)

        for _ in range(ROUNDS):
            for way, flags in WAYS.items():
                found[way].append(measured(flags))
        for way, flags in WAYS.items():
            measure_again(found[way], way, lambda each: {"step_ms": each["step_ms"]}, lambda flags=flags: measured(flags))
        say(f"book: the same on {MORE_RANKS} ranks, to be replayed")
        more, more_link = [], None
        for way, flags in WAYS.items():
            recorded = workload.run(chapter, Path(scratch) / f"more_{way}", MORE_RANKS,
                                    **MORE_SHAPE, **flags)
            more_link = more_link or link_for(recorded)  # the first is the ring
            laid_out = on_links(recorded, more_link)
            step, exposed = steady(laid_out)
            messages, sent = sent_in_a_step(recorded)
            more.append({"way": way, "messages": messages, "sent_bytes": sent, "step_ms": step,
                         "exposed_ms": exposed})
            if way in DRAWN:
                keep(way, laid_out)
        return {"ranks": RANKS, "link": link, "more_ranks": MORE_RANKS, "more_link": more_link,
                "ways": [{"way": way, **_of_rounds(rounds)} for way, rounds in found.items()],
                "more": more, "recompute": _recompute(chapter, scratch)}


def _of_a_step(recorded, link):
    messages, sent = sent_in_a_step(recorded)
    times = (*steady(recorded), *steady(on_links(recorded, link)))
    return {"messages": messages, "sent_bytes": sent, **dict(zip(TIMES, times))}


def _of_rounds(rounds):
    """Medians of the rounds, and the range of their steps."""
    steps = [found["step_ms"] for found in rounds]
    return {**rounds[0], **{name: statistics.median(found[name] for found in rounds)
                            for name in TIMES}, "step_range_ms": [min(steps), max(steps)]}


def _recompute(chapter, scratch):
    """Steps without and with recomputation, in turns: [{way, steps_ms: of each round, ...}]."""
    say("book: full recomputation under context parallelism")
    found = {way: [] for way in RECOMPUTE}
    for number in range(ROUNDS):
        for way, flags in RECOMPUTE.items():
            recorded = workload.run(chapter, Path(scratch) / f"again_{way}_{number}", RANKS,
                                    **RECOMPUTE_SHAPE, **flags)
            found[way].append((steady(recorded)[0], sent_in_ring(recorded)[1]))
    return [{"way": way, "steps_ms": [step for step, _ in rounds], "sent_bytes": rounds[0][1]}
            for way, rounds in found.items()]


def _more(measured, way):
    return next(found for found in measured["more"] if found["way"] == way)


def table(measured):
    """What the ways leave of their communication, measured and replayed."""
    rows = []
    for way in measured["ways"]:
        more = _more(measured, way["way"])
        rows.append([NAMES[way["way"]], f"{way['sent_bytes'] / 2**20:.1f}",
                     f"{way['exposed_ms']:.0f}", f"{way['replayed_exposed_ms']:.0f}",
                     with_range(way["step_ms"], *way["step_range_ms"], " to ", ".0f"),
                     f"{way['replayed_step_ms']:.0f}", f"{more['sent_bytes'] / 2**20:.1f}",
                     f"{more['exposed_ms']:.0f}", f"{more['step_ms']:.0f}"])
    ranks = f"{measured['more_ranks']} ranks"
    return runs.table(
        ["", "sent, MiB", "exposed, ms", "exposed, replayed", "step, ms", "step, replayed",
         f"{ranks}: sent, MiB", "exposed, replayed", "step, replayed"], rows,
        f"A step of rank 0 of {measured['ranks']}, {SHAPE['seq_len']:,} tokens, "
        f"{SHAPE['num_layers']} layers in f32, gradients of weights included. Medians of {ROUNDS} "
        "rounds, in brackets the shortest and the longest. The emulated link is "
        f"`{measured['link']}` (us, GB/s): a ring's messages take {100 * SHARE:.0f} % of "
        f"attention's time. {measured['more_ranks']} ranks: {MORE_SHAPE['seq_len']:,} tokens, on a link of "
        f"`{measured['more_link']}`. Exposed: on the slower rank. Replayed: every thread owns a core.")


def recompute_table(measured, saved):
    """Recomputation; saved: {way: bytes of activations, by a dry run}."""
    rows = []
    base = measured["recompute"][0]
    for found in measured["recompute"]:
        ratios = [step / none for step, none in zip(found["steps_ms"], base["steps_ms"])]
        times = with_range(statistics.median(ratios), min(ratios), max(ratios))
        rows.append([RECOMPUTE_NAMES[found["way"]], f"{saved[found['way']]['saved'] / 2**20:.1f}",
                     f"{found['sent_bytes'] / 2**20:.1f}",
                     f"{saved[found['way']]['flops'] / saved['none']['flops']:.2f}",
                     f"{statistics.median(found['steps_ms']):.0f}",
                     times if found is not base else ""])
    return runs.table(["recompute", "activations, MiB", "sent over `cp`, MiB", "operations, × none",
                       "step, ms", "time, × none (in one round)"], rows,
                      f"{RANKS} ranks, {RECOMPUTE_SHAPE['seq_len']:,} tokens, "
                      f"{RECOMPUTE_SHAPE['num_layers']} layers in f32, a ring. Activations and operations are "
                      f"by a dry run; times are medians of {ROUNDS} rounds, in brackets the lowest and the "
                      "highest.")


def estimate_recompute(program, estimate):
    """{way: {saved, flops}} of rank 0."""
    found = {}
    for way, flags in RECOMPUTE.items():
        case = estimate(program, **RECOMPUTE_SHAPE, cp_size=RANKS, **flags)
        found[way] = {"saved": case["simulated"]["activations"], "flops": case["flops"]}
    return found


def parsed(link):
    """The Link of a --link."""
    return parse_link(link)[1]
