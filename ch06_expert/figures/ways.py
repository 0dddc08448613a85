"""How much of the rows' way to experts and back shows: with weight gradients alone beside it, with shared experts, and
with two micro-batches in turns.

Two ranks are measured on an emulated link, on which rows take a given share of the step that hides
nothing. All are replayed on it, with a core for every rank.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links, steady, train
from tools.book.rounds import measure_again, with_range
from tools.book.short_runs import table
from tools.look import runs, timelines, trace
from tools.run import replay

SHAPE = {"hidden_size": 192, "num_heads": 4, "num_kv_heads": 4, "num_layers": 4, "seq_len": 128,
         "ffn_hidden_size": 384, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_ffn_hidden_size": 192, "micro_batch_size": 1, "steps": 9, "trace_steps": 9}
ALONE = {"grad_acc_steps": 8}
SHARED = {**ALONE, "num_shared_experts": 1}
# As many samples in a step as four ranks have without stages.
DUALPIPE = {"pp_size": 2, "pp_schedule": "dualpipe", "grad_acc_steps": 16}
TURNS = {**DUALPIPE, "overlap_dispatch": None}
# {way: (ranks, flags)}; the ranks of a stage divide its experts.
WAYS = {"plain_2": (2, ALONE), "shared_2": (2, SHARED), "plain_4": (4, ALONE),
        "shared_4": (4, SHARED), "one_by_one": (4, DUALPIPE), "turns": (4, TURNS),
        "turns_shared": (4, {**TURNS, "num_shared_experts": 1})}
NAMES = {"plain_2": "weight gradients alone", "shared_2": "shared experts", "plain_4": "weight gradients alone",
         "shared_4": "shared experts", "one_by_one": "`dualpipe`, one pass at a time",
         "turns": "`dualpipe`, two passes in turns", "turns_shared": "`dualpipe`, in turns, and shared experts"}
MEASURED = ("plain_2", "shared_2")  # as many ranks as cores
DRAWN = ("plain_2", "shared_2", "one_by_one", "turns")
AT, PART_US = 0.4, 60000            # from where in a step, and for how long
ROUNDS = 3                          # of those, in turns
LATENCY_US, SHARE = 100, 0.35       # of the step
FASTER = (1, 2, 4, 8)               # links of so many times the bandwidth
# {schedule: (ranks, flags)}: what passes in turns hide under each, and what they cost.
INTERLEAVED = {"pp_size": 2, "pp_schedule": "interleaved", "pp_chunks": 2, "grad_acc_steps": 16}
SCHEDULES = {"without a pipeline": (2, ALONE), "`interleaved`, `v` = 2": (4, INTERLEAVED), "`dualpipe`": (4, DUALPIPE)}
ORDERS = {"one pass at a time": {}, "in turns": {"overlap_dispatch": None}}


def run(chapter, run_dir, way, **more):
    """A few traced steps; the trace."""
    return run_on(chapter, run_dir, *WAYS[way], **more)


def run_on(chapter, run_dir, ranks, flags, **more):
    """The same on so many ranks, with these flags."""
    return train(chapter, run_dir, ranks, ep_size=ranks // flags.get("pp_size", 1),
                 **{**SHAPE, **flags, **more})


def is_of_rows(group):
    """Whether rows or their counts travel over it."""
    return group.startswith("ep")


def of_rows(recorded):
    """Of a later step, in ms: (rows and counts on their way, of that exposed, other messages exposed);
    means over ranks, medians over steps."""
    found = []
    for step, groups in list(trace.exposed_by_group(recorded).items())[SKIPPED_STEPS:]:
        way = statistics.fmean(sum(item.duration for item in rank.communications
                                   if item.step == step and is_of_rows(item.dimension))
                               for rank in recorded.ranks)
        exposed = {name: statistics.fmean(of_ranks) for name, of_ranks in groups.items()}
        rows = sum(value for name, value in exposed.items() if is_of_rows(name))
        found.append((way / 1000, rows / 1000, (sum(exposed.values()) - rows) / 1000))
    return tuple(map(statistics.median, zip(*found)))


def left_of(recorded):
    """Of what is exposed of rows in a later step, in ms: [counts, of passes without a partner, of two
    passes in turns]; means over ranks, medians over steps."""
    found = {}
    for number, rank in enumerate(recorded.ranks):
        passes = [(span.begin, span.begin + span.duration) for span in rank.spans
                  if span.category == "phase" and span.name in ("forward", "backward")]
        for wait in rank.waits:
            group = recorded.group(number, wait.group).name
            if not is_of_rows(group):
                continue
            around = sum(begin <= wait.begin < end for begin, end in passes)
            kind = 0 if group.endswith("counts") else min(around, 2)
            own = found.setdefault(wait.step, [0.0, 0.0, 0.0])
            own[kind] += wait.exposed / 1000 / len(recorded.ranks)
    return [round(statistics.median(values), 3)
            for values in zip(*[found[step] for step in sorted(found)[SKIPPED_STEPS:]])]


def link_for(recorded):
    """The --link on which what travels of a recorded run would take SHARE of its step."""
    free = on_links(recorded, "node=0,1")  # bytes alone, at 1 GB/s
    step, exposed = steady(free)
    at_one = of_rows(free)[0]
    messages = sum(is_of_rows(item.dimension) for item in recorded.ranks[0].communications) \
        / len(trace.steps(recorded))
    wanted = (step - exposed) * SHARE / (1 - SHARE) - messages * LATENCY_US / 1000
    return f"node={LATENCY_US},{at_one / wanted:.3g}"


def faster(link, times):
    """A link of so many times the bandwidth."""
    latency, bandwidth = replay.parse_link(link)[1]
    return f"node={latency:g},{times * bandwidth:g}"


def of_a_step(recorded, prefix=""):
    """What a later step took, in ms."""
    names = ("step_ms", "rows_ms", "rows_exposed_ms", "others_exposed_ms")
    return {prefix + name: round(value, 3)
            for name, value in zip(names, (steady(recorded)[0], *of_rows(recorded)))}


def measure(chapter, keep):
    """Steps of every way; calls keep(way, replayed trace) for those that are drawn."""
    with tempfile.TemporaryDirectory(prefix="book_ways_") as scratch:
        say("book: rows of experts on an emulated link")
        link = link_for(run(chapter, Path(scratch) / "unlinked", "plain_2"))
        measured = {way: [] for way in MEASURED}
        for number in range(ROUNDS):
            for way, rounds in measured.items():
                rounds.append(of_a_step(run(chapter, Path(scratch) / f"{way}_{number}", way,
                                            link=link), "measured_"))
        for way, rounds in measured.items():
            measure_again(rounds, way, lambda each: {"step_ms": each["measured_step_ms"]}, lambda way=way: of_a_step(
                run(chapter, Path(tempfile.mkdtemp(dir=scratch)) / "run", way, link=link), "measured_"))
        found = []
        for way in WAYS:
            say(f"book: rows of experts, to be replayed: {way}")
            recorded = run(chapter, Path(scratch) / way, way)
            laid_out = on_links(recorded, link)
            if way in DRAWN:
                keep(way, laid_out)
            found.append({"way": way, "ranks": WAYS[way][0], **of_a_step(laid_out),
                          **of_rounds(measured.get(way, [])),
                          "faster": [{**of_a_step(laid_out), "left_ms": left_of(laid_out)}
                                     for times in FASTER
                                     for laid_out in [on_links(recorded, faster(link, times))]]})
        return {"link": link, "ways": found}


def measure_schedules(chapter):
    """Steps of every schedule, with one pass at a time and with passes in turns, replayed on one link."""
    with tempfile.TemporaryDirectory(prefix="book_schedules_") as scratch:
        link = link_for(run(chapter, Path(scratch) / "unlinked", "plain_2"))
        found = []
        for name, (ranks, flags) in SCHEDULES.items():
            for order, more in ORDERS.items():
                say(f"book: rows of experts, to be replayed: {name}, {order}")
                run_dir = Path(scratch) / str(len(found))
                recorded = run_on(chapter, run_dir, ranks, flags, **more)
                peaks = runs.read_metrics(run_dir)[0][-1]["peak_bytes"]
                found.append({"schedule": name, "order": order, "activation_bytes": int(peaks["activations"]),
                              **of_a_step(on_links(recorded, link))})
    return {"link": link, "schedules": found}


def schedules_table(measured):
    """Exposed time, steps and activations of each schedule, in both orders."""
    rows = []
    for name, (ranks, _) in SCHEDULES.items():
        alone, turns = (next(own for own in measured["schedules"] if (own["schedule"], own["order"]) == (name, order))
                        for order in ORDERS)
        rows.append([name, str(ranks), f"{alone['rows_ms']:.0f}",
                     *(f"{own['rows_exposed_ms']:.0f}" for own in (alone, turns)),
                     *(f"{own['step_ms']:.0f}" for own in (alone, turns)),
                     *(f"{own['activation_bytes'] / 2**20:.2f}" for own in (alone, turns))])
    return table(["schedule", "ranks", "rows travel, ms", "exposed, one by one", "exposed, in turns",
                  "step, one by one, ms", "step, in turns, ms", "activations, one by one, MiB",
                  "activations, in turns, MiB"], rows,
                 f"Replayed on `{measured['link']}` (us, GB/s) with a core for each rank, in f32; `ep`: all ranks, "
                 f"with a pipeline the two of a stage. {ALONE['grad_acc_steps']} micro-batches without a pipeline, "
                 f"{DUALPIPE['grad_acc_steps']} with one. Rows with their counts, means of the ranks; activations are "
                 "the peak of rank 0.")


def of_rounds(rounds):
    """Medians of what of_a_step() measured in each round, and the range of the steps."""
    if not rounds:
        return {}
    steps = [own["measured_step_ms"] for own in rounds]
    return {**{name: statistics.median(own[name] for own in rounds) for name in rounds[0]},
            "measured_range_ms": [min(steps), max(steps)]}


def drawn_part(record):
    """A part of a step's record, from where rank 0 begins a forward pass."""
    begins = [begin for name, begin, *_ in record["ranks"][0]["phases"] if name == "forward"]
    wanted = AT * 1000 * record["ms"]
    return timelines.part(record, min(begins, key=lambda begin: abs(begin - wanted)), PART_US)


