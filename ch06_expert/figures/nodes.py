"""What experts on several nodes are sent, between nodes and inside of them: by the nodes that a token
may go to, and by the way of dispatch. Ledgers of ranks that are threads count; no clock runs.
"""
import re

from tools import build
from tools.short_runs import table
from tools.showcase import output_of

EXAMPLE = "node_traffic"  # prints what is read here
WAYS = {"direct": "a copy for each expert", "by_node": "a copy for each node"}
COLUMNS = ("between", "between_formula", "inside", "inside_formula")  # KiB


def count(chapter):
    """read() of what the example of this chapter prints; it has to be built."""
    return read(output_of(build.binary(build.RELEASE, f"{chapter.name}_{EXAMPLE}"), [], 1))


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
    return table(["nodes of a token", "`dispatch`", "between nodes, KiB", "inside nodes, KiB"], rows,
                 f"A layer, forward and backward, on {measured['nodes']} nodes of "
                 f"{measured['node_size']} ranks; {measured['experts']} experts, {measured['k']} of a "
                 "token. Sums over all ranks of what ledgers count: rows, gates, choices and counts; the "
                 "formula in brackets where it differs.")
