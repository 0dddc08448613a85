"""What this chapter's page shows: schematics, estimates, messages, losses, and runs of a small model with
experts balanced in every way.

`./book figures` calls it; tools/showcase.py says how.
"""
from tools import provenance
from tools.showcase import json_text, origin, read_json, short_demo, write_json

from . import balance, claims, counts, draw_experts, memory, speed

SCHEMATICS = draw_experts.FIGURES
DRAWINGS = (("plot_balance", "balance.json", "balance"), ("plot_beside", "beside.json", "beside"))
PROVENANCE = {"provenance.md": ("demo", "memory", "counts", "balance", "beside")}  # {page's line: its data}
CLAIMS = {"claims.md": ("Q6.1", "Q6.2", "Q6.3", "Q6.4", "Q6.5")}
DEMO = {"num_experts": 8, "moe_ffn_hidden_size": 256, "ep_size": 2, "balance": "bias",
        "micro_batch_size": 4}
BENCH_ALONE, BENCH_CONFIGS = True, speed.MODELS
bench_lines, bench_text = speed.lines, speed.text
DEMO_ROWS = ("validation loss", "rows sent over ep", "communication not hidden")


def bench(chapter, _record, seconds, rounds):
    """What goes into the record beside what every chapter measures."""
    return speed.measure(chapter, seconds, rounds)


def measure(chapter, program, commit):
    """Runs of the small model."""
    folder = chapter.folder / "figures"
    head = origin(chapter, commit)
    for name, found in (("balance", balance.measure(program)),
                        ("beside", balance.measure_beside(program))):
        (folder / f"{name}.json").write_text(balance.text({**head, **found}), encoding="utf-8")
    for name in ("memory", "counts"):  # rerun() and count(), which come next, fill them
        write_json(folder / f"{name}.json", head)


def rerun(chapter, program):
    """Estimates."""
    path = chapter.folder / "figures" / "memory.json"
    if not path.exists():
        return {}
    return {"memory.json": json_text({**read_json(path), **memory.estimate_all(program)})}


def count(chapter, program):
    """Messages, memory and losses of runs of a few steps."""
    path = chapter.folder / "figures" / "counts.json"
    if not path.exists():
        return {}
    return {"counts.json": json_text({**read_json(path), **counts.count(program),
                                      "small": memory.count(program)})}


def texts(folder):
    """Every table of which the data are there."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {page: provenance.line({name: data[name] for name in names if name in data})
             for page, names in PROVENANCE.items()}
    estimated, counted = data.get("memory", {}), data.get("counts", {})
    if "problem" in estimated:
        found.update({"problem.md": memory.problem_table(estimated["problem"]),
                      "ep.md": memory.ep_table(estimated["ep"]),
                      "meshes.md": memory.meshes_table(estimated["meshes"])})
    if "messages" in counted:
        found.update({"messages.md": counts.messages_table(counted["messages"]),
                      "nodes.md": counts.nodes_table(counted["nodes"])})
    if "messages" in counted and "problem" in estimated:
        found.update({name: claims.claims_table(counted, estimated, numbers)
                      for name, numbers in CLAIMS.items()})
    if "balance" in data:
        found["load.md"] = balance.balance_table(data["balance"])
    found["speed.md"] = speed.page(data.get("bench", {}))
    if (folder / "demo.txt").exists():
        found["demo_short.txt"] = short_demo(
            (folder / "demo.txt").read_text(encoding="utf-8"), DEMO_ROWS)
    return found
