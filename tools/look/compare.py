"""`./book compare`: two runs side by side, down to the last bit of the printed losses."""
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tools.base import BookError, say, show_path
from tools.look import figures
from tools.look.runs import Value, read_metrics, read_run

COMPARED = ("loss", "grad_norm", "val_loss")
# Differs between any two runs and says nothing about their numbers.
IGNORED_CONFIG = {"run_dir", "overwrite"}
# So much may sums in another order change of a number, relative to it, over a run in this dtype.
ROUNDING = {"f64": 1e-10, "f32": 1e-5, "bf16": 2e-3}


@dataclass(frozen=True)
class Difference:
    """A value that is written differently in the two runs."""

    step: int
    key: str
    a: Value
    b: Value

    @property
    def relative(self):
        """|a - b| / |a|; inf where only one is finite or a is 0; 0 where both print the same."""
        return relative_difference(self.a, self.b)


def relative_difference(a, b):
    """|a - b| / |a| with the first as the reference."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b) or a == 0.0:
        return math.inf
    return abs(a - b) / abs(a)


def find_differences(records_a, records_b):
    """Every Difference in the steps that both have, in order of step."""
    by_step = {int(record["step"]): record for record in records_b}
    found = []
    for record in records_a:
        step = int(record["step"])
        other = by_step.get(step, {})
        for key in COMPARED:
            a, b = record.get(key), other.get(key)
            if isinstance(a, Value) and isinstance(b, Value) and a.text != b.text:
                found.append(Difference(step, key, a, b))
    return found


def rounding(run_a, run_b):
    """(dtype, tolerance) of the two runs' coarser dtype; (None, 0) where a record names none."""
    dtypes = [(run.get("config") or {}).get("dtype") for run in (run_a, run_b)]
    if any(dtype not in ROUNDING for dtype in dtypes):
        return None, 0.0
    dtype = max(dtypes, key=ROUNDING.get)
    return dtype, ROUNDING[dtype]


def result(differences, same_steps, dtype, tolerance):
    """The last line: one of three verdicts."""
    if not differences and same_steps:
        return "Result: bit-identical."
    worst = max((difference.relative for difference in differences), default=math.inf)
    if same_steps and worst <= tolerance:
        return (f"Result: equal to rounding of {dtype}: nothing differs by more than {worst:.1e} of "
                f"itself ({tolerance:.0e} is allowed).")
    return "Result: the runs differ."


def _flat(run):
    """run.json as {name: value} of everything that may explain a difference."""
    flat = {f"--{key}": value for key, value in (run.get("config") or {}).items()
            if key not in IGNORED_CONFIG}
    flat["chapter"] = run.get("chapter")
    for group in ("data", "machine", "build"):
        for key, value in (run.get(group) or {}).items():
            flat[f"{group} {key}"] = value
    return flat


def config_differences(run_a, run_b):
    """[(name, value in A, value in B)] of the flags, data, machine and build that differ."""
    a, b = _flat(run_a), _flat(run_b)
    return [(name, a.get(name, "-"), b.get(name, "-")) for name in dict.fromkeys([*a, *b])
            if a.get(name, "-") != b.get(name, "-")]


def compare_runs(dir_a, dir_b, out=None):
    """Prints the comparison, draws the figure; 0 if the runs are the same bits, else 1: also where
    they are equal to rounding."""
    run_a, run_b = read_run(dir_a), read_run(dir_b)
    (records_a, warnings_a), (records_b, warnings_b) = read_metrics(dir_a), read_metrics(dir_b)
    for warning in warnings_a + warnings_b:
        say(f"book: {warning}")
    steps_a, steps_b = ([int(r["step"]) for r in records] for records in (records_a, records_b))
    common = sorted(set(steps_a) & set(steps_b))
    if not common:
        raise BookError(f"the runs have no step in common: A has steps {steps_a[0]} to "
                        f"{steps_a[-1]}, B has {steps_b[0]} to {steps_b[-1]}", 2)
    print(f"A  {show_path(dir_a)}  ({len(steps_a)} steps)")
    print(f"B  {show_path(dir_b)}  ({len(steps_b)} steps)\n")
    _print_config(config_differences(run_a, run_b))
    differences = find_differences(records_a, records_b)
    _print_numbers(differences, records_a, records_b, common)
    identical = not differences and steps_a == steps_b
    if steps_a != steps_b:
        print("The runs have different steps: only those that both have are compared.")
    print(result(differences, steps_a == steps_b, *rounding(run_a, run_b)))
    _draw(dir_a, dir_b, Path(out) if out else Path(dir_b) / "compare.png")
    return 0 if identical else 1


def _print_config(differences):
    """What was different before the first step."""
    if not differences:
        print("Flags, data, machine and build are the same.\n")
        return
    both = [entry for entry in differences if "-" not in entry[1:]]
    width = max((len(name) for name, _, _ in both), default=0)
    print("What differs in flags, data, machine and build:")
    for name, a, b in both:
        print(f"  {name:<{width}}  A: {a}   B: {b}")
    for side, index in (("A", 1), ("B", 2)):  # a chapter has flags that another one lacks
        alone = [f"{entry[0]} {entry[index]}" for entry in differences if entry[3 - index] == "-"]
        if alone:
            print(textwrap.fill(f"only {side} has: " + ", ".join(alone), 98, initial_indent="  ",
                                subsequent_indent="    ", break_on_hyphens=False,
                                break_long_words=False))
    print()


def _print_numbers(differences, records_a, records_b, common):
    """The first step that differs, and by how much the losses differ at most."""
    if not differences:
        print(f"All {len(common)} common steps have the same {', '.join(COMPARED)}, "
              "to the last digit.")
        return
    first = differences[0].step
    print(f"First step that differs: {first} (after {common.index(first)} equal ones)")
    for d in differences:
        if d.step == first:
            print(f"  {d.key:<9}  A: {d.a.text}   B: {d.b.text}   "
                  f"relative difference {d.relative:.2e}")
    by_step = {int(r["step"]): r["loss"] for r in records_b}
    worst, step = max((relative_difference(r["loss"], by_step[int(r["step"])]), int(r["step"]))
                      for r in records_a if int(r["step"]) in by_step)
    print(f"Largest relative difference of the loss: {worst:.2e}, at step {step}")


def _draw(dir_a, dir_b, out):
    """The overlay figure; a comparison without it is still a comparison."""
    try:
        figures.draw("compare", [dir_a, dir_b, out])
        print(f"Figure: {show_path(out)}")
    except BookError as error:
        say(f"book: no figure: {error}")
