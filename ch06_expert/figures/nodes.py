"""What experts on several nodes are sent, between nodes and inside of them: by the nodes that a token
may go to, and by the way of dispatch. Ledgers of ranks that are threads count bytes. Runs are replayed on
two kinds of links, with a core for every rank.
"""
import json
import re
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import on_links, steady, train
from tools.book.short_runs import table
from tools.book.showcase import output_of
from tools.run import build

from . import ways

EXAMPLE = "node_traffic"  # prints what is read here
WAYS = {"direct": "a copy for each expert", "by_node": "a copy for each node"}
COLUMNS = ("between", "between_formula", "inside", "inside_formula")  # KiB
# The runs: nodes of the example, a small model, links.
RANKS, NODE_SIZE, ALLOWED = 8, 2, (1, 2, 4)
SHAPE = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2, "seq_len": 128,
         "ffn_hidden_size": 128, "num_experts": 64, "num_experts_per_tok": 8,
         "moe_ffn_hidden_size": 32, "expert_nodes": RANKS // NODE_SIZE, "ep_size": RANKS,
         "node_size": NODE_SIZE, "micro_batch_size": 1, "steps": 9, "trace_steps": 9}
NODE_LINK, NET = "node=20,1", (40, 0.05)  # us, GB/s
MIB = 2**20


def output(chapter):
    """What the example of this chapter prints; it has to be built."""
    return output_of(build.binary(build.RELEASE, f"{chapter.name}_{EXAMPLE}"), [], 1)


def read(text):
    """{nodes, node_size, experts, k, found: [{route_nodes, dispatch, COLUMNS}]} of the output."""
    head, _, *lines = text.splitlines()
    numbers = re.match(r"(\d+) nodes of (\d+) ranks, (\d+) experts, (\d+) of a token", head).groups()
    found = []
    for line in lines:
        route_nodes, dispatch, *columns = line.split()
        found.append({"route_nodes": int(route_nodes), "dispatch": dispatch,
                      **dict(zip(COLUMNS, map(float, columns)))})
    return {**dict(zip(("nodes", "node_size", "experts", "k"), map(int, numbers))), "found": found}


def measure(chapter):
    """[{route_nodes, dispatch, between, inside: bytes of rank 0 in a step, step_ms, rows_ms}]"""
    found = []
    for allowed in ALLOWED:
        for dispatch in WAYS:
            say(f"book: experts on {RANKS // NODE_SIZE} nodes, a token on {allowed}, {dispatch}")
            with tempfile.TemporaryDirectory(prefix="book_nodes_") as scratch:
                found.append({"route_nodes": allowed, "dispatch": dispatch, **_measure(
                    chapter, Path(scratch) / "run", route_nodes=allowed, dispatch=dispatch)})
    return found


def _measure(chapter, run_dir, **flags):
    recorded = train(chapter, run_dir, RANKS, **SHAPE, **flags)
    laid_out = on_links(recorded, NODE_LINK, "net={:g},{:g}".format(*NET), node_size=NODE_SIZE)
    ledger = json.loads((run_dir / "ledger.json").read_text(encoding="utf-8"))
    sent = [entry for name, entry in ledger.items()
            if ways.is_of_rows(name) and name.endswith("all_to_all")]
    net = sum(entry["net_bytes"] for entry in sent) / SHAPE["steps"]
    return {"between": round(net),
            "inside": round(sum(entry["wire_bytes"] for entry in sent) / SHAPE["steps"] - net),
            "step_ms": round(steady(laid_out)[0], 3), "rows_ms": round(ways.of_rows(laid_out)[1], 3)}


def slow_link_ms(own):
    """What its bytes between nodes take there."""
    return own["between"] / NET[1] / 1e6


def steps_table(measured):
    """Bytes of a rank and what they cost, by the nodes of a token and the way of dispatch."""
    rows = [[str(own["route_nodes"]), f"`{own['dispatch']}`", f"{own['between'] / MIB:.2f}",
             f"{own['inside'] / MIB:.2f}", f"{slow_link_ms(own):.1f}", f"{own['rows_ms']:.1f}",
             f"{own['step_ms']:.0f}"] for own in measured]
    return table(["nodes of a token", "`--dispatch`", "between nodes, MiB", "inside, MiB",
                  "slow link alone, ms", "rows exposed, ms", "step, ms"], rows,
                 f"MiB are what rank 0 of {RANKS} sends in a step, by the ledger, in nodes of {NODE_SIZE} ranks; exposed "
                 "times are means over ranks. "
                 f"Replayed on `{NODE_LINK}` and `net={NET[0]:g},{NET[1]:g}` (us, GB/s), a core for each rank.")


def of_way(measured, dispatch):
    """Of one way of dispatch, by the nodes of a token."""
    return [case for case in measured["found"] if case["dispatch"] == dispatch]


def nodes_table(measured):
    """KiB of a layer, counted; formulas where they differ."""
    rows = []
    for case in measured["found"]:
        row = [str(case["route_nodes"]), f"`{case['dispatch']}`"]
        for link in ("between", "inside"):
            counted, formula = case[link], case[f"{link}_formula"]
            row.append(f"{counted:.1f}" if counted == formula else f"{counted:.1f} ({formula:.1f})")
        rows.append(row)
    exact = all(case[link] == case[f"{link}_formula"] for case in measured["found"]
                for link in ("between", "inside"))
    return table(["nodes of a token", "`--dispatch`", "between nodes, KiB", "inside nodes, KiB"], rows,
                 f"A layer, forward and backward, on {measured['nodes']} nodes of "
                 f"{measured['node_size']} ranks; {measured['experts']} experts, {measured['k']} of a "
                 "token. Sums over all ranks of what ledgers count: rows, gates, choices and counts; "
                 + ("each is what the formula says." if exact else
                    "the formula in brackets where it differs."))
