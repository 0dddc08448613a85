"""What the plots of searches draw: the best layout of each model on each number of nodes, or all
layouts of one search, as ./book plan finds them.

A cell of the first is {"model", "nodes", "best": a row of the program's JSON}, with null where no
layout is as --require says, and {"model", "nodes", "missing": GiB} where none fits.
"""
import json
import re
import tempfile
from pathlib import Path

from tools.base import BookError, say, show_path
from tools.bench import measure
from tools.look import figures
from tools.run import build, packages, plan

ALL = 1000  # layouts to ask for, more than most searches have
DEGREES = ("dp", "tp", "cp", "pp", "ep")
MISSING = re.compile(r": ([\d.]+) are missing")


def values_of(flags):
    """{flag: value} of a layout's flags; a switch has the value True, a word stays one."""
    words = flags.split()
    return {word[2:]: True if after.startswith("--") else int(after) if after.isdigit() else after
            for word, after in zip(words, [*words[1:], "--"]) if word.startswith("--")}


def degrees_of(flags):
    """{"dp": 4, "tp": 1, ...}"""
    value = values_of(flags)
    return {name: value.get(f"{name}_size", 1) for name in DEGREES}


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
    return {"model": model, "nodes": int(nodes), "best": next(iter(found["best"]), None)}


def of_cell(model, nodes):
    """The flags that differ from cell to cell. Without a model's name the other flags say which it is."""
    return [*(["--model", model] if model else []), "--nodes", nodes]


def cells(program, models, nodes, flags):
    """{"cells": one for each model on each number of nodes, all words of a command line}"""
    return {"cells": [cell(program, model, count, flags) for model in models for count in nodes]}


def layouts(program, flags):
    """{"layouts": the rows of all that a search lays out in time, the fastest first}"""
    found, _ = measure.best_of_search(program, flags, ALL)
    return {"layouts": found["best"]}


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
    with tempfile.TemporaryDirectory(prefix="book_plot_") as scratch:
        data = Path(scratch) / "record.json"
        data.write_text(json.dumps({**record, "about": about}), encoding="utf-8")
        figures.draw(script, [data, Path(path).absolute()])
    print(path)
    return 0
