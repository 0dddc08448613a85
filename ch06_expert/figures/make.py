"""What this chapter's pages show: schematics, estimates, messages, losses, runs of a small model with
experts balanced in every way, and how much of its messages shows.

`./book figures` calls it; tools/book/showcase.py says how.
"""
from tools.base import write_whole
from tools.bench import steady
from tools.book.showcase import json_text, origin, output_of, read_json, short_demo, write_json
from tools.look import provenance, timelines

from . import (balance, claims, counts, draw_dispatch, draw_experts, draw_latent, hiding, latent,
               latent_runs, memory, nodes, speed, ways)

SCHEMATICS = {**draw_experts.FIGURES, **draw_dispatch.FIGURES, **draw_latent.FIGURES}
DRAWINGS = (("plot_balance", "balance.json", "balance"), ("plot_beside", "beside.json", "beside"),
            ("plot_nodes", "nodes.json", "classes"), ("plot_timelines", "timelines.json", ""),
            ("plot_latent", "latent.json", "latent"))
PROVENANCE = {"provenance.md": ("demo", "memory", "counts", "balance", "beside"),
              "provenance_dispatch.md": ("ways", "nodes"),
              "provenance_latent.md": ("latent",), "provenance_schedules.md": ("schedules",)}  # {page's line: its data}
CLAIMS = {"claims.md": ("Q6.1", "Q6.2", "Q6.3", "Q6.4", "Q6.5")}
DEMO = {"num_experts": 8, "moe_ffn_hidden_size": 256, "ep_size": 2, "balance": "bias",
        "micro_batch_size": 4}
# Passes in turns without a pipeline: what the schedule looks like.
ALONE = {"pp_size": 1, "grad_acc_steps": 4, "overlap_dispatch": "true", "pp_show": "table"}
BENCH_ALONE, BENCH_CONFIGS = True, speed.MODELS
bench_lines, bench_text = speed.lines, speed.text
DEMO_ROWS = ("validation loss", "rows sent over ep", "communication not hidden")


def bench(chapter, _record, seconds, rounds):
    """What goes into the record beside what every chapter measures."""
    return speed.measure(chapter, seconds, rounds)


def measure(chapter, program, commit):
    """Runs of the small model; timelines."""
    folder, drawn = chapter.folder / "figures", []
    head = origin(chapter, commit)

    def keep(way, laid_out):
        step = timelines.cut(laid_out, steady.typical_step(laid_out))
        drawn.append({"way": way, **ways.drawn_part(step)})

    write_json(folder / "ways.json", {**head, **ways.measure(chapter, keep),
                                      "ratio": hiding.measure(chapter)})
    write_whole(folder / "timelines.json", timelines.text({**head, "ways": drawn}))
    write_json(folder / "nodes.json", {**head, "steps": nodes.measure(chapter)})
    write_json(folder / "schedules.json", {**head, **ways.measure_schedules(chapter)})
    for name, found in (("balance", balance.measure(program)),
                        ("beside", balance.measure_beside(program))):
        write_whole(folder / f"{name}.json", balance.text({**head, **found}))
    write_whole(folder / "latent.json",
                balance.text({**head, "runs": latent_runs.measure(program)}))
    write_whole(folder / "latent_demo.txt", latent_runs.demo(program))
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
    """Messages, memory and losses of runs of a few steps; bytes between nodes; latents."""
    folder, found = chapter.folder / "figures", {}
    if (folder / "counts.json").exists():
        counted = counts.count(program)
        found["counts.json"] = json_text({**read_json(folder / "counts.json"), **counted,
                                          "small": memory.count(program),
                                          "stages": memory.count_stages(chapter)})
        found["node_traffic.txt"] = nodes.output(chapter)
        found["show_alone.txt"] = output_of(program, [f"--{name}={value}" for name, value in ALONE.items()])
        found["nodes.json"] = json_text({
            **read_json(folder / "nodes.json"), "nodes": nodes.read(found["node_traffic.txt"]),
            "copies": counted["nodes"], "ledger": counts.ledger(program, **counts.BY_NODE)})
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
             for page, names in PROVENANCE.items() if set(names) & set(data)}
    estimated, counted = data.get("memory", {}), data.get("counts", {})
    if "problem" in estimated:
        found.update({"problem.md": memory.problem_table(estimated["problem"]),
                      "ep.md": memory.ep_table(estimated["ep"], memory.small_text(
                          estimated["small"], counted["small"]) if "small" in counted else ""),
                      "meshes.md": memory.meshes_table(estimated["meshes"],
                                                       counted.get("stages", []))})
        found["latent_parameters.md"] = latent.parameters_table(estimated["problem"])
    if "messages" in counted:
        found.update({"messages.md": counts.messages_table(counted["messages"]),
                      "nodes.md": counts.nodes_table(counted["nodes"])})
    if "messages" in counted and "problem" in estimated:
        found.update({name: claims.claims_table(counted, estimated, numbers)
                      for name, numbers in CLAIMS.items()})
    if "ratio" in data.get("ways", {}):
        found.update({"ways.md": ways.ways_table(data["ways"]),
                      "faster.md": ways.faster_table(data["ways"]),
                      "left.md": ways.left_table(data["ways"]),
                      "ratios.md": hiding.ratios_table(data["ways"]["ratio"])})
    if "schedules" in data:
        found["schedules.md"] = ways.schedules_table(data["schedules"])
    if "nodes" in data.get("nodes", {}):
        found.update({"hiding.md": hiding.large_table(data["nodes"]["copies"]),
                      "classes.md": nodes.nodes_table(data["nodes"]["nodes"]),
                      "node_steps.md": nodes.steps_table(data["nodes"]["steps"])})
    if "ratio" in data.get("ways", {}) and "nodes" in data.get("nodes", {}):
        found["claims_dispatch.md"] = claims.dispatch_table(data["ways"], data["nodes"]["nodes"])
    found.update(latent_texts(data.get("latent", {})))
    if "balance" in data:
        found["load.md"] = balance.balance_table(data["balance"])
    found["speed.md"] = speed.page(data.get("bench", {}))
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
