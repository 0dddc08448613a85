"""How much of data parallelism's communication shows, and how far it scales.

The ranks of this machine exchange gradients over an emulated link, so slow that the naive way spends
a given share of its step on it. More ranks than there are cores are a matter of replay.
"""
import tempfile
import textwrap
from pathlib import Path

from tools.base import say
from tools.bench.steady import STEPS, later_steps, steady, train
from tools.run import estimates, replay

RANKS = 2
WAYS = ("naive", "overlapped", "bucketed")
LATENCY_US = 1500  # of the link: two ranks then wait as long as a ring of 16 on links of 100 us
LATENCIES_US = (15, 150, 1500)  # of links on which the same runs are replayed
SHARE, SHARE_TOLERANCE = 0.4, 0.015  # of the naive way's step that communication takes
MOST_TRIES = 4  # to find the link on which it does
FLAGS = {"micro_batch_size": 4, "bucket_mb": 0.8}
# Communication here is as long as the backward pass that is to hide it, unless that recomputes its
# blocks, as those of large models do. Of a model with many layers, gradients become ready in small
# portions. 8 buckets, the last almost as full as the others.
SHAPE = {"num_layers": 12, "seq_len": 1024, "micro_batch_size": 1, "recompute": "full",
         "bucket_mb": 2.62}


# The machine on which more ranks are laid out: nodes of 8, as the book's.
NODE_SIZE, NODE_LINK, NET_LINK = 8, "node=100,2", "net=200,1"
SCALES = (2, 4, 8, 16, 32, 64)


def run(chapter, run_dir, ranks=RANKS, **flags):
    """Trains for a few traced steps; the trace."""
    flags = {**FLAGS, **flags}
    if flags.get("zero_stage"):
        flags.pop("bucket_mb")  # a unit is a bucket
    # Also a rank that is alone has one thread: what a step takes must not depend on their number.
    return train(chapter, run_dir, ranks, share=RANKS, **flags)


def link_for(recorded):
    """The --link on which the all-reduce of a recorded naive run would take SHARE of its step."""
    step, exposed = steady(recorded)
    communication = (step - exposed) * SHARE / (1 - SHARE)  # ms
    # The all-reduce of two ranks: two messages of half of it, one after the other.
    gb_per_s = gradient_bytes(recorded) / (communication - 2 * LATENCY_US / 1000) / 1e6
    return f"node={LATENCY_US},{gb_per_s:.4g}"


def gradient_bytes(recorded):
    """The largest message's."""
    return max(item.payload_bytes for rank in recorded.ranks for item in rank.communications)


def naive_on_its_link(chapter, run_dir):
    """(the link, a naive run on it). A machine computes faster at one time than at another, so the
    share that communication takes is looked at, and the link chosen again where it is off."""
    link = link_for(run(chapter, run_dir, grad_sync="naive", **SHAPE))
    for _ in range(MOST_TRIES):
        recorded = run(chapter, run_dir, grad_sync="naive", link=link, overwrite=None, **SHAPE)
        step, exposed = steady(recorded)
        if abs(exposed / step - SHARE) <= SHARE_TOLERANCE:
            break
        link = link_for(recorded)
    return link, recorded


def measure(chapter, keep=None):
    """The ways of data parallelism; with `keep`, calls keep(way, run_dir) while the runs exist."""
    with tempfile.TemporaryDirectory(prefix="book_overlap_") as scratch:
        say("book: data parallelism on an emulated link")
        link, naive = naive_on_its_link(chapter, Path(scratch) / "naive")
        ways = []
        for way in WAYS:
            run_dir = Path(scratch) / way
            recorded = (naive if way == "naive" else
                        run(chapter, run_dir, grad_sync=way, link=link, **SHAPE))
            gradients = [item.payload_bytes for item in recorded.ranks[0].communications
                         if item.kind == "all_reduce" and item.payload_bytes > 8]
            replayed = _replayed(recorded, link)
            durations = later_steps(recorded)[0]
            ways.append({"grad_sync": way, "messages": len(gradients) // STEPS,
                         "last_share": gradients[-1] / gradient_bytes(naive),
                         "step_ms": steady(recorded)[0], "exposed_ms": steady(recorded)[1],
                         "step_range_ms": [min(durations), max(durations)],
                         "replayed_step_ms": replayed[0], "exposed_replayed_ms": replayed[1],
                         "by_latency": [dict(zip(("latency_us", "step_ms", "exposed_ms"), (
                             latency, *_replayed(recorded, _with_latency(link, latency)))))
                                        for latency in LATENCIES_US]})
            if keep is not None:
                keep(way, run_dir)
    return {"ranks": RANKS, "link": link, "gradient_bytes": gradient_bytes(naive), "ways": ways}


def _replayed(recorded, link):
    """(step, exposed communication) in ms of a run laid out on a link, a core for every thread."""
    return steady(replay.replay(recorded, replay.choose_machine(recorded, links=(link,))))


def _with_latency(link, latency_us):
    """The same link, of another latency."""
    return f"node={latency_us},{replay.parse_link(link)[1].gb_per_s:g}"