def find(measured, way):
    return next(own for own in measured["ways"] if own["way"] == way)


def hidden(own):
    """The share of the rows' way under which something was computed."""
    return 1 - own["rows_exposed_ms"] / own["rows_ms"]


def ways_table(measured):
    """What is left of the rows' way, and of the step; measured, too, where the link could be emulated."""
    on_cores = any("measured_step_ms" in own for own in measured["ways"])
    rows = []
    for own in measured["ways"]:
        row = [str(own["ranks"]), NAMES[own["way"]], f"{own['rows_ms']:.0f}",
               f"{own['rows_exposed_ms']:.0f}", f"{100 * hidden(own):.0f} %",
               f"{own['others_exposed_ms']:.0f}", f"{own['step_ms']:.0f}"]
        if "measured_step_ms" in own:
            row += [f"{own['measured_rows_exposed_ms']:.0f}", with_range(
                own["measured_step_ms"], *own["measured_range_ms"], " to ", ".0f")]
        elif on_cores:
            row += ["", ""]
        rows.append(row)
    columns = ["ranks", "what computes meanwhile", "rows travel, ms", "rows exposed, ms", "rows hidden",
               "other messages exposed, ms", "step, ms",
               *(["measured: rows exposed, ms", "measured: step, ms"] if on_cores else [])]
    caption = f"Replayed on `{measured['link']}` (us, GB/s) with a core for each rank. "
    if on_cores:
        caption += (f"Measured on that emulated link: medians of {ROUNDS} rounds, in brackets the "
                    "shortest and the longest. ")
    return table(columns, rows, caption + "`ep` spans all ranks, or with `dualpipe` the two of a stage. In f32; "
                 "times of the rows include their counts, and are means of the ranks; other messages are gradients "
                 "and what stages send.")


def left_table(measured):
    """What is exposed of the rows where passes run in turns, by the bandwidth."""
    rows = []
    for number, times in enumerate(FASTER):
        own = find(measured, "turns")["faster"][number]
        rows.append([f"× {times}", f"{own['rows_ms']:.1f}", f"{own['rows_exposed_ms']:.1f}",
                     *(f"{value:.1f}" for value in own["left_ms"])])
    return table(["bandwidth", "rows travel, ms", "exposed, ms", "exposed counts, ms",
                  "exposed in passes without a partner, ms", "exposed in passes in turns, ms"], rows,
                 f"{NAMES['turns']}, 4 ranks: ms of a step, replayed on links of 1 to {FASTER[-1]} times the bandwidth.")


def faster_table(measured):
    """The share of the rows' way that is hidden, by the bandwidth."""
    rows = [[str(own["ranks"]), NAMES[own["way"]], *(f"{100 * hidden(case):.0f} %"
                                                     for case in own["faster"])]
            for own in measured["ways"]]
    return table(["ranks", "what computes meanwhile", *(f"bandwidth × {times}" for times in FASTER)], rows,
                 "The share of the time that rows travel which is hidden: the same runs, replayed on links of 1 to "
                 f"{FASTER[-1]} times the bandwidth.")
