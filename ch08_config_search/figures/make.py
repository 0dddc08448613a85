"""What this chapter's page shows: schematics, answers of searches, predictions beside measurements.

`./book figures` calls it; tools/book/showcase.py says how.
"""
from pathlib import Path

from tools.book.short_runs import look_into, run
from tools.book.showcase import json_text, origin, read_json, write_json
from tools.look import provenance

from . import against, beside, draw_replay, folded, mapped, measured, predicted, scaled, searched, speed

SCHEMATICS = draw_replay.FIGURES
DRAWINGS = (("plot_heatmap", "map.json", "heatmap"), ("plot_layouts", "searches.json", "layouts"))
PROVENANCE = {"provenance.md": ("searches", "counts", "fits", "predicted"), "provenance_here.md": ("measured",),
              "provenance_folded.md": ("folded",), "provenance_map.md": ("map", "searches"),
              "provenance_beside.md": ("beside",),
              "provenance_against.md": ("against",), "provenance_scaled.md": ("scaled",)}
CHAPTER = Path(__file__).resolve().parents[1].name
BENCH_TRAINS, BENCH_PROGRAMS = False, (f"{CHAPTER}_{folded.EXAMPLE}",)
bench_lines, bench_text = speed.lines, speed.text
# A small run whose exchanges the box of the algorithm names.
SMALL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_layers": 2,
         "seq_len": 64, "micro_batch_size": 2, "grad_acc_steps": 2, "dp_size": 2, "tp_size": 2,
         "sequence_parallel": None, "dtype": "f32", "steps": 2}
SMALL_RANKS = 4
ALONE = {**{name: value for name, value in SMALL.items() if not name.endswith("_size") or name.startswith(
    ("hidden", "ffn_hidden", "micro"))}, "vocab_size": 256, "trace_steps": 1}
ALONE.pop("sequence_parallel")


def bench(chapter, _record, _seconds, _rounds):
    """What `./book bench` measures: rates of a search."""
    return speed.measure(chapter)


def measure(chapter, program, commit):
    """Layouts that run here, for some minutes, and fits; and where the data come from that rerun() and
    count() fill next."""
    write_json(chapter.folder / "figures" / "measured.json",
               {**origin(chapter, commit), **measured.collect(chapter, program)})
    write_json(chapter.folder / "figures" / "beside.json", {**origin(chapter, commit), **beside.measure(chapter)})
    write_json(chapter.folder / "figures" / "map.json", {**origin(chapter, commit), **mapped.collect(program)})
    write_json(chapter.folder / "figures" / "scaled.json", {**origin(chapter, commit), **scaled.scale_all(program)})
    for name in ("searches", "counts", "predicted", "against"):
        write_json(chapter.folder / "figures" / f"{name}.json", origin(chapter, commit))
    write_json(chapter.folder / "figures" / "folded.json",
               {**origin(chapter, commit), "rates": folded.measure_rates(chapter),
                "searches": folded.measure_searches(chapter)})
    write_json(chapter.folder / "figures" / "fits.json",
               {**origin(chapter, commit), "clusters": predicted.fit_all(program)})


def rerun(chapter, program):
    """Searches, which no machine changes."""
    folder = chapter.folder / "figures"
    found = {"plan.txt": searched.plan_text(program), **searched.answers(program)}
    if (folder / "searches.json").exists():
        found["searches.json"] = json_text({**read_json(folder / "searches.json"), **searched.search_all(program)})
    if (folder / "against.json").exists():
        found["against.json"] = json_text({**read_json(folder / "against.json"), **against.compare_all(program)})
    if (folder / "predicted.json").exists():
        found["predicted.json"] = json_text({**read_json(folder / "predicted.json"),
                                             "tables": predicted.predict_all(program)})
    return found


def count(chapter, program):
    """What a small run sends, and steps as products of matrices."""
    folder = chapter.folder / "figures"
    if not (folder / "counts.json").exists():
        return {}
    _, ledger = run(program, SMALL_RANKS, **SMALL)
    products = look_into(program, 1, products_of_a_step, **ALONE)
    sent = {name: {key: entry[key] for key in ("calls", "payload_bytes", "wire_bytes")}
            for name, entry in ledger.items()}
    found = {"counts.json": json_text({**read_json(folder / "counts.json"), "products": products, "ledger": sent})}
    if (folder / "folded.json").exists():
        found.update({"fold.txt": folded.shown(chapter), "folded.json": json_text({
            **read_json(folder / "folded.json"), "steps": folded.fold_all(chapter)})})
    return found


def products_of_a_step(run_dir):
    """{op: operations} of the products of weights in a traced step."""
    events = read_json(run_dir / "trace.json")["traceEvents"]
    ops = [event for event in events if event.get("cat") == "op" and event["name"].startswith("linear_")]
    step = max(event["args"]["step"] for event in ops)
    found = {}
    for event in ops:
        if event["args"]["step"] == step:
            found[event["name"]] = found.get(event["name"], 0) + event["args"]["flops"]
    return found


def texts(folder):
    """Every table of which the data are there."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {page: provenance.line({name: data[name] for name in names if name in data})
             for page, names in PROVENANCE.items() if data.keys() & set(names)}
    if "measured" in data:
        found.update(measured.texts(data["measured"]))
    if "beside" in data:
        found.update({"beside.md": beside.beside_table(data["beside"]),
                      "claims_beside.md": beside.claims_table(data["beside"])})
    if "map" in data:
        found.update(mapped.texts(data["map"]))
    if "map" in data.get("against", {}):
        found.update(against.texts(data["against"]))
    if "rows" in data.get("scaled", {}):
        found["scaled.md"] = scaled.scaled_table(data["scaled"])
    searches = data.get("searches", {})
    if "one_node" in searches:
        found.update({"problem.md": searched.problem_table(searches["one_node"]),
                      "formula.md": searched.formula_table(searches["one_node"]),
                      "nodes.md": searched.nodes_table(searches["nodes"]),
                      "depends.md": searched.depends_table(searches["nodes"]),
                      "claims.md": searched.claims_table(searches)})
    if "steps" in data.get("folded", {}):
        found.update({"folded.md": folded.sizes_table(data["folded"]["steps"]),
                      "without.md": folded.without_table(data["folded"]["steps"]),
                      "rates.md": folded.rates_table(data["folded"]["rates"]),
                      "search_parts.md": folded.searches_table(data["folded"]["searches"])})
    if "fits" in data and "tables" in data.get("predicted", {}):
        both = data["fits"]["clusters"], data["predicted"]["tables"]
        found.update({"fitted.md": predicted.fitted_table(*both), "judged.md": predicted.judged_table(*both)})
    return found
