"""Steps of pipelines, measured: how long they take, how long ranks idle, and who works when.

Ranks run on this machine whatever its cores are, and the recording is laid out anew with a core for
every rank: tools/run/replay.py.
"""
import bisect
import collections
import statistics
import tempfile
from pathlib import Path

from tools.base import say, write_whole
from tools.bench.steady import SKIPPED_STEPS, on_links, train
from tools.book.short_runs import table
from tools.look import trace as traces

from . import planned

SHAPE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 704,
         "seq_len": 256, "micro_batch_size": 1, "dp_size": 1}
FAST = "node=10,10"     # a link that costs little: us, GB/s
RANKS, LAYERS = 2, 8    # of the table
MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEDULES = ("afab", "1f1b")
DRAWN_RANKS, DRAWN_LAYERS, DRAWN_MICRO_BATCHES = 4, 8, 8
# Every schedule, with its flags: in a figure of their own each four.
DRAWN = {"afab": {}, "1f1b": {}, "zb_h1": {}, "zb_h2": {}}
TWO_STAGES = {"interleaved": {"pp_chunks": 2}, "breadth_first": {"pp_chunks": 2},
              "llama3": {"pp_chunks": 2, "pp_run_length": 8}, "zb_v": {}}
OTHERS = {"naive": {}, "auto": {}, "dualpipe": {}, "dualpipe_v": {}}
STEPS = 9               # traced ones
CLEAR = 0.05            # a difference between two bubbles that noise should not turn round


def measure(chapter, program):
    """{pace: [a schedule with so many micro-batches], drawn: [a schedule]}"""
    pace, drawn = [], []
    with tempfile.TemporaryDirectory(prefix="book_pipeline_") as scratch:
        for name in SCHEDULES:
            for m in MICRO_BATCHES:
                say(f"book: a pipeline of {RANKS} ranks, {name}, {m} micro-batches")
                recorded = _run(chapter, Path(scratch) / f"{name}_{m}", name, RANKS, m, LAYERS)
                pace.append({"schedule": name, "m": m, **_typical(recorded),
                             "replayed": _typical(on_links(recorded, FAST))})
        for name, flags in {**DRAWN, **TWO_STAGES, **OTHERS}.items():
            say(f"book: a pipeline of {DRAWN_RANKS} ranks, {name}, to be replayed")
            recorded = _run(chapter, Path(scratch) / name, name, DRAWN_RANKS, DRAWN_MICRO_BATCHES,
                            DRAWN_LAYERS, **flags)
            drawn.append(_drawn(program, name, flags, on_links(recorded, FAST), Path(scratch)))
    return {"pace": pace, "drawn": drawn}


def _run(chapter, run_dir, name, ranks, m, layers, **flags):
    return train(chapter, run_dir, ranks, pp_size=ranks, pp_schedule=name, grad_acc_steps=m,
                 num_layers=layers, steps=STEPS, trace_steps=STEPS, **flags, **SHAPE)


# --- what the ranks do in a step ------------------------------------------------------------------


def passes(rank, step):
    """[(name, begin, end)] of a rank in a step: forward, backward, and W where weights waited."""
    own = [span for span in rank.spans if span.step == step]
    found = [(span.name, span.begin, span.begin + span.duration) for span in own
             if span.category == "phase" and span.name in ("forward", "backward")]
    begins = [begin for _, begin, _ in found]
    optimizer = min((span.begin for span in own if span.name == "optimizer"), default=float("inf"))
    late = {}  # products between passes: those of weights
    for span in own:
        gap = bisect.bisect_right(begins, span.begin)
        inside = gap > 0 and span.begin < found[gap - 1][2]
        if span.category == "op" and span.flops > 0 and not inside and 0 < gap \
                and span.begin < optimizer:
            late.setdefault(gap, []).append((span.begin, span.begin + span.duration))
    for ops in late.values():
        found.append(("W", min(begin for begin, _ in ops), max(end for _, end in ops)))
    return sorted(found, key=lambda own: own[1])


def shares(recorded, step):
    """(ms from the first pass to the last one's end, bubble) of a step."""
    ranks = [passes(rank, step) for rank in recorded.ranks]
    span = max(own[-1][2] for own in ranks) - min(own[0][1] for own in ranks)
    work = sum(end - begin for own in ranks for _, begin, end in own)
    return span / 1000, len(ranks) * span / work - 1


def _typical(recorded):
    """Medians of the later steps: of a step, of its passes, and of their bubble."""
    later = list(traces.steps(recorded).items())[SKIPPED_STEPS:]
    found = [shares(recorded, step) for step, _ in later]
    bubbles = [bubble for _, bubble in found]
    return {"step_ms": round(statistics.median(traces.step_time(of_ranks) / 1000
                                               for _, of_ranks in later), 3),
            "passes_ms": round(statistics.median(span for span, _ in found), 3),
            "bubble": round(statistics.median(bubbles), 4),
            "bubble_range": [round(min(bubbles), 4), round(max(bubbles), 4)]}


# --- one step, drawn ------------------------------------------------------------------------------


