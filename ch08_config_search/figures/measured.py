"""Layouts predicted and run on this machine: a cluster's file calibrated with some runs, and others.

A rank has a core for itself in a run's own replay, whatever else the machine does, so predictions of
2 and 4 ranks are held against that; those of 2 ranks against the clock, too.
"""
import json
import statistics
import tempfile
from pathlib import Path

from tools import machine
from tools.base import say, write_whole
from tools.bench import measure, steady
from tools.book.short_runs import table
from tools.run import estimates

MODEL = {"hidden_size": 256, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "ffn_hidden_size": 688,
         "vocab_size": 256, "seq_len": 256, "dtype": "f32"}
SAMPLES = 8  # of a step, whatever the layout
TOKENS = SAMPLES * MODEL["seq_len"]
DEGREES = ("dp_size", "tp_size", "cp_size", "pp_size")
BASE, MEASURED = "two_cores", 6
STEPS = 10  # of a run


def layout(micro_batch_size, zero_stage=0, recompute="none", sequence_parallel=False, pp_schedule="1f1b", **degrees):
    """The flags of a layout, with every choice that a search would make."""
    flags = {**{name: degrees.get(name[:2], 1) for name in DEGREES}, "micro_batch_size": micro_batch_size,
             "zero_stage": zero_stage, "recompute": recompute, "pp_schedule": pp_schedule}
    return {**flags, "sequence_parallel": None} if sequence_parallel else flags


CALIBRATED_WITH = [layout(4, dp=2), layout(2, tp=2, sequence_parallel=True), layout(1, pp=2),
                   layout(1, dp=2, tp=2, sequence_parallel=True, zero_stage=1),
                   layout(2, dp=4, zero_stage=3, recompute="full")]
PREDICTED = [layout(1, dp=2, zero_stage=1), layout(2, dp=2, zero_stage=2), layout(4, dp=2, zero_stage=3),
             layout(2, dp=2, recompute="full"), layout(4, tp=2, sequence_parallel=True), layout(2, pp=2),
             layout(2, cp=2),
             layout(2, dp=4, zero_stage=1), layout(2, dp=2, tp=2, sequence_parallel=True),
             layout(1, dp=2, pp=2, zero_stage=1), layout(2, tp=4, sequence_parallel=True), layout(1, dp=2, cp=2)]


def ranks_of(flags):
    degrees = [flags[name] for name in DEGREES]
    return degrees[0] * degrees[1] * degrees[2] * degrees[3]


def train(chapter, flags, run_dir):
    """The trace of a few steps, with a thread for every rank."""
    accumulated = SAMPLES // (flags["dp_size"] * flags["micro_batch_size"])
    return steady.train(chapter, run_dir, ranks_of(flags), share=4, **MODEL, **flags, grad_acc_steps=accumulated,
                        steps=STEPS, trace_steps=STEPS)


def predict(program, cluster, flags, scratch):
    """Seconds of the layout's step on a cluster, all of whose ranks lie in one node."""
    file = scratch / f"of_{ranks_of(flags)}.json"
    numbers = json.loads(cluster.read_text(encoding="utf-8"))
    numbers["ranks_per_node"]["value"] = ranks_of(flags)
    write_whole(file, json.dumps(numbers))
    alone = {} if "sequence_parallel" in flags else {"sequence_parallel=false": None}
    asked = {**MODEL, **flags, **alone, "cluster": file, "plan": TOKENS, "plan_best": 1, "plan_json": None}
    found = json.loads(estimates.output_of([str(program), *estimates.words_of(asked)]))
    return found["best"][0]["step_s"]


def calibrate(chapter, program, scratch):
    """(the calibrated cluster's file, what the program says of it)"""
    run_dirs = []
    for number, flags in enumerate(CALIBRATED_WITH, 1):
        say(f"book: run {number} of {len(CALIBRATED_WITH)} to calibrate with")
        run_dirs.append(scratch / f"run_{number}")
        train(chapter, flags, run_dirs[-1])
    file = scratch / "mine.json"
    said = estimates.output_of([str(program), "--cluster", BASE, "--plan_runs", ",".join(map(str, run_dirs)),
                                "--plan_out", str(file)])
    return file, said


def compare(chapter, program, file, scratch):
    """[{flags, predicted, replayed, clock}] of the other layouts, in milliseconds."""
    node = json.loads(file.read_text(encoding="utf-8"))["links"]["node"]
    link = f"node={node['latency_us']['value']},{node['gbs']['value']}"
    rows = []
    for number, flags in enumerate(PREDICTED, 1):
        say(f"book: layout {number} of {len(PREDICTED)}")
        recorded = train(chapter, flags, scratch / f"other_{number}")
        alone, _ = steady.later_steps(steady.on_links(recorded, link))
        clock, _ = steady.later_steps(recorded)
        rows.append({"flags": flags, "predicted": 1e3 * predict(program, file, flags, scratch),
                     "replayed": statistics.median(alone), "spread": [min(alone), max(alone)],
                     "clock": statistics.median(clock), "fastest": min(clock)})
    return rows


