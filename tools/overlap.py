"""How much of data parallelism's communication shows, for naive, overlapped and bucketed gradients.

The ranks of this machine exchange gradients over an emulated link, so slow that the naive way spends
a given share of its step on it. Used by `./book bench` and `./book figures`.
"""
import statistics
import tempfile
from pathlib import Path

from tools import build, machine, mpi, replay, runs, trace
from tools.base import BookError, say
from tools.process import wait_for

RANKS = 2
STEPS, SKIPPED_STEPS = 6, 2  # primitives are created and pages touched in the first ones
WAYS = ("naive", "overlapped", "bucketed")
LATENCY_US = 500  # of the link
SHARE = 0.4  # of the naive way's step that communication takes
BUCKET_MB = 0.8  # at least 8 of them
QUIET = {"eval_interval": 0, "sample_tokens": 0, "steps": STEPS, "trace_steps": STEPS,
         "micro_batch_size": 4, "bucket_mb": BUCKET_MB}


def run(chapter, run_dir, **flags):
    """Trains for a few traced steps on RANKS ranks; the trace."""
    words = [word for name, value in {**QUIET, **flags, "run_dir": run_dir}.items()
             for word in (f"--{name}", str(value))]
    command = mpi.find().command(RANKS, [str(build.binary(build.RELEASE, chapter.name)), *words])
    held = []
    code, _ = wait_for(command, machine.thread_environment(ranks=RANKS), held.append)
    if code != 0:
        raise BookError(f"a run of {chapter.name} ended with exit code {code}:\n{''.join(held)}")
    return trace.load(Path(run_dir) / trace.RECORDED)


def steady(recorded):
    """Median milliseconds over the later steps: (step, exposed communication per rank)."""
    shares = list(trace.steps(recorded).values())[SKIPPED_STEPS:]
    step = statistics.median(trace.step_time(ranks) for ranks in shares)
    exposed = statistics.median(statistics.mean(share.exposed for share in ranks)
                                for ranks in shares)
    return step / 1000, exposed / 1000


def link_for(chapter, scratch):
    """The --link on which communication takes SHARE of the naive way's step, and the bytes of it."""
    recorded = run(chapter, Path(scratch) / "quiet", grad_sync="naive")
    step, exposed = steady(recorded)
    communication = (step - exposed) * SHARE / (1 - SHARE)  # ms
    size = max(item.payload_bytes for rank in recorded.ranks for item in rank.communications)
    # The all-reduce of two ranks: two messages of half of it, one after the other.
    gb_per_s = size / (communication - 2 * LATENCY_US / 1000) / 1e6
    return f"node={LATENCY_US},{gb_per_s:.4g}", size


def measure(chapter, keep=None):
    """What `./book bench` records; with `keep`, calls keep(way, run_dir) while the runs exist."""
    with tempfile.TemporaryDirectory(prefix="book_overlap_") as scratch:
        link, size = link_for(chapter, scratch)
        say(f"book: data parallelism on an emulated link, {link}")
        ways = []
        for way in WAYS:
            run_dir = Path(scratch) / way
            recorded = run(chapter, run_dir, grad_sync=way, link=link)
            step, exposed = steady(recorded)
            messages = sum(item.kind == "all_reduce" and item.payload_bytes > 8
                           for item in recorded.ranks[0].communications) // STEPS
            replayed = replay.replay(recorded, replay.choose_machine(recorded, cores=None))
            ways.append({"grad_sync": way, "messages": messages, "step_ms": step,
                         "exposed_ms": exposed, "replayed_step_ms": steady(replayed)[0],
                         "exposed_replayed_ms": steady(replayed)[1]})
            if keep is not None:
                keep(way, run_dir)
    return {"ranks": RANKS, "link": link, "gradient_bytes": size, "ways": ways}
