"""Searches whose answers the page shows: on a node of H100s and on eight, and what does not fit."""
import json
import math
import re

from tools.base import BookError, say
from tools.book.short_runs import table
from tools.run import estimates

BASE = {"dtype": "bf16", "seq_len": 4096, "cluster": "h100_nvl8", "plan": 2**20}
SHOWN = {"model": "8B", **BASE, "nodes": 1}
MODELS, NODES = ("1B", "8B"), (1, 8)
WORDS = {1: "one node", 8: "eight nodes"}
TOO_LARGE, FEW_NODES = "70B", (1, 2)
PLANNED = 4  # rows of the program's own table that the page shows
# What the program answers to further questions, by the file that has it.
ASKED = {"why.txt": {**SHOWN, "why": "1; --tp_size 2 --sequence_parallel --zero_stage 1 --micro_batch_size 4 "
                                     "--grad_acc_steps 16"},
         "what_if.txt": {**SHOWN, "nodes": 2, "what_if": "net=-90%"},
         "node_down.txt": {**SHOWN, "nodes": 4, "what_if": "ranks=-8"}}


def search(program, flags):
    """What a search finds, as its JSON."""
    return json.loads(estimates.output_of([str(program), *estimates.words_of({**flags, "plan_json": None})]))


def missing(program, nodes):
    """(GiB that the smallest layout takes, GiB that are missing) where nothing fits."""
    try:
        search(program, {"model": TOO_LARGE, **BASE, "nodes": nodes})
    except BookError as refusal:
        found = re.search(r"takes ([\d.]+) GiB .*: ([\d.]+) are missing", str(refusal))
        if found:
            return [float(number) for number in found.groups()]
    raise BookError(f"{TOO_LARGE} should not fit on {nodes} nodes")


def search_all(program):
    say("book: searches for layouts")
    return {"one_node": search(program, {**SHOWN, "plan_best": 1000}),
            "nodes": [{"model": model, "nodes": nodes, **search(
                program, {"model": model, **BASE, "nodes": nodes, "recompute": "none", "plan_best": 1})}
                for model in MODELS for nodes in NODES],
            "missing": [{"nodes": nodes, "found": missing(program, nodes)} for nodes in FEW_NODES]}


def plan_text(program):
    """The program's own words."""
    return estimates.output_of([str(program), *estimates.words_of({**SHOWN, "plan_best": PLANNED})])


def answers(program):
    """{file: the program's words}"""
    return {name: estimates.output_of([str(program), *estimates.words_of(flags)]) for name, flags in ASKED.items()}


def values_of(flags):
    """{flag: value} of those that have one."""
    words = flags.split()
    return {words[i][2:]: int(words[i + 1]) for i in range(len(words) - 1)
            if words[i].startswith("--") and words[i + 1].isdigit()}


def layout(flags):
    """`dp` 4 `tp` 2, ZeRO-1, micro-batch 4"""
    value = values_of(flags)
    text = " ".join(f"`{axis}` {value[axis + '_size']}" for axis in ("dp", "tp", "pp")
                    if value.get(f"{axis}_size", 1) > 1) or "`dp` 1"
    if "zero_stage" in value:
        text += f", ZeRO-{value['zero_stage']}"
    text += f", micro-batch {value['micro_batch_size']}"
    return text + (", full recomputation" if "--recompute" in flags else "")


def multiplies(flags, ranks, tokens):
    """Whether a layout has so many ranks, and as many samples as the batch."""
    value = values_of(flags)
    degrees = [value.get(f"{axis}_size", 1) for axis in ("dp", "tp", "cp", "pp")]
    samples = degrees[0] * value["micro_batch_size"] * value["grad_acc_steps"]
    return math.prod(degrees) == ranks and samples * BASE["seq_len"] == tokens