def _drawn(program, name, flags, laid_out, folder):
    """The step of a median bubble: what its ranks did, and what the simulator makes of its own
    times."""
    later = list(traces.steps(laid_out))[SKIPPED_STEPS:]
    by_length = sorted(later, key=lambda step: shares(laid_out, step)[0])
    step = by_length[len(by_length) // 2]
    plan = planned.ask(program, name, DRAWN_RANKS, DRAWN_MICRO_BATCHES, **flags)
    ranks = [passes(rank, step) for rank in laid_out.ranks]
    first = min(own[0][1] for own in ranks)
    actions = [[action["action"] for action in of_rank] for of_rank in plan["actions"]]
    measured = [_label(own, of_rank, first) for own, of_rank in zip(ranks, actions)]
    times = _times(measured, actions)
    table = folder / f"{name}.txt"  # other times would make another one of auto
    write_whole(table, planned.table_of(program, name, DRAWN_RANKS, DRAWN_MICRO_BATCHES, **flags))
    simulated = planned.ask(program, table, DRAWN_RANKS, DRAWN_MICRO_BATCHES,
                            times=",".join(f"{time:g}" for time in (*times, 0)))
    span, bubble = shares(laid_out, step)
    return {"name": name, "ranks": DRAWN_RANKS, "micro_batches": DRAWN_MICRO_BATCHES, **flags,
            "times": times, "measured_ms": round(span, 3), "measured_bubble": round(bubble, 4),
            "simulated_ms": simulated["makespan"], "simulated_bubble": round(simulated["bubble"], 4),
            "measured": measured,
            "simulated": [[[own["action"], round(own["begin"], 3), round(own["end"], 3)]
                           for own in of_rank] for of_rank in simulated["actions"]]}


def _times(measured, actions):
    """Mean ms of F, B and W of a stage; where no W waits, B and W are halves of BW. actions: by name,
    what the measured passes are; a box of W may be several of them."""
    count = collections.Counter(_work(name) for of_rank in actions for name in of_rank)
    total = collections.Counter()
    for of_rank in measured:
        for name, begin, end in of_rank:
            total[_work(name)] += end - begin
    mean = {work: total[work] / count[work] for work in count}
    half = mean.get("BW", 0) / 2
    return [round(time, 4) for time in (mean["F"], mean.get("B", half), mean.get("W", half))]


def _work(action):
    """F, B, W or BW."""
    return action.rstrip(".0123456789")


def _label(own, actions, first):
    """The passes with the names of the schedule's actions, in ms; W in a row stay one."""
    queue = {"forward": [a for a in actions if a[0] == "F"],
             "backward": [a for a in actions if a[0] == "B"]}
    return [[queue[name].pop(0) if name in queue else "W", round((begin - first) / 1000, 3),
             round((end - first) / 1000, 3)] for name, begin, end in own]


# --- tables ---------------------------------------------------------------------------------------


def formula(m):
    return (RANKS - 1) / m


def pace_table(measured):
    """Bubbles and steps over the number of micro-batches."""
    rows = []
    for m in MICRO_BATCHES:
        row = [str(m), f"{formula(m):.3f}"]
        for name in SCHEDULES:
            own = next(case["replayed"] for case in measured
                       if (case["schedule"], case["m"]) == (name, m))
            row += ["{:.3f} ({:.3f}–{:.3f})".format(own["bubble"], *own["bubble_range"]),
                    f"{own['step_ms']:.0f}", f"{own['step_ms'] / m:.1f}"]
        rows.append(row)
    head = [text for name in SCHEDULES for text in (f"`{name}`: bubble", "step, ms",
                                                     "of a micro-batch")]
    return table(["`m`", "`(p-1)/m`", *head], rows,
                 f"`p` = {RANKS}, {LAYERS} layers in f32, {SHAPE['seq_len']} tokens a micro-batch, "
                 "replayed with a core for each rank. Medians of the later steps, in brackets the "
                 "lowest and the highest. A step has the update, too; the bubble is that of forward "
                 "and backward.")


def drawn_table(measured):
    """Steps beside what the simulator makes of their own times."""
    rows = [[f"`{own['name']}`", *(f"{time:.2f}" for time in own["times"]),
             f"{own['simulated_ms']:.1f}", f"{own['measured_ms']:.1f}",
             f"{own['measured_ms'] / own['simulated_ms']:.3f}", f"{own['simulated_bubble']:.3f}",
             f"{own['measured_bubble']:.3f}"] for own in measured]
    return table(["", "F, ms", "B", "W", "simulated, ms", "measured", "ratio", "bubble, simulated",
                  "measured"], rows,
                 f"A step of {DRAWN_RANKS} ranks, {DRAWN_MICRO_BATCHES} micro-batches, from the first "
                 "forward to the last gradient, replayed with a core for each rank. F, B and W are "
                 "means of this step, for a stage, and what it was simulated with. Where no W waits, "
                 f"B and W are halves of BW. {_order(measured)}")


def _order(measured):
    """Whether who idles more in the plan does so when measured."""
    pairs = [(more, less) for more in measured for less in measured
             if more["simulated_bubble"] - less["simulated_bubble"] >= CLEAR]
    kept = sum(more["measured_bubble"] > less["measured_bubble"] for more, less in pairs)
    return (f"Of {len(pairs)} pairs whose simulated bubbles differ by {CLEAR:g} or more, {kept} "
            "have the same order when measured.")
