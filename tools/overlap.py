"""How much of data parallelism's communication shows, and how far it scales.

The ranks of this machine exchange gradients over an emulated link, so slow that the naive way spends
a given share of its step on it. More ranks than there are cores are a matter of replay. Used by
`./book bench` and `./book figures`.
"""
import statistics
import tempfile
from pathlib import Path

from tools import build, estimates, machine, mpi, replay, trace
from tools.base import BookError, say
from tools.process import wait_for

RANKS = 2
STEPS, SKIPPED_STEPS = 14, 4  # primitives are created and pages touched in the first ones
WAYS = ("naive", "overlapped", "bucketed")
LATENCY_US = 300  # of the link
SHARE, SHARE_TOLERANCE = 0.4, 0.015  # of the naive way's step that communication takes
MOST_TRIES = 4  # to find the link on which it does
QUIET = {"eval_interval": 0, "sample_tokens": 0, "steps": STEPS, "trace_steps": STEPS,
         "micro_batch_size": 4, "bucket_mb": 0.8}
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
    flags = {**QUIET, **flags, "run_dir": run_dir}
    if flags.get("zero_stage"):
        flags.pop("bucket_mb")  # a unit is a bucket
    program = [str(build.binary(build.RELEASE, chapter.name)), *estimates.words_of(flags)]
    command = mpi.find().command(ranks, program) if ranks > 1 else program
    held = []
    # Also a rank that is alone has one thread: what a step takes must not depend on their number.
    code, _ = wait_for(command, machine.thread_environment(ranks=RANKS), held.append)
    if code != 0:
        raise BookError(f"a run of {chapter.name} ended with exit code {code}:\n{''.join(held)}")
    return trace.load(Path(run_dir) / trace.RECORDED)


def steady(recorded):
    """Median milliseconds over the later steps: (step, exposed communication).

    A step lasts until the next one begins: what it left to be sent may be waited for in between, or
    delay what is. Exposed on the rank on which the least shows, which is the slowest: that is what
    communication adds to the step. A rank that was faster also waits for what the slowest sent late.
    """
    begins = [[share.begin for share in ranks]
              for ranks in list(trace.steps(recorded).values())[SKIPPED_STEPS:]]
    durations, exposed = [], []
    for now, then in zip(begins, begins[1:]):
        durations.append(min(then) - min(now))
        exposed.append(min(
            sum(wait.exposed for wait in rank.waits if begin <= wait.begin < end)
            for rank, begin, end in zip(recorded.ranks, now, then)))
    return statistics.median(durations) / 1000, statistics.median(exposed) / 1000


def typical_step(recorded):
    """The number of the later step that is closest to the median of their times."""
    later = list(trace.steps(recorded).items())[SKIPPED_STEPS:]
    median = statistics.median(trace.step_time(ranks) for _, ranks in later)
    return min(later, key=lambda item: abs(trace.step_time(item[1]) - median))[0]


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
    """What `./book bench` records; with `keep`, calls keep(way, run_dir) while the runs exist."""
    with tempfile.TemporaryDirectory(prefix="book_overlap_") as scratch:
        say("book: data parallelism on an emulated link")
        link, naive = naive_on_its_link(chapter, Path(scratch) / "naive")
        ways = []
        for way in WAYS:
            run_dir = Path(scratch) / way
            recorded = (naive if way == "naive" else
                        run(chapter, run_dir, grad_sync=way, link=link, **SHAPE))
            step, exposed = steady(recorded)
            gradients = [item.payload_bytes for item in recorded.ranks[0].communications
                         if item.kind == "all_reduce" and item.payload_bytes > 8]
            replayed = replay.replay(recorded, replay.choose_machine(recorded, cores=None))
            ways.append({"grad_sync": way, "messages": len(gradients) // STEPS,
                         "last_share": gradients[-1] / gradient_bytes(naive), "step_ms": step,
                         "exposed_ms": exposed, "replayed_step_ms": steady(replayed)[0],
                         "exposed_replayed_ms": steady(replayed)[1]})
            if keep is not None:
                keep(way, run_dir)
    return {"ranks": RANKS, "link": link, "gradient_bytes": gradient_bytes(naive), "ways": ways}


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