def check_replay(chapter):
    """[{ranks, step_ms, replayed_step_ms}] of runs on this machine's own links and cores."""
    checks = []
    with tempfile.TemporaryDirectory(prefix="book_replay_") as scratch:
        for ranks in (1, RANKS):
            recorded = run(chapter, Path(scratch) / str(ranks), ranks=ranks)
            layout = replay.choose_machine(recorded, cores=recorded.facts["cores"])
            checks.append({"ranks": ranks, "step_ms": steady(recorded)[0],
                           "replayed_step_ms": steady(replay.replay(recorded, layout))[0]})
    return checks


def _rate(recorded, ranks):
    """(tokens/s of a rank, its step in ms, of these exposed) over the later steps."""
    step, exposed = steady(recorded)
    tokens = recorded.facts["global_batch_tokens"] / ranks
    return {"ranks": ranks, "tokens_per_s_per_rank": 1000 * tokens / step, "step_ms": step,
            "exposed_ms": exposed}


def scaling(chapter):
    """Tokens/s of a rank, its micro-batch held fixed: measured on 1 and 2 ranks, replayed on more."""
    with tempfile.TemporaryDirectory(prefix="book_scaling_") as scratch:
        say("book: how far data parallelism scales")
        alone = run(chapter, Path(scratch) / "alone", ranks=1)
        pair = run(chapter, Path(scratch) / "pair", link=NODE_LINK)
        tokens = pair.facts["global_batch_tokens"] // RANKS
        replayed = []
        for ranks in SCALES:
            wide = replay.scale(pair, ranks) if ranks != RANKS else pair
            links = (NODE_LINK, NET_LINK) if ranks > NODE_SIZE else (NODE_LINK,)
            layout = replay.choose_machine(wide, node_size=NODE_SIZE, links=links)
            result = replay.replay(wide, layout)
            result.facts["global_batch_tokens"] = tokens * ranks
            replayed.append(_rate(result, ranks))
        return {"node_size": NODE_SIZE, "links": [NODE_LINK, NET_LINK], "tokens_per_rank": tokens,
                "measured": [_rate(alone, 1), _rate(pair, RANKS)], "replayed": replayed}


def memory(program):
    """[{ranks, states, activations, scratch}] in bytes of rank 0, by a dry run."""
    found = []
    for ranks in (1, *SCALES):
        said = estimates.estimate(program, {**FLAGS, "dp_size": ranks})
        held, scratch = said["simulated"], said["buffers"].get("scratch of reductions")
        found.append({"ranks": ranks, "activations": held["activations"],
                      "states": held["weights"] + held["gradients"] + held["optimizer"],
                      "scratch": scratch["bytes"] if scratch else 0})
    return found


def on_the_link(measured, way):
    """Milliseconds for which a way's messages keep the link busy: the formula of a ring."""
    link, n = replay.parse_link(measured["link"])[1], measured["ranks"]
    latency = 2 * (n - 1) * link.latency_us / 1000
    return way["messages"] * latency + 2 * (n - 1) / n * link.transmission(
        measured["gradient_bytes"]) / 1000


def note(text):
    """A paragraph below a table, in lines that a page may have."""
    return "\n\n" + textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False) + "\n"


def table(record):
    """What the ways of data parallelism leave of their communication, measured and replayed."""
    measured = record["overlap"]
    rows = [f"| {way['grad_sync']} | {way['messages']} | {on_the_link(measured, way):.0f} | "
            f"{way['exposed_ms']:.0f} | {way['exposed_replayed_ms']:.0f} | "
            f"{way['step_ms']:.0f} ({' to '.join(f'{ms:.0f}' for ms in way['step_range_ms'])}) | "
            f"{way['replayed_step_ms']:.0f} |" for way in measured["ways"]]
    return ("| `--grad_sync` | messages | on the link, by formula | exposed, measured | "
            "exposed, replayed | step, measured | step, replayed |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(rows) + note(
                f"Milliseconds, medians over the later of {STEPS} steps; in brackets the shortest "
                f"and the longest. {measured['ranks']} ranks of one thread; emulated link "
                f"`{measured['link']}` (us, GB/s). Formula: messages · 2 (dp-1) latency + "
                "2 (dp-1)/dp · bytes / bandwidth. Exposed: on the slower rank. Replayed: every "
                "thread owns a core."))


def latency_table(record):
    """The same runs, replayed on links of other latencies."""
    measured = record["overlap"]
    rate = replay.parse_link(measured["link"])[1].gb_per_s
    latencies = [found["latency_us"] for found in measured["ways"][0]["by_latency"]]
    head = "".join(f" {latency} us: step | exposed |" for latency in latencies)
    rows = ["| " + f"{way['grad_sync']} | {way['messages']} | " + " | ".join(
        f"{found['step_ms']:.0f} | {found['exposed_ms']:.0f}" for found in way["by_latency"]) + " |"
            for way in measured["ways"]]
    return (f"| `--grad_sync` | messages |{head}\n" + "|---" * (2 + 2 * len(latencies)) + "|\n"
            + "\n".join(rows) + note(
                "Milliseconds of a step: the runs of part 5 of the chapter, replayed on a link of "
                f"{rate:g} GB/s and these latencies."))
