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
ROUNDS = 3  # recordings of each, in turns


def measure(chapter):
    """[{case, method, step_ms: [[step, exposed] of each round] by link, nodes_ms: the same}]."""
    found = [{**case, "method": method, "step_ms": {name: [] for name in LINKS}, "nodes_ms": []}
             for case in CASES for method in runs.METHODS]
    with tempfile.TemporaryDirectory(prefix="book_context_") as scratch:
        for turn in range(ROUNDS):
            for number, of in enumerate(found):
                say(f"book: round {turn + 1}/{ROUNDS}: {of['method']}, {of['seq_len']} tokens, "
                    f"{of['num_kv_heads']} kv heads")
                case = {name: of[name] for name in ("num_kv_heads", "seq_len")}
                recorded = train(chapter, Path(scratch) / f"{number}_{turn}", RANKS,
                                 cp_size=RANKS, **{**SHAPE, **case}, **runs.by_method(of["method"]),
                                 steps=FEW, trace_steps=FEW)
                for name, link in LINKS.items():
                    of["step_ms"][name].append(list(steady(on_links(recorded, link))))
                of["nodes_ms"].append(list(steady(on_links(recorded, *NODES, node_size=NODE_SIZE))))
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
        across = [min(own["nodes_ms"]) for own in found]
        rows.append([str(case["num_kv_heads"]), f"{case['seq_len']:,}",
                     *(", ".join(_row([min(own["step_ms"][name])[0] for own in found]))
                       for name in measured["links"]),
                     ", ".join(_row([step for step, _ in across])),
                     ", ".join(f"{exposed:.0f}" for _, exposed in across)])
    links = ", ".join(f"{name} `{link}`" for name, link in measured["links"].items())
    methods = ", ".join(f"`{method}`" for method in runs.METHODS)
    return runs.table(["kv heads", "tokens", *measured["links"], "nodes", "of it exposed"], rows,
                      f"Milliseconds of a step: {methods}, the shortest in bold. {measured['ranks']} ranks "
                      f"with {SHAPE['num_heads']} heads, groups of {measured['node_size']}; replayed, a "
                      f"core for each; of {ROUNDS} recordings that with the shortest step, because what "
                      "disturbs a machine makes steps longer. Links (us, GB/s): "
                      f"{links}; of nodes `{' '.join(measured['nodes'])}`.")
