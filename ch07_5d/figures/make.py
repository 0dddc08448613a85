"""What this chapter's page shows: schematics of a mesh, who holds what, bytes that leave a node, losses of
compositions, and memory of one model over each dimension.

`./book figures` calls it; tools/book/showcase.py says how.
"""
from tools.book.showcase import json_text, origin, read_json, write_json
from tools.look import provenance
from tools.run import bridge

from . import (claims, dimensions, draw_layer, draw_mesh, draw_types, equal, memory, museum, placed, published, rounding,
               speed, typed, typed_faults)

SCHEMATICS = {**draw_mesh.FIGURES, **draw_layer.FIGURES, **draw_types.FIGURES}
PROVENANCE = {"provenance.md": ("estimates", "counts")}
DEMO = {"micro_batch_size": 4, "check_copies": 10}
BENCH_ALONE, BENCH_PROGRAMS = True, speed.programs()
bench_lines, bench_text = speed.lines, speed.text


def bench(chapter, _record, seconds, rounds):
    """What goes into the record beside what every chapter measures."""
    return speed.measure(chapter, seconds, rounds)


def measure(chapter, _program, commit):
    """Where the data come from; rerun() and count(), which come next, fill them."""
    for name in ("estimates", "counts"):
        write_json(chapter.folder / "figures" / f"{name}.json", origin(chapter, commit))


def rerun(chapter, program):
    """Estimates, and who holds what."""
    folder = chapter.folder / "figures"
    found = {"layout.txt": placed.layout(program), "prove.txt": placed.proof(program, chapter),
             "types.txt": placed.typed(program), "why.txt": placed.why(program),
             "edges.json": json_text(placed.edges(program)), "layer.txt": placed.mapped(program),
             "layer_back.txt": placed.messages_back(program),
             "bridge.txt": placed.bridged(program, chapter)}
    if (folder / "estimates.json").exists():
        found["estimates.json"] = json_text({**read_json(folder / "estimates.json"),
                                             **placed.estimate_all(program),
                                             **memory.estimate_all(program),
                                             **published.estimate_all(program)})
    return found


def count(chapter, program):
    """Bytes and losses of runs of a few steps."""
    folder = chapter.folder / "figures"
    if not (folder / "counts.json").exists():
        return {}
    return {"counts.json": json_text({**read_json(folder / "counts.json"), **placed.count(program),
                                      **equal.count(program)})}


def texts(folder):
    """Every table of which the data are there, and those of names."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {page: provenance.line({name: data[name] for name in names if name in data})
             for page, names in PROVENANCE.items()}
    found.update({"bridge.md": bridge.table(), "bridge_sources.md": bridge.sources(),
                  "bridge_differs.md": bridge.differing(), "bridge_refused.md": bridge.refused()})
    estimated, counted = data.get("estimates", {}), data.get("counts", {})
    if "large" in estimated:
        found.update({"orders.md": placed.large_table(estimated["large"]),
                      "memory.md": memory.memory_table(estimated["memory"]),
                      "published.md": published.published_table(estimated["published"])})
    if "compositions" in counted:
        found.update({"leaving.md": placed.small_table(counted["small"]),
                      "compositions.md": equal.compositions_table(counted["compositions"]),
                      "compared.md": equal.checked_table(counted["checked"])})
    if "large" in estimated and "compositions" in counted:
        found["claims.md"] = claims.claims_table(counted, estimated, (folder / "layer.txt").read_text(encoding="utf-8"))
    if "dimensions" in data:
        found.update(dimensions.texts(data["dimensions"]))
    if "museum" in data:
        found.update(museum.texts(data["museum"]))
    if "rounding" in data:
        found.update(rounding.texts(data["rounding"], data["museum_bf16"]))
    if "typed" in data:
        found.update(typed.texts(data["typed"]))
    if "typed_faults" in data:
        found.update(typed_faults.texts(data["typed_faults"]))
    return found
