"""Measured steps beside predicted ones: what is fitted, and how far off it is."""
import collections
import csv
import json
import re
import tempfile
from pathlib import Path

from tools.base import BookError, say, write_whole
from tools.book.short_runs import table
from tools.run import estimates

DATA, CLUSTERS = (Path(__file__).resolve().parents[1] / name for name in ("data", "clusters"))
# The tables of each cluster, and the rows that are fitted.
FITS = {"a100": (("vtrain_a100_single", "vtrain_a100_multi"), "all"),
        "h100_nvl8": (("playbook_h100",), "pp<=1,tp<=8,nodes<=32")}
# What is known of the same tables: how far two measurements are apart, and what others report.
NOISE = {"vtrain_a100_single": "not known", "vtrain_a100_multi": "2.1 %, two clusters",
         "playbook_h100": "5 to 25 %, repeats"}
OTHERS = {"vtrain_a100_single": "vTrain 8.37 %, from kernels traced on the machine; Calculon 38.95 %, not fitted",
          "vtrain_a100_multi": "vTrain 14.73 %; Calculon 15.33 %, not fitted",
          "playbook_h100": "Calculon 33.8 %, not fitted"}
NAMES = {"vtrain_a100_single": "vTrain, one node", "vtrain_a100_multi": "vTrain, 8 to 64 nodes",
         "playbook_h100": "the book's runs"}
FIT_LINE = re.compile(r"(\w+)\.csv: off by ([\d.]+) % as fitted, ([\d.]+) % where left out")
MEMORY_LINE = re.compile(r"accepts ([\d.]+) % of those that ran and refuses ([\d.]+) % of the others as fitted, "
                         r"([\d.]+) % and ([\d.]+) % where left out")
CELL = ("model", "nodes", "batch_seqs")  # runs among which one would choose


def fit_all(program):
    """What fits to the tables say of their errors, and the numbers that they find."""
    found = {}
    for cluster, (tables, rows) in FITS.items():
        say(f"book: fits {cluster}")
        said = estimates.output_of([str(program), *estimates.words_of({
            "cluster": cluster, "plan_rows": ",".join(str(DATA / f"{name}.csv") for name in tables),
            "plan_fit": rows})])
        found[cluster] = {
            "errors": {name: [float(seen), float(unseen)] for name, seen, unseen in FIT_LINE.findall(said)},
            "memory": [float(number) for number in (MEMORY_LINE.search(said) or re.match("()", "")).groups() if number],
            "numbers": {name: float(value) for name, value in re.findall(r"^ +(\w+) = (\S+)$", said, re.M)}}
    return found


def predict(program, name, cluster):
    """The table's rows with what is predicted, as dictionaries."""
    with tempfile.TemporaryDirectory(prefix="book_predict_") as scratch:
        out = Path(scratch) / "out.csv"
        estimates.output_of([str(program), *estimates.words_of({
            "cluster": cluster, "plan_rows": DATA / f"{name}.csv", "plan_out": out})])
        with out.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


def measured(row):
    """Seconds; 0 where there are none."""
    return float(row.get("step_time_ms") or 0) / 1e3 or float(row.get("step_time_s") or 0)


def is_fitted(row):
    """The subset of the book's runs whose steps are fitted; every row of the other tables."""
    return "status" not in row or (int(row["pp"]) == 1 and int(row["tp"]) <= 8 and int(row["nodes"]) <= 32)


def regrets(rows, first):
    """By how much the best of the `first` that look fastest is slower than the best of each cell."""
    cells = collections.defaultdict(list)
    for row in rows:
        cells[tuple(row[name] for name in CELL)].append((float(row["predicted_step_time_s"]), measured(row)))
    return [min(real for _, real in sorted(cell)[:first]) / min(real for _, real in cell) - 1
            for cell in cells.values() if len(cell) > 1]


