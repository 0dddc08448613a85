"""What this chapter's pages show: schematics of a fused head and of attention, estimates, and counts of small runs; and
of the ladder of kernels what labs.py makes.

`./book figures` calls it; tools/book/showcase.py says how.
"""
from tools.book.showcase import json_text, origin, read_json, write_json
from tools.look import provenance

from . import beside, counted, draw_attention, draw_fused, draw_gpu, estimated, expected, labs

SCHEMATICS = {**draw_attention.FIGURES, **draw_fused.FIGURES, **draw_gpu.FIGURES, **labs.SCHEMATICS}
PROVENANCE = {"provenance.md": ("estimates", "counts")}
KEPT = ("estimates", "counts")


def measure(chapter, _program, commit):
    """Where the data come from; rerun() and count(), which come next, fill them."""
    for name in KEPT:
        write_json(chapter.folder / "figures" / f"{name}.json", origin(chapter, commit))


def filled(chapter, name, fill):
    """{file: text} of one record, where measure() has begun it."""
    path = chapter.folder / "figures" / f"{name}.json"
    return {path.name: json_text({**read_json(path), **fill()})} if path.exists() else {}


def rerun(chapter, program):
    """Estimates, which no machine changes."""
    return {**filled(chapter, "estimates", lambda: estimated.estimate_all(program)),
            "estimate.txt": estimated.shown(program)}


def count(chapter, program):
    """What small runs send, compute and keep, and what labs count."""
    return {**filled(chapter, "counts", lambda: counted.count_all(program)), **labs.count(program)}


def texts(folder):
    """Every table of which the data are there, and the one that is calculated."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {page: provenance.line({name: data[name] for name in names if name in data})
             for page, names in PROVENANCE.items()}
    found["provenance_labs.md"] = provenance.counted(folder.parent.name, ["labs"])
    found.update(expected.tables())
    if "models" in data.get("estimates", {}):
        found.update(estimated.tables(data["estimates"]))
    if "runs" in data.get("counts", {}):
        found.update(counted.tables(data["counts"], data.get("labs")))
    if "labs" in data:
        found.update(labs.texts(data["labs"]))
        found.update(beside.texts(data["labs"]))
    return found
