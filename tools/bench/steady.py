"""What the steps of a traced run took once it was under way."""
import statistics
from pathlib import Path

from tools import machine
from tools.base import BookError
from tools.look import trace
from tools.process import wait_for
from tools.run import build, estimates, mpi, replay

STEPS, SKIPPED_STEPS = 14, 4  # primitives are created and pages touched in the first ones
SCALARS = 8  # bytes of messages that only count or measure something
QUIET = {"eval_interval": 0, "sample_tokens": 0, "steps": STEPS, "trace_steps": STEPS}


def train(chapter, run_dir, ranks, share=None, **flags):
    """Trains for a few steps, every one traced; the trace. share: ranks that the cores are shared
    out to, where a step must not depend on how many there are."""
    program = [str(build.binary(build.RELEASE, chapter.name)),
               *estimates.words_of({**QUIET, **flags, "run_dir": run_dir})]
    command = mpi.find().command(ranks, program) if ranks > 1 else program
    held = []
    code, _ = wait_for(command, machine.thread_environment(ranks=share or ranks), held.append)
    if code != 0:
        raise BookError(f"a run of {chapter.name} ended with exit code {code}:\n{''.join(held)}")
    return trace.load(Path(run_dir) / trace.RECORDED)


def on_links(recorded, *links, node_size=None):
    """The run laid out on such links, and with a core for every thread."""
    return replay.replay(recorded, replay.choose_machine(recorded, node_size=node_size,
                                                         links=links))


def sent_in_a_step(recorded):
    """(messages, bytes sent) of rank 0 in a step, without those that only count something."""
    items = [item for item in recorded.ranks[0].communications if item.payload_bytes > SCALARS]
    steps = len(trace.steps(recorded))
    return len(items) / steps, sum(item.wire_bytes for item in items) / steps


def steady(recorded):
    """Medians of later_steps(): (step, exposed communication)."""
    return tuple(statistics.median(values) for values in later_steps(recorded))


def later_steps(recorded):
    """Milliseconds of the later steps: ([step], [exposed communication]).

    A step lasts until the next one begins: what it left to be sent may be waited for in between, or
    delay what is. Exposed on the rank on which the least shows, which is the slowest: that is what
    communication adds to the step. A rank that was faster also waits for what the slowest sent late.
    """
    begins = [[share.begin for share in ranks]
              for ranks in list(trace.steps(recorded).values())[SKIPPED_STEPS:]]
    durations, exposed = [], []
    for now, then in zip(begins, begins[1:]):
        durations.append((min(then) - min(now)) / 1000)
        exposed.append(min(
            sum(wait.exposed for wait in rank.waits if begin <= wait.begin < end)
            for rank, begin, end in zip(recorded.ranks, now, then)) / 1000)
    return durations, exposed


def typical_step(recorded):
    """The number of the later step that is closest to the median of their times."""
    later = list(trace.steps(recorded).items())[SKIPPED_STEPS:]
    median = statistics.median(trace.step_time(ranks) for _, ranks in later)
    return min(later, key=lambda item: abs(trace.step_time(item[1]) - median))[0]
