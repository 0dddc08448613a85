"""What `./book bench` says of this chapter: what each dimension costs where it has size 1, what comparing copies
costs, how fast two ranks are in each of the ways to use them, and how long an estimate takes.

Runs that are compared take turns, and ratios are those of a round.
"""
import json
import statistics
import tempfile
import time
from pathlib import Path

from tools import chapters
from tools.base import say
from tools.bench.bench import CONFIGS, PROBED_STEPS, SKIPPED_STEPS, run_once, run_quietly, steps_for
from tools.book.rounds import measure_again, with_range
from tools.book.short_runs import look_into, table
from tools.look import runs
from tools.run import build, recipes

MODEL, DTYPE, RANKS = "B", "f32", 2
INTERVAL = 10  # steps from one comparison of copies to the next
GOALS = {"size 1": 0.99, "copies": 0.995, "two ranks": 0.95, "rank_s": 1.0}
ALL_S = {"deepseek_v3": 20.0}  # seconds for the estimate of a recipe's ranks; of any other 10
# Of the same batch, on two ranks of one thread.
WAYS = {"dp": {"dp_size": 2, "micro_batch_size": 2}, "tp": {"tp_size": 2, "sequence_parallel": None},
        "cp": {"cp_size": 2}, "pp": {"pp_size": 2, "micro_batch_size": 1, "grad_acc_steps": 4}}
COPIES = {"never": 0, "every": INTERVAL}


def chain(chapter):
    """The chapters from the first to this one: each adds a dimension, which has size 1 unless a flag says more."""
    every = chapters.find_chapters()
    return every[:[each.name for each in every].index(chapter.name) + 1]


def programs():
    """What has to be built besides this chapter's program."""
    return tuple(each.name for each in chain(chapters.resolve("ch07"))[:-1])


def cases(chapter):
    """{case: (chapter, ranks, flags)}"""
    alone = {each.short: (each, 1, {}) for each in chain(chapter)}
    copies = {f"copies_{name}": (chapter, RANKS, {**WAYS["dp"], "check_copies": steps})
              for name, steps in COPIES.items()}
    return {**alone, **copies, **{f"two_{way}": (chapter, RANKS, flags) for way, flags in WAYS.items()}}


def measure(chapter, seconds, rounds):
    """{composition: {rounds: [{case: tokens/s}]}, estimates: {recipe: {ranks, distinct, seconds}}}"""
    first = run_once(chapter, MODEL, DTYPE, 1, PROBED_STEPS, skipped=PROBED_STEPS - 1)
    steps = steps_for(seconds, first["step_ms"])
    whole = INTERVAL * max(1, round(steps / INTERVAL))  # of these steps, as many compare as the interval says
    found = []

    def measured():
        return {case: _tokens_per_s(of, ranks, SKIPPED_STEPS + whole if case.startswith("copies") else steps, flags)
                for case, (of, ranks, flags) in cases(chapter).items()}

    for number in range(rounds):
        say(f"book: round {number + 1}/{rounds}  {MODEL} {DTYPE}: chapters at size 1, copies, ways of {RANKS} ranks")
        found.append(measured())
    measure_again(found, f"{MODEL} {DTYPE}", dict, measured)
    return {"composition": {"rounds": found}, "estimates": estimate_all(chapter)}


def _tokens_per_s(chapter, ranks, steps, flags):
    """Tokens of a step over the mean time of those after the first few: the mean has the steps that compare."""
    program = build.binary(build.RELEASE, chapter.name)
    records, _ = look_into(program, ranks, runs.read_metrics,
                           **{**CONFIGS[MODEL], "dtype": DTYPE, "steps": steps, **flags})
    timed = [record["step_ms"] for record in records[SKIPPED_STEPS:]]
    return 1000 * CONFIGS[MODEL]["micro_batch_size"] * CONFIGS[MODEL]["seq_len"] / statistics.fmean(timed)


