"""The best layout of each model on each number of nodes, as in the book's heatmap, and what the book's
own procedure comes to there.

The searches take minutes, so ./book figures makes them, and a test asks again for a cell that takes seconds.
"""
from tools.bench import plan_plot
from tools.book.short_runs import table
from tools.run import estimates

from . import searched

MODELS, NODES = ("1B", "8B", "70B"), (1, 2, 4, 8, 16, 32, 64)
LARGE = ("70B",)     # of 10 to 100 billion parameters
MANY = 512           # GPUs from which data parallelism alone becomes inefficient
ONE_NODE = 8         # GPUs
MOST_GIB = 75        # of the cluster's file
AGAIN = ("1B", 1)    # the cell that a test asks for again


def advice(model, ranks):
    """{name: flags} that the book's first step recommends."""
    full = {"recompute": "full"} if model not in LARGE and ranks <= ONE_NODE else {}
    ways = {"ZeRO-3": {"tp_size": 1, "pp_size": 1, "zero_stage": 3, **full}, "`tp` 8": {"tp_size": 8}}
    if ranks >= 2 * MANY:
        return {"`tp` 8 and ZeRO-2": {"tp_size": 8, "zero_stage": 2}}
    return {"`tp` 8": ways["`tp` 8"]} if ranks >= MANY else ways


def words(**flags):
    return estimates.words_of({**searched.BASE, **flags})


def short(cell):
    """A cell with what is shown of its layout."""
    if not cell.get("best"):
        return cell
    return {**cell, "best": {name: cell["best"][name] for name in ("flags", "mfu", "gib", "step_s")}}


def ask(program, model, nodes, **flags):
    return short(plan_plot.cell(program, model, str(nodes), words(**flags)))


def collect(program):
    """{"cells": ..., "advised": [{"model", "nodes", "way", and a cell's best or missing}]}"""
    found = {"cells": [ask(program, model, nodes) for model in MODELS for nodes in NODES]}
    advised = [{**ask(program, model, nodes, **flags), "way": way}
               for model in MODELS for nodes in NODES for way, flags in advice(model, ONE_NODE * nodes).items()]
    about = f"{searched.BASE['cluster']}, {searched.BASE['plan']:,} tokens a step"
    return {**found, "advised": advised, "about": [about]}


def place(rows, model, nodes):
    return next(row for row in rows if (row["model"], row["nodes"]) == (model, nodes))


def over_best(record, row):
    """How much longer the step of an advised way takes than the fastest layout's; None where none fits."""
    if not row.get("best"):
        return None
    return row["best"]["step_s"] / place(record["cells"], row["model"], row["nodes"])["best"]["step_s"]


def advised_table(record):
    """The book's ways beside the best, by model and nodes."""
    ways = list(dict.fromkeys((row["model"], row["way"]) for row in record["advised"]))

    def shown(model, way, nodes):
        found = [row for row in record["advised"] if row["way"] == way and (row["model"], row["nodes"]) == (model, nodes)]
        if not found:
            return ""
        ratio = over_best(record, found[0])
        return "none fits" if ratio is None else f"{ratio:.2f}"

    return table(("model, and the book's way", *(f"{nodes} nodes" if nodes > 1 else "1 node" for nodes in NODES)), [
        (f"{model}, {way}", *(shown(model, way, nodes) for nodes in NODES)) for model, way in ways],
        "The step of the fastest layout that is made in this way over that of the fastest of all; empty where the book says "
        "to do something else.")


def legal(record):
    """(cells in which a layout fits, those of them in which one made by the book's advice is legal)"""
    fitting = [(cell["model"], cell["nodes"]) for cell in record["cells"] if cell.get("best")]
    right = {(row["model"], row["nodes"]) for row in record["advised"] if row.get("best") and searched.multiplies(
        row["best"]["flags"], ONE_NODE * row["nodes"], searched.BASE["plan"]) and row["best"]["gib"] <= MOST_GIB}
    return fitting, [place_ for place_ in fitting if place_ in right]


def claims_table(record):
    fitting, right = legal(record)
    slowest = max(min(ratio for ratio in (over_best(record, row) for row in record["advised"] if (
        row["model"], row["nodes"]) == place_) if ratio is not None) for place_ in right)
    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("Q8.3", "its procedure yields a legal layout for each model and cluster", "wherever any layout fits",
         f"{len(right)} of {len(fitting)}; a step at most {slowest:.2f} of the fastest",
         "yes" if len(right) == len(fitting) else "no", "the cells of the heatmap; the better of the book's ways")])


def texts(record):
    return {"advised.md": advised_table(record), "claims_map.md": claims_table(record)}
