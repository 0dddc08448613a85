"""Which method wins: by kv heads, tokens and links, and across nodes. Recorded, then replayed.

Ranks share this machine's cores while they are recorded; a replay gives each a core.
"""
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links, steady, train

from . import runs, workload

RANKS, NODE_SIZE = 8, 2
SHAPE = {**workload.SHAPE, "num_heads": 8}
CASES = ({"num_kv_heads": 8, "seq_len": 1024}, {"num_kv_heads": 8, "seq_len": 4096},
         {"num_kv_heads": 2, "seq_len": 1024}, {"num_kv_heads": 2, "seq_len": 4096})
# Links of one node of all ranks: their names, and what they are.
LINKS = {"fast": "node=5,5", "high latency": "node=200,5", "slow": "node=5,0.1"}
NODES = ("node=5,5", "net=40,0.2")  # nodes of NODE_SIZE
FEW = SKIPPED_STEPS + 4  # steps of a run


def measure(chapter):
    """[{case, method, alone: [step, exposed] by link, nodes: the same}] in ms."""
    found = []
    with tempfile.TemporaryDirectory(prefix="book_context_") as scratch:
        for number, case in enumerate(CASES):
            for method in runs.METHODS:
                say(f"book: {method}, {case['seq_len']} tokens, {case['num_kv_heads']} kv heads")
                recorded = train(chapter, Path(scratch) / f"{method}_{number}", RANKS,
                                 cp_size=RANKS, **{**SHAPE, **case}, **runs.by_method(method),
                                 steps=FEW, trace_steps=FEW)
                found.append({**case, "method": method, "step_ms": {
                    name: list(steady(on_links(recorded, link))) for name, link in LINKS.items()},
                    "nodes_ms": list(steady(on_links(recorded, *NODES, node_size=NODE_SIZE)))})
    return {"ranks": RANKS, "node_size": NODE_SIZE, "links": LINKS, "nodes": NODES, "runs": found}


def _of(measured, case, method):
    return next(found for found in measured["runs"] if found["method"] == method
                and all(found[name] == value for name, value in case.items()))


def _row(times):
    """Steps in ms, the shortest in bold."""
    return [f"**{step:.0f}**" if step == min(times) else f"{step:.0f}" for step in times]


def choices_table(measured):
    """Steps of each method: a column for each link of one node, and for nodes."""
    rows = []
    for case in CASES:
        found = [_of(measured, case, method) for method in runs.METHODS]
        across = [own["nodes_ms"] for own in found]
        rows.append([str(case["num_kv_heads"]), f"{case['seq_len']:,}",
                     *(", ".join(_row([own["step_ms"][name][0] for own in found]))
                       for name in measured["links"]),
                     ", ".join(_row([step for step, _ in across])),
                     ", ".join(f"{exposed:.0f}" for _, exposed in across)])
    links = ", ".join(f"{name} `{link}`" for name, link in measured["links"].items())
    methods = ", ".join(f"`{method}`" for method in runs.METHODS)
    return runs.table(["kv heads", "tokens", *measured["links"], "nodes", "of it exposed"], rows,
                      f"Milliseconds of a step: {methods}, the shortest in bold. {measured['ranks']} ranks "
                      f"with {SHAPE['num_heads']} heads, groups of {measured['node_size']}; replayed, a "
                      f"core for each. Links (us, GB/s): {links}; of nodes `{' '.join(measured['nodes'])}`.")