def summary(rows):
    """What a table's predictions are off by."""
    ran = [row for row in rows if measured(row) > 0]
    fitted = [row for row in ran if is_fitted(row)]
    off = sorted(abs(float(row["predicted_step_time_s"]) / measured(row) - 1) for row in fitted)
    every = [abs(float(row["predicted_step_time_s"]) / measured(row) - 1) for row in ran]
    found = {"rows": len(rows), "ran": len(ran), "fitted": len(off), "mean": sum(off) / len(off),
             "middle": off[len(off) // 2], "most": off[-1], "mean_of_all": sum(every) / len(every)}
    if "status" in rows[0]:
        failed = [row for row in rows if row["status"] == "failed"]
        memory = sorted(abs(float(row["predicted_mem_GB"]) / float(row["mem_GB"]) - 1) for row in ran)
        top = regrets(fitted, 5)
        found.update({"failed": len(failed), "memory": sum(memory) / len(memory),
                      "accepted": sum(row["predicted_fits"] == "yes" for row in ran),
                      "refused": sum(row["predicted_fits"] == "no" for row in failed),
                      "cells": len(top), "regret_5": sum(top) / len(top),
                      "regret_1": sum(regrets(fitted, 1)) / len(top)})
    return found


def naive_costs(program, name, cluster):
    """By how much naive attention changes a predicted step, compared with blockwise attention by the same
    numbers, in the mean; None where the framework's attention is blockwise."""
    described = json.loads((CLUSTERS / f"{cluster}.json").read_text(encoding="utf-8"))
    if described["framework"]["attention"] != "naive":
        return None
    described["framework"]["attention"] = "blockwise"
    with tempfile.TemporaryDirectory(prefix="book_blockwise_") as scratch:
        changed = Path(scratch) / f"{cluster}.json"
        write_whole(changed, json.dumps(described))
        both = [predict(program, name, of) for of in (cluster, changed)]
    ratios = [float(naive["predicted_step_time_s"]) / float(other["predicted_step_time_s"]) for naive, other in zip(*both)]
    return sum(ratios) / len(ratios) - 1


def predict_all(program):
    say("book: predicts measured steps")
    return {name: {**summary(predict(program, name, cluster)), "naive": naive_costs(program, name, cluster)}
            for cluster, (names, _) in FITS.items() for name in names}


def fitted_table(fits, predicted):
    """Mean errors of steps."""
    rows = []
    for fit in fits.values():
        for name, (_, unseen) in fit["errors"].items():
            found = predicted[name]
            rows.append((NAMES[name], f"{found['fitted']:,} of {found['rows']:,}", f"{100 * found['mean']:.2f} %",
                         f"{100 * found['middle']:.2f} %", f"{unseen:.2f} %", NOISE[name], OTHERS[name]))
    if not rows:
        raise BookError("figures/fits.json has no fits; make them with ./book figures ch08")
    return table(("steps of", "rows fitted", "mean error", "median", "mean where left out", "the data's own noise",
                  "others, on the same"), rows,
                 "`where left out`: each fifth of the rows, by a fit to the other four. The book's rows are those "
                 "without a pipeline, with `tp` up to 8, on up to 32 nodes. Over all of its "
                 f"{predicted['playbook_h100']['ran']} runs that ended the mean error is "
                 f"{100 * predicted['playbook_h100']['mean_of_all']:.0f} %. Naive attention makes predicted steps, "
                 "compared with blockwise attention and the same numbers, " + ", and ".join(
                     f"{100 * abs(found['naive']):.1f} % {'shorter' if found['naive'] < 0 else 'longer'} for {NAMES[name]}"
                     for name, found in predicted.items() if found["naive"] is not None) + ".")


def judged_table(fits, predicted):
    """What is said of whole layouts: whether they fit, and which to choose."""
    found = predicted["playbook_h100"]
    _, _, accepts, refuses = fits["h100_nvl8"]["memory"]
    return table(("of the book's runs", "rows", "fitted", "where left out"), [
        ("that ran: said to fit", f"{found['ran']}", f"{100 * found['accepted'] / found['ran']:.1f} %", f"{accepts:.1f} %"),
        ("that failed: said not to fit", f"{found['failed']}", f"{100 * found['refused'] / found['failed']:.1f} %",
         f"{refuses:.1f} %"),
        ("GB of the fullest rank: mean error", f"{found['ran']}", f"{100 * found['memory']:.1f} %", "–"),
        ("step lost by running the five best", f"{found['cells']} cells", f"{100 * found['regret_5']:.1f} %", "–"),
        ("step lost by running the best alone", f"{found['cells']} cells", f"{100 * found['regret_1']:.1f} %", "–")],
        "A cell is a model on a number of nodes with one batch; only rows whose steps are fitted count in it.")
