"""How fast collectives are over more and more nodes, on emulated links: the shape of Fig5.1.

Ranks share this machine's cores, so links are slow enough for the cores to wait for them. A
bandwidth is what nccl-tests calls bus bandwidth: bytes that a rank sends, over the time.
"""
import json
import math
import statistics

from tools.base import say
from tools.bench.bench import run_quietly
from tools.book.short_runs import table
from tools.run import build, mpi
from tools.run.replay import parse_link

PROGRAM = "comm_bench"
KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
NODE_SIZE, NODES = 2, (1, 2, 4, 8)
NODE_LINK, NET_LINK = "node=20,0.04", "net=40,0.005"
BYTES, CALLS = 1 << 20, 20
LOW, HIGH = 0.05, 0.95  # of the band
# The book's medians in GB/s, 256 MB on nodes of 8 H100, by nodes.
BOOK = {"all_reduce": {1: 436.0, 2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9},
        "all_gather": {1: 249.8, 2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0},
        "reduce_scatter": {1: 249.7, 2: 181.6, 4: 115.8, 8: 68.6, 16: 54.5, 32: 27.9, 64: 11.1}}


def measure():
    """{node_size, links, found: [{nodes, ranks, bytes, of each kind [ms of a call]}]}"""
    program, found = str(build.binary(build.RELEASE, PROGRAM)), []
    for nodes in NODES:
        ranks = nodes * NODE_SIZE
        say(f"book: collectives over {nodes} nodes of {NODE_SIZE}")
        command = mpi.find().command(ranks, [
            program, "--node_size", str(NODE_SIZE), "--node_link", NODE_LINK, "--net_link", NET_LINK,
            "--large", str(BYTES), "--rounds", str(10 * CALLS)])
        found.append({"nodes": nodes,
                      **json.loads(run_quietly(command, ranks).splitlines()[-1])})
    return {"node_size": NODE_SIZE, "links": [NODE_LINK, NET_LINK], "found": found}


def sent(kind, ranks, size):
    """Bytes that a rank sends of a collective."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size


def bandwidths(case, kind):
    """GB/s of each call, sorted."""
    return sorted(sent(kind, case["ranks"], case["bytes"]) / (1e6 * ms) for ms in case[kind])


def quantile(values, share):
    """Of sorted values, the one that so large a share does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def spread(case, kind):
    """(5 %, median, 95 %)"""
    found = bandwidths(case, kind)
    return quantile(found, LOW), statistics.median(found), quantile(found, HIGH)


def formula(case, kind, node_size, links):
    """GB/s by the two links: a rank's parts for its node and those for others leave side by side,
    and an all-reduce does so twice."""
    link = dict(map(parse_link, links))
    part, ranks = case["bytes"] / case["ranks"], case["ranks"]
    us = max((there > 0) * (way.latency_us + way.transmission(there * part))
             for way, there in ((link["node"], min(ranks, node_size) - 1),
                                (link["net"], ranks - min(ranks, node_size))))
    times = 2 if kind == "all_reduce" else 1
    return sent(kind, ranks, case["bytes"]) / (1000 * times * us)


def change(measured, kind, before, after):
    """The median over so many nodes, over that over fewer."""
    medians = {case["nodes"]: spread(case, kind)[1] for case in measured["found"]}
    return medians[after] / medians[before]


def nodes_table(measured):
    """Bandwidths over nodes, measured and by formula."""
    rows = []
    for case in measured["found"]:
        row = [str(case["nodes"]), str(case["ranks"])]
        for kind in KINDS:
            low, median, high = (1000 * value for value in spread(case, kind))
            by_formula = 1000 * formula(case, kind, measured["node_size"], measured["links"])
            row += [f"{median:.1f} ({low:.1f}–{high:.1f})", f"{by_formula:.1f}"]
        rows.append(row)
    head = [text for name in KINDS.values() for text in (f"{name}, MB/s", "formula")]
    first = measured["found"][0]
    return table(["nodes", "ranks", *head], rows,
                 f"Bytes that a rank sends, over the time: medians of {len(first['all_reduce'])} calls with "
                 f"{first['bytes'] >> 20} MiB, in brackets 5 % and 95 %, on nodes of {measured['node_size']} and "
                 f"emulated links `{' '.join(measured['links'])}` (us, GB/s).")
