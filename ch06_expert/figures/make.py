"""What this chapter's page shows: schematics, estimates, messages, losses, and runs of a small model with
experts balanced in every way.

`./book figures` calls it; tools/showcase.py says how.
"""
from tools import provenance
from tools.showcase import json_text, origin, read_json, short_demo, write_json

from . import (balance, claims, counts, draw_experts, draw_latent, latent, latent_runs, memory)

SCHEMATICS = {**draw_experts.FIGURES, **draw_latent.FIGURES}
DRAWINGS = (("plot_balance", "balance.json", "balance"), ("plot_beside", "beside.json", "beside"),
            ("plot_latent", "latent.json", "latent"))
PROVENANCE = {"provenance.md": ("demo", "memory", "counts", "balance", "beside"),  # {page's line: its data}
              "provenance_latent.md": ("latent",)}
CLAIMS = {"claims.md": ("Q6.1", "Q6.2", "Q6.3", "Q6.4", "Q6.5")}
DEMO = {"num_experts": 8, "moe_ffn_hidden_size": 256, "ep_size": 2, "balance": "bias",
        "micro_batch_size": 4}
DEMO_ROWS = ("validation loss", "rows sent over ep", "communication not hidden")


def measure(chapter, program, commit):
    """Runs of the small model."""
    folder = chapter.folder / "figures"
    head = origin(chapter, commit)
    for name, found in (("balance", balance.measure(program)),
                        ("beside", balance.measure_beside(program))):
        (folder / f"{name}.json").write_text(balance.text({**head, **found}), encoding="utf-8")
    (folder / "latent.json").write_text(
        balance.text({**head, "runs": latent_runs.measure(program)}), encoding="utf-8")
    (folder / "latent_demo.txt").write_text(latent_runs.demo(program), encoding="utf-8")
    for name in ("memory", "counts"):  # rerun() and count(), which come next, fill them, and latent.json
        write_json(folder / f"{name}.json", head)


def rerun(chapter, program):
    """Estimates."""
    folder, found = chapter.folder / "figures", {}
    if (folder / "memory.json").exists():
        found["memory.json"] = json_text({**read_json(folder / "memory.json"),
                                          **memory.estimate_all(program)})
    if (folder / "latent.json").exists():
        found["latent.json"] = balance.text({**read_json(folder / "latent.json"),
                                             "estimated": latent_runs.estimate_all(program)})
    return found


def count(chapter, program):
    """Messages, memory and losses of runs of a few steps."""
    folder, found = chapter.folder / "figures", {}
    if (folder / "counts.json").exists():
        found["counts.json"] = json_text({**read_json(folder / "counts.json"), **counts.count(program),
                                          "small": memory.count(program)})
    if (folder / "latent.json").exists():
        found["latent.json"] = balance.text({
            **read_json(folder / "latent.json"), **latent.count(program),
            "counted": latent_runs.count(program)})
        found["latent_cache.txt"] = latent.outputs(program)
    return found


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
        found["latent_parameters.md"] = latent.parameters_table(estimated["problem"])
    if "messages" in counted:
        found.update({"messages.md": counts.messages_table(counted["messages"]),
                      "nodes.md": counts.nodes_table(counted["nodes"])})
    if "messages" in counted and "problem" in estimated:
        found.update({name: claims.claims_table(counted, estimated, numbers)
                      for name, numbers in CLAIMS.items()})
    found.update(latent_texts(data.get("latent", {})))
    if "balance" in data:
        found["load.md"] = balance.balance_table(data["balance"])
    if (folder / "demo.txt").exists():
        found["demo_short.txt"] = short_demo(
            (folder / "demo.txt").read_text(encoding="utf-8"), DEMO_ROWS)
    return found


def latent_texts(data):
    """The tables of latent.md."""
    found = {}
    if "caches" in data:
        found.update({"latent_problem.md": latent.problem_table(data["caches"]),
                      "latent_formula.md": latent.formula_table(data["caches"]),
                      "latent_tp_cache.md": latent.over_tp_table(data["over_tp"]),
                      "latent_operations.md": latent.operations_table(data["operations"]),
                      "latent_crossover.md": latent.crossover_table(data["crossover"]),
                      "latent_intensity.md": latent.intensity_table(data["intensity"]),
                      "latent_tp.md": latent.tp_table(data["tp"]),
                      "latent_ring.md": latent.ring_table(data["ring"])})
    if "estimated" in data and "counted" in data:
        found.update({"latent_memory.md": latent_runs.memory_table(data["estimated"], data["counted"]),
                      "latent_losses.md": latent_runs.losses_table(data["estimated"], data["runs"])})
    return found
