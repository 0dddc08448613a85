"""Steps as products of matrices: how many there are, what they say, and how fast they are."""
import re

from tools.base import say
from tools.book.short_runs import table
from tools.run import build, estimates

EXAMPLE = "fold"  # prints what is read here
BASE = {"model": "8B", "dtype": "bf16", "seq_len": 4096}
# Layouts of 8B on a node, with a batch of 256 samples.
LAYOUTS = {
    "`dp` 8, ZeRO-1": {"dp_size": 8, "zero_stage": 1, "micro_batch_size": 2, "grad_acc_steps": 16},
    "`dp` 8, ZeRO-3": {"dp_size": 8, "zero_stage": 3, "micro_batch_size": 2, "grad_acc_steps": 16},
    "`tp` 8": {"tp_size": 8, "sequence_parallel": None, "micro_batch_size": 2, "grad_acc_steps": 128},
    "`dp` 2 `tp` 2 `pp` 2": {"dp_size": 2, "tp_size": 2, "sequence_parallel": None, "pp_size": 2, "zero_stage": 1,
                             "micro_batch_size": 2, "grad_acc_steps": 64},
    "`pp` 8": {"pp_size": 8, "micro_batch_size": 1, "grad_acc_steps": 256},
}
SHOWN = "`dp` 8, ZeRO-3"
DIMENSIONS = ("dp", "tp", "pp")
RATES = ("formulas a second", "products a second", "with new matrices a second", "replays of events a second",
         "records a second", "written a second")
SEARCHES = {
    "8B, 64 ranks": {**BASE, "cluster": "h100_nvl8", "nodes": 8, "plan": 1 << 20},
    "175B, 512 ranks, `tp` 8 `pp` 8": {
        "num_layers": 96, "hidden_size": 12288, "num_heads": 96, "num_kv_heads": 96, "ffn_hidden_size": 32768,
        "vocab_size": 51200, "dtype": "bf16", "seq_len": 2048, "cluster": "a100", "nodes": 64, "plan": 1536 * 2048,
        "tp_size": 8, "sequence_parallel": None, "pp_size": 8},
}


def output(chapter, flags, *more):
    """What the example prints about a layout."""
    program = build.binary(build.RELEASE, f"{chapter.name}_{EXAMPLE}")
    return estimates.output_of([str(program), *more, *estimates.words_of({**BASE, **flags})])


def numbers(text):
    """{what: number} of the lines that have one."""
    return {name: float(number) for name, number in re.findall(r"^(\w.*?) {2,}([-+\d.e]+)$", text, re.M)}


def fold_all(chapter):
    say("book: folds steps")
    return {name: numbers(output(chapter, flags)) for name, flags in LAYOUTS.items()}


def measure_rates(chapter):
    say("book: how fast are formulas, products and replays?")
    found = {name: numbers(output(chapter, flags, "--rates")) for name, flags in LAYOUTS.items()}
    return {name: {rate: of[rate] for rate in RATES} for name, of in found.items()}


def measure_searches(chapter):
    say("book: where does the time of a search go?")
    program = str(build.binary(build.RELEASE, f"{chapter.name}_{EXAMPLE}"))
    return {name: numbers(estimates.output_of([program, "--search", *estimates.words_of(flags)]))
            for name, flags in SEARCHES.items()}


def shown(chapter):
    """The example's own words."""
    return output(chapter, LAYOUTS[SHOWN])


def apart(of):
    """By how much of a step the two differ, in the digits that the example prints."""
    difference = abs(of["seconds by products"] / of["seconds by events"] - 1)
    return "0" if difference == 0 else f"{difference:.0e}"


def sizes_table(found):
    return table(("layout", "events", "products", "matrices", "clocks", "by events, s", "by products, s", "apart"), [
        (name, f"{of['events of a step']:,.0f}", f"{of['products of a step']:,.0f}",
         f"{of['matrices of actions']:.0f}", f"{of['clocks of a rank']:.0f}", f"{of['seconds by events']:.4f}",
         f"{of['seconds by products']:.4f}", apart(of)) for name, of in found.items()],
        "A step of 8B on one node of H100s, with 256 samples of 4,096 tokens. Counts are sums over one rank of each class, "
        "but `clocks` is the number of the rank that has most. `matrices` counts actions that differ; `apart` is relative.")


def without_table(found):
    """What a step would take if a dimension's exchanges took no time."""
    def less(of, dimension):
        seconds = of.get(f"seconds if {dimension} took none")
        if seconds is None:
            return "–"
        return f"{of['seconds by products'] - seconds:.3f}"

    return table(("layout", "step, s", *(f"less without {of}, s" for of in DIMENSIONS)), [
        (name, f"{of['seconds by products']:.3f}", *(less(of, dimension) for dimension in DIMENSIONS))
        for name, of in found.items()],
        "How much shorter the step would be if all exchanges of a dimension took no time. `pp` has the few sums over all "
        "ranks, too.")


def rates_table(found):
    names = {"formulas a second": "formulas", "products a second": "products",
             "with new matrices a second": "with new matrices", "replays of events a second": "replays",
             "records a second": "records", "written a second": "written"}
    return table(("layout", *(f"{name}, 1/s" for name in names.values()), "products over replays"), [
        (name, *(f"{of[rate]:,.0f}" if of[rate] >= 10 else f"{of[rate]:.1f}" for rate in names),
         f"{of['products a second'] / of['replays of events a second']:,.0f}") for name, of in found.items()],
        "Steps that one core computes in a second, by its own clock. `records`: dry runs of all classes, which products "
        "and replays begin with; `written`: the same programs, out of segments that are there.")


def searches_table(found):
    """Where the time of a search goes."""
    parts = {"memory": "seconds of memory", "whole dry runs": "seconds of whole dry runs",
             "by segments": "seconds of segments", "folding": "seconds of folding", "replays": "seconds of replays",
             "search": "seconds of the search"}
    return table(("search", "layouts", "in time", "recorded", "written", *(f"{name}, s" for name in parts)), [
        (name, f"{of['layouts']:,.0f}", f"{of['layouts in time']:.0f}", f"{of['programs recorded']:,.0f}",
         f"{of['programs written']:,.0f}", *(f"{of[part]:.1f}" for part in parts.values()))
        for name, of in found.items()],
        "Seconds of one core. `memory`: of all layouts, with the formulas; the others are of the layouts `in time`. "
        "`recorded` and `written`: programs of ranks. The search takes `memory`, `by segments` and `replays`; before "
        "there were segments it took `whole dry runs` in the place of the second.")
