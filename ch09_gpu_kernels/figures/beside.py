"""What the emulator counts of the product's rungs, beside the metrics of Nsight Compute that count the same on a card."""
from tools.base import ROOT
from tools.book.short_runs import table
from tools.lab import on_card
from tools.lab.labs import LABS

from .labs import PRODUCT, SECTOR, STALLS, cell, markdown

NOT_MEASURED = "not measured"
# By what a rung asks, as its source says: the way in, then the way out.
WAYS_IN, WAYS_OUT = (("boxes in", "tma_load_2d("), ("cp.async", "cp_async_"), ("loads", "")), (
    ("boxes out", "tma_store_2d("), ("stores", ""))
OF_SECTORS = ("loads", "stores")
# (counted by the emulator, the metrics, why a card's count may be another)
COUNTS = (
    ("bytes of `loads`, `stores`", ("loads", "stores"),
     "`nvcc` may merge accesses, or leave some out; both count before any cache"),
    ("bytes of `cp.async`", ("cp.async",), "we know of no reason: such copies bypass the L1, and are counted as they leave the L2"),
    ("bytes of `boxes in`, `boxes out`", ("boxes in", "boxes out"),
     "at tails the emulator takes each box as a whole, and a card need not fetch what lies outside the matrix"),
    ("sectors/load", ("sectors/load",), "as for the bytes of loads; copies by `cp.async` and boxes are no loads"),
    ("conflicts", ("conflicts",), "the emulator calculates them from addresses, a card counts the turns that its load-store unit "
                                  "took; neither sees the copy engine or `wgmma` at the banks"),
    ("not counted", ("memory, read", "memory, written"), "caches serve what another block has brought already, and may still hold "
                                                         "what was written when the kernel is over, so a card counts fewer bytes"))
OF_STALLS = "the emulator has no clock; it counts the requests that warps queue for, [in part 5](#5-predict-then-measure)"

def ways(rung):
    """(way in, way out) of a rung of the product, by the copies that its source makes."""
    text = (ROOT / LABS[PRODUCT].source / f"{rung}.cu").read_text(encoding="utf-8")
    return tuple(next(name for name, call in known if call in text) for known in (WAYS_IN, WAYS_OUT))


def counters_table(record):
    """Each rung's counts, and a column for what a card's profiler counts."""
    rows = []
    for rung in record["rungs"]:
        way_in, way_out = ways(rung["name"])
        loads = way_in == "loads"
        rows.append([rung["name"], f"`{way_in}`, `{way_out}`", cell(rung["bytes"]), NOT_MEASURED,
                     cell(rung["sectors_per_load"]) if loads else "", NOT_MEASURED if loads else "",
                     cell(rung["bank_conflicts"]), NOT_MEASURED])
    m, n, k = record["size"]
    return markdown(f"c [{m}, {n}] = a [{m}, {k}] b, each rung launched once.",
                    ["rung", "copies by", "bytes, emulator", "bytes, profiler", "sectors/load, emulator",
                     "sectors/load, profiler", "conflicts, emulator", "conflicts, profiler"], rows)


def metrics_table():
    """Which metrics stand for a count, as ./book lab asks for them, and where the two differ."""
    def named(key):
        return (f"{SECTOR} × " if key in OF_SECTORS else "") + f"`{on_card.ACCESSES[key]}`"
    rows = [(what, ", ".join(map(named, keys)), why) for what, keys, why in COUNTS]
    stalls = ", ".join(f"`{metric}`" for metric in on_card.METRICS[LABS[STALLS].profiled])
    return table(("emulator", "Nsight Compute", "why a card may count otherwise"), [*rows, ("not counted", stalls, OF_STALLS)],
                 "Not measured: no card was at hand.")


def texts(data):
    return {"counters.md": counters_table(data[PRODUCT]), "metrics.md": metrics_table()}