def problem_table(found):
    """The fastest layout, the one in the middle, the slowest of those that were laid out in time."""
    rows = found["best"]
    chosen = {"fastest": rows[0], "median": rows[len(rows) // 2], "slowest": rows[-1]}
    return table(("among the layouts", "step, s", "MFU", "GiB", "layout"), [
        (name, f"{row['step_s']:.2f}", f"{100 * row['mfu']:.1f} %", f"{row['gib']:.1f}", layout(row["flags"]))
        for name, row in chosen.items()],
        f"Llama 3's 8B on one node of eight H100s by `clusters/h100_nvl8.json`, {found['tokens']:,} tokens a step. "
        f"{found['fit']} layouts fit, {found['too_large']} do not; {found['replayed']} are laid out in time.")


def formula_table(found):
    """What the closed form says of layouts of every kind."""
    kinds = {}
    for row in found["best"]:
        words = row["flags"].split()
        kind = ("pp" if "--pp_size" in words else "") + ("tp" if "--tp_size" in words else "")
        kinds.setdefault(kind or "dp", row)
    order = sorted(kinds.values(), key=lambda row: row["step_s"])
    return table(("layout", "formula, s", "replayed, s", "replayed over formula", "bubble", "exposed"), [
        (layout(row["flags"]), f"{row['formula_s']:.2f}", f"{row['step_s']:.2f}",
         f"{row['step_s'] / row['formula_s']:.2f}", f"{100 * row['bubble']:.1f} %",
         f"{100 * sum(share for name, share in row['exposed'].items() if name != 'pp'):.1f} %")
        for row in order],
        "The fastest layout of each kind: 8B on one node of H100s. `exposed`: the share of the step spent waiting for "
        "exchanges other than those between stages.")


def nodes_table(found):
    """MFU of the best layout by nodes."""
    return table(("model", "step, s", "MFU", "exposed", "layout"), [
        (f"{row['model']} on {WORDS[row['nodes']]}", f"{row['best'][0]['step_s']:.3f}", f"{100 * row['best'][0]['mfu']:.1f} %",
         f"{100 * sum(row['best'][0]['exposed'].values()):.1f} %", layout(row["best"][0]["flags"])) for row in found],
        "The fastest layout without recomputation, at the same batch of 1,048,576 tokens.")


def depends_table(found):
    """What 10 % more of each of the cluster's numbers does to the best step, by nodes."""
    names = list(found[0]["best"][0]["plus_10_percent"])
    return table(("the fastest layout of", *names), [
        (f"{row['model']} on {WORDS[row['nodes']]}",
         *(f"{100 * row['best'][0]['plus_10_percent'][name]:.2f} %" for name in names)) for row in found],
        "By how much the step changes with 10 % more of one number of `clusters/h100_nvl8.json`; the layouts are those "
        "of chapter 8's table of nodes.")


def mfu(found, model, nodes):
    return next(row["best"][0]["mfu"] for row in found if (row["model"], row["nodes"]) == (model, nodes))


def claims_table(found):
    """The book's claims, beside what the searches say."""
    falls = {model: mfu(found["nodes"], model, NODES[-1]) / mfu(found["nodes"], model, NODES[0]) for model in MODELS}
    few, many = (falls[model] for model in MODELS)
    lacks = {row["nodes"]: row["found"][1] for row in found["missing"]}
    one_node = found["one_node"]
    right = sum(multiplies(row["flags"], one_node["ranks"], one_node["tokens"]) for row in one_node["best"])
    whole = len(one_node["best"])

    def yes(holds):
        return "yes" if holds else "no"

    return table(("", "the book", "expected", "found", "holds", "where"), [
        ("Q8.1", "at a fixed batch MFU falls with the nodes, most for small models", "below 1; lower for 1B",
         f"{few:.3f} for 1B; {many:.3f} for 8B", yes(few < many < 1), "MFU on 8 nodes over that on 1"),
        ("Q8.2", "80B does not fit on one node or two", "missing on both",
         "; ".join(f"{gib:.1f} GiB on {nodes}" for nodes, gib in lacks.items()), yes(all(gib > 0 for gib in lacks.values())),
         "Llama 3's 70B, the layout that needs least"),
        ("Q8.4", "degrees multiply to the ranks, micro-batches to the batch", "all layouts",
         f"{right} of {whole}", yes(right == whole), "the layouts of section 1; the batch in samples is "
         "`dp` times the micro-batch times `grad_acc_steps`"),
    ])
