"""What `./book bench` says of a pipeline: its speed beside that of one rank with its cores, and what
the one loop costs beside the work that it calls.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench import layouts
from tools.bench.bench import CONFIGS, SKIPPED_STEPS
from tools.bench.steady import train
from tools.look import trace as traces

from . import pace

MICRO_BATCHES = 8
# The bench's models, whose batch is cut into micro-batches of one sample.
MODELS = {name: {**config, "micro_batch_size": 1, "grad_acc_steps": MICRO_BATCHES}
          for name, config in CONFIGS.items()}
PROFILED = "B"          # whose steps are traced
RANKS, STEPS = (1, 2), 5
GOAL = 0.95             # of the speed that the bubble leaves
MOST_OUTSIDE = 0.01     # of a step


def left_by_the_bubble(ranks):
    """The share of a rank's time that it works: 1 / (1 + r)."""
    return 1 / (1 + (ranks - 1) / MICRO_BATCHES)


def measure(chapter, record):
    """{layouts, loop}: speeds beside one rank's, and where a step goes."""
    say("book: what the loop over a schedule costs")
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        loop = [{"ranks": ranks, **_profile(train(
            chapter, Path(scratch) / str(ranks), ranks, **MODELS[PROFILED], pp_size=ranks,
            dp_size=1, steps=STEPS, trace_steps=STEPS))} for ranks in RANKS]
    found = [{**own, "left_by_bubble": round(left_by_the_bubble(own["ranks"]), 4)}
             for own in layouts.compare(record["results"])]
    return {"layouts": found, "loop": loop}


def _profile(recorded):
    """Medians of the later steps: ms, of the passes of each rank, of waiting between them, of the
    loop itself, of what comes after the passes."""
    rows = [_of_step(recorded, step) for step in list(traces.steps(recorded))[SKIPPED_STEPS:]]
    columns = list(zip(*rows))
    medians = [[round(statistics.median(of_rank), 3) for of_rank in zip(*column)]
               for column in columns]
    found = dict(zip(("step_ms", "passes_ms", "waits_ms", "loop_ms", "forward_ms", "backward_ms"),
                     medians))
    return {**found, "planned_ms": round(planned_ms(found["forward_ms"], found["backward_ms"]), 3)}


def _of_step(recorded, step):
    """Of each rank, ms: (the step, its passes, waits between them, what is left between them, a
    forward pass, a backward pass)."""
    found = []
    shares = traces.steps(recorded)[step]
    for rank, share in zip(recorded.ranks, shares):
        own = pace.passes(rank, step)
        begin, end = own[0][1], own[-1][2]
        inside = sum(to - at for _, at, to in own)
        waits = sum(min(end, wait.begin + wait.duration) - max(begin, wait.begin)
                    for wait in rank.waits
                    if wait.begin + wait.duration > begin and wait.begin < end)
        means = [sum(to - at for name, at, to in own if name == kind) / MICRO_BATCHES
                 for kind in ("forward", "backward")]
        found.append((share.end - share.begin, inside, waits, end - begin - inside - waits, *means))
    return [[value / 1000 for value in values] for values in zip(*found)]


def planned_ms(forward, backward):
    """From the first pass to the last one's end by 1F1B, where each rank's passes take so long."""
    ranks, m = len(forward), MICRO_BATCHES
    free, made = [0.0] * ranks, {}
    left = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, m)
        left.append([("F", i) for i in range(ahead)]
                    + [work for i in range(ahead, m) for work in (("F", i), ("B", i - ahead))]
                    + [("B", i) for i in range(m - ahead, m)])
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                work, i = actions[0]
                before = rank - 1 if work == "F" else rank + 1
                if 0 <= before < ranks and (work, i, before) not in made:
                    break
                begin = max(free[rank], made.get((work, i, before), 0))
                free[rank] = begin + (forward if work == "F" else backward)[rank]
                made[work, i, rank] = free[rank]
                actions.pop(0)
    return max(free)


def outside(entry):
    """The largest share of a step that is neither work nor waiting, of the loop's ranks."""
    return max(loop / step for loop, step in zip(entry["loop_ms"], entry["step_ms"]))


def lines(record):
    """Speeds beside what the bubble leaves, and the loop's own time, as Markdown."""
    if "layouts" not in record:
        return []
    speeds = {(r["config"], r["dtype"], r["ranks"]): r["summary"]["tokens_per_s"]["median"]
              for r in record["results"]}
    rows = ["", "| | ranks | tokens/s | with one rank | ratio | left by the bubble | of that |",
            "|---|---:|---:|---:|---:|---:|---:|"]
    for own in record["layouts"]:
        case = own["config"], own["dtype"]
        rows.append(f"| {' '.join(case)} | {own['ranks']} | {speeds[(*case, own['ranks'])]:,.0f} | "
                    f"{speeds[(*case, 1)]:,.0f} | {own['ratio']:.3f} | {own['left_by_bubble']:.3f} | "
                    f"{own['ratio'] / own['left_by_bubble']:.3f} |")
    rows += ["", f"| {PROFILED} f32 | step, ms | a forward pass | a backward pass | from first to last "
             "pass | by these passes | waiting | the loop itself | of the step |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for entry in record["loop"]:
        for rank in range(entry["ranks"]):
            step, passes, waits, loop, f, b = (entry[name][rank] for name in (
                "step_ms", "passes_ms", "waits_ms", "loop_ms", "forward_ms", "backward_ms"))
            rows.append(f"| rank {rank} of {entry['ranks']} | {step:.1f} | {f:.1f} | {b:.1f} | "
                        f"{passes + waits + loop:.1f} | {entry['planned_ms']:.1f} | {waits:.1f} | "
                        f"{loop:.2f} | {100 * loop / step:.2f} % |")
    return rows


def text(record):
    """The same for the terminal, with the goals."""
    for own in record.get("layouts", []):
        yield (f"{own['config']} {own['dtype']}: {own['ranks']} stages of one thread reach "
               f"{own['ratio']:.3f} of the tokens/s of one rank with all threads; the bubble leaves "
               f"{own['left_by_bubble']:.3f}, of which that is "
               f"{own['ratio'] / own['left_by_bubble']:.3f} (goal: {GOAL})")
    for entry in record.get("loop", []):
        yield (f"{PROFILED} f32 on {entry['ranks']}: the loop itself takes "
               f"{100 * outside(entry):.2f} % of a step (goal: at most {100 * MOST_OUTSIDE:g} %)")
