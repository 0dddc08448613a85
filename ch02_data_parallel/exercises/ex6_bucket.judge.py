"""Judge of ch02.ex6: steps on an emulated link, with the reader's bucket size and with others."""
from tools.base import BookError
from tools.exercise import quantity
from tools.exercise.lab import NotYet

FLAGS = {"link": "node=1500,0.04", "steps": 6, "micro_batch_size": 8, "sample_tokens": 0,
         "eval_samples": 0}
OTHERS = (1, 2)     # MiB
LATENCY_MS = 1.5
GRADIENTS = 7.13    # MiB, of the default model in f32
SLACK = 1.15        # times the fastest
WARM_UP = 2         # steps that do not count


def judge(answer, lab):
    """Lines for a right answer; NotYet for a bucket that makes steps longer than they need be."""
    mine = quantity.parse(answer, "MiB")
    if not 0 < mine <= 1e6:
        raise BookError(f"--bucket_mb {answer} must lie above 0 and be at most 1e6; try 0.1", 2)
    sizes = [mine, *(size for size in OTHERS if size != mine)]
    times = {size: step_ms(lab, size) for size in sizes}
    best = min(sizes, key=times.get)
    rows = [f"--bucket_mb {size:<6g} {times[size]:6.0f} ms a step, {messages(size)} "
            f"message{'s' if messages(size) > 1 else ''}" for size in sizes]
    if times[mine] <= SLACK * times[best]:
        return rows
    if mine < best:
        raise NotYet(f"the bucket is too small: {messages(mine)} messages cost two latencies each, "
                     f"{2 * LATENCY_MS * messages(mine):g} ms on this link", *rows)
    raise NotYet("the bucket is too large: the last one is full when backward is over, and nothing "
                 "hides it", *rows)


def settings():
    """Of the runs that the course keeps, so that no test of it depends on time: tools/exercise/lab.py."""
    return [{"ranks": 2, "bucket_mb": size, **FLAGS} for size in (0.04, 0.25, 0.5, *OTHERS, 4, 25)]


def step_ms(lab, size):
    """The shortest step, which nothing else on the machine has disturbed; not of the first ones."""
    steps = lab.run("ch02", ranks=2, bucket_mb=size, **FLAGS).steps()
    return min(step["step_ms"] for step in steps[WARM_UP:])


def messages(size):
    """Buckets of the default model's gradients."""
    return max(1, -int(-GRADIENTS // size))