def collect(chapter, program):
    """All of it; and the best layouts of a search, by a cluster of this machine, run."""
    with tempfile.TemporaryDirectory(prefix="book_measured_") as folder:
        scratch = Path(folder)
        file, said = calibrate(chapter, program, scratch)
        found = {"calibration": said, "layouts": compare(chapter, program, file, scratch)}
        asked = ["--cluster", str(file), "--plan", str(TOKENS), *estimates.words_of({**MODEL, "steps": STEPS})]
        answer, _ = measure.best_of_search(program, asked, MEASURED)
        rows = [measure.Row(row["flags"], row["step_s"], row["gib"]) for row in answer["best"]]
        measure.measure(rows, program, answer["ranks"], measure.flags_of_a_run(asked), limit_s=120)
        facts = {"cluster": answer["cluster"], "ranks": answer["ranks"], "cores": machine.usable_cores(),
                 "tokens": answer["tokens"], "left_out": steady.SKIPPED_STEPS}
        found["measured"] = measure.as_json(rows, facts, by_replay=False)
        found["said"] = measure.as_text(rows, facts, by_replay=False)
    return found


# --- tables ---------------------------------------------------------------------------------------


def name_of(flags):
    """`dp` 2 `tp` 2, ZeRO-1, micro-batch 1"""
    text = " ".join(f"`{name[:2]}` {flags[name]}" for name in DEGREES if flags[name] > 1)
    text += f", ZeRO-{flags['zero_stage']}" * (flags["zero_stage"] > 0)
    text += f", micro-batch {flags['micro_batch_size']}"
    text += ", sequence parallel" * ("sequence_parallel" in flags)
    text += f", `{flags['pp_schedule']}`" * (flags["pp_schedule"] != "1f1b")
    return text + ", full recomputation" * (flags["recompute"] == "full")


def off(row, against):
    """By how much the prediction is off, as a share with its sign."""
    return row["predicted"] / row[against] - 1


def layouts_table(rows):
    """Each layout: what is predicted, what its own replay takes, and on 2 ranks the clock."""
    def cells(row):
        alone = ranks_of(row["flags"]) == 2
        return (name_of(row["flags"]), f"{row['predicted']:.1f}", f"{row['replayed']:.1f}",
                f"{100 * off(row, 'replayed'):+.1f} %", f"{row['clock']:.1f}" if alone else "",
                f"{100 * off(row, 'clock'):+.1f} %" if alone else "")

    return table(("layout", "predicted, ms", "own replay, ms", "off by", "clock, ms", "off by"), map(cells, rows),
                 f"{SAMPLES} samples of {MODEL['seq_len']} tokens in f32; medians of the steps behind the first "
                 f"{steady.SKIPPED_STEPS}. No layout is among those that calibrated the cluster.")


def errors(rows, against):
    return [abs(off(row, against)) for row in rows]


def errors_table(rows):
    """How far off the predictions are, by the number of ranks."""
    two = [row for row in rows if ranks_of(row["flags"]) == 2]
    four = [row for row in rows if ranks_of(row["flags"]) == 4]
    cases = (("2 ranks, own replay", two, "replayed"), ("4 ranks, own replay", four, "replayed"),
             ("all, own replay", rows, "replayed"), ("2 ranks, the clock", two, "clock"))
    return table(("compared with", "layouts", "mean error", "largest", "off by at most 10 %"), [
        (name, str(len(some)), f"{100 * statistics.fmean(errors(some, against)):.1f} %",
         f"{100 * max(errors(some, against)):.1f} %", f"{sum(error <= 0.1 for error in errors(some, against))}")
        for name, some, against in cases])


def claims_table(found):
    """The book's claim on a search by measurement, beside what was measured."""
    correlation, regret = found["rank_correlation"], found["regret"]
    ran = sum(row["outcome"] == measure.RAN for row in found["rows"])
    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("Q8.5", "a tool that ranks layouts reproduces the order of a small grid", "a rank correlation of 0.8 or more",
         "too few ran" if correlation is None or regret is None else f"{correlation:.2f}; regret {100 * regret:.1f} %",
         "yes" if correlation is not None and correlation >= 0.8 else "no",
         f"{ran} layouts of a search, by the clock")])


def texts(found):
    return {"calibrated.txt": found["calibration"], "measured.txt": found["said"] + "\n",
            "layouts_here.md": layouts_table(found["layouts"]), "errors_here.md": errors_table(found["layouts"]),
            "claims_here.md": claims_table(found["measured"])}
