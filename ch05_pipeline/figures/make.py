"""What this chapter's page shows: schematics, simulated schedules, estimates, messages, losses, and
measured pipelines.

`./book figures` calls it; tools/book/showcase.py says how.
"""
from tools.book.showcase import json_text, origin, output_of, read_json, short_demo, write_json
from tools.look import provenance
from tools.run import build, estimates

from . import (claims, counts, draw_measured, draw_schedules, draw_stages, draw_versions, memory, nodes,
               pace, planned, scaling, speed, stale)

SCHEMATICS = draw_stages.FIGURES
DRAWINGS = (("plot_bubble", "schedules.json", "bubble"),
            ("plot_in_flight", "schedules.json", "in_flight"),
            ("plot_plane", "schedules.json", "plane"), ("plot_nodes", "nodes.json", "nodes"),
            ("plot_stale", "stale.json", "stale"))
PROVENANCE = {"provenance.md": ("demo", "schedules", "memory", "counts", "pace", "nodes"),
              "provenance_filling.md": ("schedules", "memory", "counts", "pace", "scaling", "nodes"),
              "provenance_ranks.md": ("bench",),
              "provenance_pipedream.md": ("stale",)}  # {page's line: its data}
CLAIMS = {"claims.md": ("Q5.1", "Q5.2", "Q5.3", "Q5.4", "Q5.5", "Q5.8", "Q5.11"),
          "claims_filling.md": ("Q5.6", "Q5.7", "Q5.9", "Q5.10")}
DEMO = {"pp_size": 2, "micro_batch_size": 1, "grad_acc_steps": 8}  # the batch of one rank
SHOWN = {"show.txt": {"pp_size": 2, "grad_acc_steps": 4, "pp_show": "table"},
         "show_zb.txt": {"pp_size": 4, "grad_acc_steps": 8, "pp_schedule": "zb_h2", "pp_show": "table"}}
BENCH_SHARED, BENCH_CONFIGS = "pp_size", speed.MODELS
bench_lines, bench_text = speed.lines, speed.text
DEMO_ROWS = ("validation loss", "work of a stage", "communication not hidden")


def bench(chapter, record, _seconds, _rounds):
    """What goes into the record beside what every chapter measures."""
    return speed.measure(chapter, record)


def measure(chapter, program, commit):
    """Steps of pipelines, to be laid out with a core for every rank; collectives over nodes."""
    folder = chapter.folder / "figures"
    head = origin(chapter, commit)
    build.prepare(build.RELEASE, nodes.PROGRAM)
    write_json(folder / "nodes.json", {**head, "nodes": nodes.measure()})
    write_json(folder / "scaling.json", {**head, "scaling": scaling.measure(chapter)})
    write_json(folder / "pace.json", {**head, **pace.measure(chapter, program)})
    write_json(folder / "stale.json", {**head, **stale.measure(program)})
    for name in ("schedules", "memory", "counts"):  # rerun() and count(), which come next, fill them
        write_json(folder / f"{name}.json", head)


def rerun(chapter, program):
    """Schedules laid out in time, and estimates."""
    folder = chapter.folder / "figures"
    if not (folder / "schedules.json").exists():
        return {}
    simulated = {**read_json(folder / "schedules.json"), **planned.simulate(program)}
    estimated = {**read_json(folder / "memory.json"), **memory.estimate_all(program)}
    late = {**read_json(folder / "stale.json"), **stale.simulate(program)}
    return {"schedules.json": planned.text(simulated), "memory.json": json_text(estimated),
            "stale.json": stale.text(late), **{name: output_of(program, estimates.words_of(flags)) for name, flags in SHOWN.items()}}


def count(chapter, program):
    """Messages, peaks and losses of runs of a few steps."""
    path = chapter.folder / "figures" / "counts.json"
    if not path.exists():
        return {}
    return {"counts.json": json_text({**read_json(path), **counts.count(program),
                                      "peaks": memory.count(program)})}


def texts(folder):
    """Every table and every drawing of boxes of which the data are there."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {page: provenance.line({name: data[name] for name in names if name in data})
             for page, names in PROVENANCE.items()}
    simulated, counted = data.get("schedules", {}), data.get("counts", {})
    estimated, measured, late = (data.get(name, {}) for name in ("memory", "pace", "stale"))
    if "scaling" in data:
        found["scaling.md"] = scaling.scaling_table(data["scaling"]["scaling"])
    if "bench" in data:
        found["ranks.md"] = "\n".join(speed.lines(data["bench"])[1:]) + "\n"
    if "nodes" in data:
        found["nodes.md"] = nodes.nodes_table(data["nodes"]["nodes"])
    if "bubbles" in simulated:
        found.update({"bubbles.md": planned.bubbles_table(simulated["bubbles"]),
                      "formulas.md": planned.formulas_table(simulated["formulas"]),
                      "plane.md": planned.plane_table(simulated["plane"]),
                      "runs.md": planned.runs_table(simulated["runs"]),
                      "turns.md": planned.turns_table(simulated["turns"]),
                      **draw_schedules.figures(simulated)})
    if "problem" in estimated:
        found.update({"problem.md": memory.problem_table(estimated["problem"]),
                      "book.md": memory.book_table(estimated["book"])})
    if "zero" in estimated:
        found["zero.md"] = memory.zero_table(estimated["zero"])
    if "messages" in counted:
        found["messages.md"] = counts.messages_table(counted["messages"])
    if "peaks" in counted and "peaks" in estimated:
        found["peaks.md"] = memory.peaks_table(counted["peaks"], estimated["peaks"])
        found.update({name: claims.claims_table(simulated, counted, estimated, numbers, data)
                      for name, numbers in CLAIMS.items()})
    if "pace" in measured:
        found.update({"pace.md": pace.pace_table(measured["pace"]),
                      "steps.md": pace.drawn_table(measured["drawn"]),
                      **draw_measured.figures(measured)})
    if "drawn" in late:
        found.update({"versions.md": stale.versions_table(late["drawn"]),
                      "emptied.md": stale.bubbles_table(late), "stash.md": stale.weights_table(late),
                      "stale.md": stale.losses_table(late), **draw_versions.figures(late["drawn"])})
    if (folder / "demo.txt").exists():
        found["demo_short.txt"] = short_demo(
            (folder / "demo.txt").read_text(encoding="utf-8"), DEMO_ROWS)
    return found