def estimate_all(chapter):
    """Of each recipe how many ranks it has, how many of them differ, and how long an estimate of them takes."""
    program, found = str(build.binary(build.RELEASE, chapter.name)), {}
    for name in recipes.names(chapter):
        say(f"book: the estimate of {name}")
        with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
            path = Path(scratch) / "estimate.json"
            words = recipes.expand(["--recipe", name], recipes.load(chapter, name))
            begin = time.monotonic()
            run_quietly([program, "--estimate", "--estimate_file", str(path), *words], 1)
            seconds = time.monotonic() - begin
            found[name] = {**counted(json.loads(path.read_text(encoding="utf-8"))), "seconds": seconds}
    return found


def counted(found):
    """Of what --estimate_file has, how many ranks there are, and how many that differ."""
    ranks = 1
    for axis in ("dp", "pp", "cp", "tp"):
        ranks *= found["mesh"][axis]
    return {"ranks": ranks, "distinct": len(found["distinct_ranks"])}


def spread_of(values):
    """Median, lowest and highest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(rounds, case, base):
    """Tokens/s of a case over those of another, round by round."""
    return spread_of(each[case] / each[base] for each in rounds)


def best_way(rounds):
    """The way of two ranks with the most tokens/s, by medians."""
    ways = [case for case in rounds[0] if case.startswith("two_")]
    return max(ways, key=lambda case: statistics.median(each[case] for each in rounds))


def rows(record):
    """[(what, ratio, goal)]: each chapter at size 1 over the one before it, copies that are compared over none, each way
    of two ranks over the first chapter's one."""
    rounds = record["composition"]["rounds"]
    alone = [case for case in rounds[0] if "_" not in case]
    found = [(f"{case}, size 1, over {before}", ratio(rounds, case, before), GOALS["size 1"])
             for before, case in zip(alone, alone[1:])]
    found.append((f"`--check_copies {INTERVAL}` over none", ratio(rounds, "copies_every", "copies_never"), GOALS["copies"]))
    best = best_way(rounds)
    for case in (each for each in rounds[0] if each.startswith("two_")):
        goal = GOALS["two ranks"] if case == best else None
        found.append((f"`{case.removeprefix('two_')}` on {RANKS} ranks over {alone[0]} with all threads",
                      ratio(rounds, case, alone[0]), goal))
    return found


def _cell(found):
    return with_range(found["median"], found["min"], found["max"], form=".3f")


def lines(record):
    """Ratios, and seconds of estimates, as Markdown, for bench.md."""
    if "composition" not in record:
        return []
    ratios = table(["tokens/s", "ratio", "goal"],
                   [[what, _cell(found), f"{goal:.3f}" if goal else ""] for what, found, goal in rows(record)],
                   f"{MODEL} {DTYPE}. Ratios of runs in turns: their median, in brackets the lowest and the highest of "
                   f"{len(record['composition']['rounds'])} rounds.")
    estimated = table(["estimate of", "ranks", "that differ", "seconds", "for each that differs"],
                      [[name, f"{of['ranks']:,}", str(of["distinct"]), f"{of['seconds']:.2f}",
                        f"{of['seconds'] / of['distinct']:.2f}"] for name, of in record["estimates"].items()],
                      "One run each, from start to end.")
    return ["", *ratios.splitlines(), "", *estimated.splitlines()]


def text(record):
    """The same with goals, for the terminal."""
    if "composition" not in record:
        return
    for what, found, goal in rows(record):
        yield f"{what.replace('`', '')}: {_cell(found)}" + (f" (goal: {goal})" if goal else "")
    for name, of in record["estimates"].items():
        yield (f"estimate of {name}: {of['seconds']:.2f} s, {of['seconds'] / of['distinct']:.2f} s for each of "
               f"{of['distinct']} ranks that differ (goals: {ALL_S.get(name, 10.0):.0f} and {GOALS['rank_s']:.0f})")
