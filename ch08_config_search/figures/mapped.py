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
    """The step of an advised way over that of the fastest layout; None where none fits."""
    if not row.get("best"):
        return None
    return row["best"]["step_s"] / place(record["cells"], row["model"], row["nodes"])["best"]["step_s"]


def advised_table(record):
    """The book's ways beside the best, by model and nodes."""
    ways = list(dict.fromkeys((row["model"], row["way"]) for row in record["advised"]))

    def shown(model, way, nodes):
        found = [row for row in record["advised"] if (row["model"], row["nodes"], row["way"]) == (model, nodes, way)]
        if not found:
            return ""
        ratio = over_best(record, found[0])
        return "none fits" if ratio is None else f"{ratio:.2f}"

    return table(("model, and the book's way", *(f"{nodes} nodes" if nodes > 1 else "1 node" for nodes in NODES)), [
        (f"{model}, {way}", *(shown(model, way, nodes) for nodes in NODES)) for model, way in ways],
        "The step of the fastest layout that follows the advice of its row, over the step of the fastest layout of all. "
        "Nothing stands where the book advises something else.")


def legal(record):
    """(cells in which a layout fits, those of them in which one made by the book's advice is legal)"""
    fitting = [(cell["model"], cell["nodes"]) for cell in record["cells"] if cell.get("best")]
    right = {(row["model"], row["nodes"]) for row in record["advised"] if row.get("best") and searched.multiplies(
        row["best"]["flags"], ONE_NODE * row["nodes"], searched.BASE["plan"]) and row["best"]["gib"] <= MOST_GIB}
    return fitting, [place_ for place_ in fitting if place_ in right]


def falls(record):
    """{model: MFU on the most nodes over that on the fewest on which it fits}"""
    found = {}
    for model in MODELS:
        column = [cell["best"]["mfu"] for cell in record["cells"] if cell["model"] == model and cell.get("best")]
        found[model] = column[-1] / column[0]
    return found


def claims_table(record):
    fitting, right = legal(record)
    fallen = falls(record)
    slowest = max(min(ratio for ratio in (over_best(record, row) for row in record["advised"] if (
        row["model"], row["nodes"]) == place_) if ratio is not None) for place_ in right)
    order = [fallen[model] for model in MODELS]  # the smallest model first
    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("Q8.1", "at a fixed batch MFU falls with the nodes, most for small models", "below 1, rising with the model",
         "; ".join(f"{ratio:.2f} for {model}" for model, ratio in fallen.items()),
         "yes" if order == sorted(order) and order[-1] < 1 else "no",
         f"MFU on {NODES[-1]} nodes over that on the fewest on which the model fits"),
        ("Q8.3", "its procedure yields a legal layout for each model and cluster", "wherever any layout fits",
         f"{len(right)} of {len(fitting)}; a step at most {slowest:.2f} of the fastest",
         "yes" if len(right) == len(fitting) else "no", "the cells of the heatmap; the better of the book's ways")])


def texts(record):
    return {"advised.md": advised_table(record), "claims_map.md": claims_table(record)}
