"""`./book plan --plot FILE`: what searches find, as a figure.

The best layout of each model on each number of nodes is {"cells": [...]}. A cell is {"model", "nodes",
"best": a row of the program's JSON}, with null where no layout is as --require says, and {"model",
"nodes", "missing": GiB} where none fits. All layouts of one search are {"layouts": rows}.
"""
import json
import re
import tempfile
from pathlib import Path

from tools.base import BookError, say, show_path, write_whole
from tools.bench import measure
from tools.look import figures
from tools.run import build, packages, plan

ALL = 1000  # layouts to ask for, more than most searches have
MISSING = re.compile(r": ([\d.]+) are missing")


def check_target(path):
    """BookError (2) where a figure cannot be written to that path."""
    if Path(path).suffix not in (".png", ".svg"):
        raise BookError(f"--plot {show_path(path)}: a figure is a .png or an .svg; try --plot layouts.png", 2)
    if not Path(path).absolute().parent.is_dir():
        raise BookError(f"--plot {show_path(path)}: there is no such folder; try --plot layouts.png", 2)
    figures.need_python()


def cell(program, model, nodes, flags):
    """What a search with these flags finds best for a model on so many nodes. BookError where it is
    refused for another reason than memory."""
    say(f"book: {model or 'the model'} on {nodes} node{'s' if nodes != '1' else ''}")
    try:
        found, _ = measure.best_of_search(program, [*flags, *of_cell(model, nodes)], 1)
    except BookError as refusal:
        missing = MISSING.search(str(refusal))
        if missing is None:
            raise
        return {"model": model, "nodes": int(nodes), "missing": float(missing[1])}
    return {"model": model, "nodes": int(nodes), "best": next(iter(found["best"]), None), **reached(found)}


def reached(found):
    """{"tokens"} of a search whose ranks do not reach the batch that was asked for."""
    return {"tokens": found["tokens"]} if "tokens_asked" in found else {}


def others(record):
    """What a figure says of searches of another batch."""
    batches = sorted({(each["nodes"], each["tokens"]) for each in record.get("cells", []) if "tokens" in each})
    if "tokens" in record:
        return [f"the ranks reach {record['tokens']:,}"]
    return [f"{tokens:,} on {nodes} node{'s' if nodes != 1 else ''}" for nodes, tokens in batches]


def of_cell(model, nodes):
    """The flags that differ from cell to cell. Without a model's name the other flags say which it is."""
    return [*(["--model", model] if model else []), "--nodes", nodes]


def cells(program, models, nodes, flags):
    """{"cells": one for each model on each number of nodes, all words of a command line}"""
    return {"cells": [cell(program, model, count, flags) for model in models for count in nodes]}


def layouts(program, flags):
    """{"layouts": the rows of all that a search lays out in time, the fastest first}"""
    found, _ = measure.best_of_search(program, flags, ALL)
    return {"layouts": found["best"], **reached(found)}


def run_plot(path, name, batch, models, nodes, flags, options):
    """What `./book plan --plot FILE` does: a heatmap of several models or numbers of nodes, the layouts
    of one search otherwise."""
    check_target(path)
    flags = plan.search_flags(name, batch, flags)
    chapter = plan.find_chapter()
    if not options.skip_packages:
        packages.ensure(packages.RUN, options.install)
    build.prepare(build.RELEASE, chapter.name)
    program = build.binary(build.RELEASE, chapter.name)
    about = [f"{Path(name).stem}, {plan.tokens(batch):,} tokens a step"]
    if len(models) * len(nodes) > 1:
        script, record = "heatmap", cells(program, models, nodes, flags)
    else:
        script, record = "layouts", layouts(program, [*flags, *of_cell(models[0], nodes[0])])
        if not record["layouts"]:
            raise BookError("no layout is as --require says, so there is nothing to draw", 3)
        about = [f"{models[0] + ' ' if models[0] else ''}on {nodes[0]} node{'s' if nodes[0] != '1' else ''}", *about]
    about += others(record)
    with tempfile.TemporaryDirectory(prefix="book_plot_") as scratch:
        data = Path(scratch) / "record.json"
        write_whole(data, json.dumps({**record, "about": about}))
        figures.draw(script, [data, Path(path).absolute()])
    print(path)
    return 0
