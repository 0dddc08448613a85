"""What `./book bench` says of a search: how many configurations a core takes in a second, by each of the three
readings, beside the goals."""
import statistics

from tools.base import say
from tools.book.short_runs import table
from tools.run import build, estimates

from . import folded

GPT3 = {name: value for name, value in folded.SEARCHES["175B, 512 ranks, `tp` 8 `pp` 8"].items()
        if name not in ("cluster", "nodes", "plan")}
# The configurations of 175B on 4,096 ranks with a batch of 4,096 that Calculon enumerates.
SPACE = 7_126_368
SPACE_FLAGS = {**{name: value for name, value in GPT3.items()
                  if name not in ("tp_size", "sequence_parallel", "pp_size")},
               "cluster": "a100", "nodes": 512, "plan": 4096 * 2048}
# [what, the flags of the cluster, of the layout]
STEPS = {"512": ("a100", {**GPT3, "dp_size": 8, "zero_stage": 1, "micro_batch_size": 1, "grad_acc_steps": 192}),
         "16384": ("meta_24k", {"model": "405B", "dtype": "bf16", "seq_len": 8192, "tp_size": 8,
                                "sequence_parallel": None, "pp_size": 16, "dp_size": 128, "zero_stage": 1,
                                "micro_batch_size": 1, "grad_acc_steps": 16})}
# {what: (unit, goal, whether less is better)}
GOALS = {
    "formulas": ("1/s", 1e6, False),
    "products, the median layout": ("1/s", 20e3, False),
    "replays of 175B on 512 ranks": ("1/s", 10, False),
    "a layout after the first of its class": ("ms", 1, True),
    "such a layout once more": ("ms", 1, True),
    f"{SPACE:,} configurations by formulas": ("s", 300, True),
    f"{SPACE:,} configurations with their memory": ("s", 300, True),
    "a step of 16,384 ranks": ("s", 1, True),
    "its memory": ("GB", 1, True),
}


def ask(program, mode, flags, *more):
    """{what: number} that the example prints."""
    return folded.numbers(estimates.output_of([str(program), mode, *more, *estimates.words_of(flags)]))


def measure(chapter):
    """{"rates", "searches", "space", "steps"}: what the example prints of each."""
    program = build.binary(build.RELEASE, f"{chapter.name}_{folded.EXAMPLE}")
    rates = folded.measure_rates(chapter)
    searches = folded.measure_searches(chapter)
    say("book: how fast is a space of layouts, and a step of 16,384 ranks?")
    steps = {ranks: ask(program, "--step", flags, "--on", cluster) for ranks, (cluster, flags) in STEPS.items()}
    return {"rates": rates, "searches": searches, "steps": steps, "space": ask(program, "--space", SPACE_FLAGS)}


def found(record):
    """{what: number} of GOALS."""
    def of_rates(name):
        return statistics.median(of[name] for of in record["rates"].values())

    def of_searches(name):
        return max(of[name] for of in record["searches"].values())

    large, space = record["steps"]["16384"], record["space"]
    return dict(zip(GOALS, (
        space["formulas a second"], of_rates("products a second"),
        1 / record["steps"]["512"]["seconds of a replay"], of_searches("ms of such a layout"),
        of_searches("ms of a layout once more"), SPACE / space["formulas a second"],
        SPACE / space["with memory a second"],
        sum(large[f"seconds of {part}"] for part in ("classes", "the record", "a replay")), large["GB"])))


def over_goal(what, number):
    """How many times as good as the goal."""
    _, goal, less = GOALS[what]
    return goal / number if less else number / goal


def short(number):
    """12,345 or 1.23"""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def lines(record):
    """Markdown of the same."""
    if "space" not in record:
        return []
    large, space = record["steps"]["16384"], record["space"]
    rows = []
    for what, number in found(record).items():
        unit, goal, less = GOALS[what]
        rows.append((f"{what}, {unit}", short(number), f"at {'most' if less else 'least'} {short(goal)}",
                     short(over_goal(what, number))))
    return table(("", "found", "goal", "times as good"), rows,
                 "By one core's own clock. A layout after the first of its class: from its flags to its step by "
                 "products, the median of the slower of two searches; once more: all of it has been recorded. With "
                 "their memory: "
                 f"at the rate of the {space['layouts']:,.0f} layouts that our search knows of the same space. Of the "
                 f"16,384 ranks' step, {large['seconds of classes']:.2f} s are classes of ranks, "
                 f"{large['seconds of the record']:.2f} s the record and {large['seconds of a replay']:.2f} s the "
                 "replay.").splitlines()


def text(record):
    """The same for the terminal."""
    if "space" not in record:
        return
    for what, number in found(record).items():
        unit, goal, less = GOALS[what]
        yield (f"{what:<46}{short(number):>12} {unit:<4} {'at most' if less else 'at least'} {short(goal)}: "
               f"{short(over_goal(what, number))} times as good")
