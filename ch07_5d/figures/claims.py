"""The book's claims about combining dimensions, each beside what was found here."""
from tools.book.short_runs import table

from . import equal, memory

EXACT = 1e-10


def verdict(holds):
    return "yes" if holds else "**no**"


def claims_table(counted, estimated):
    return table(["", "the book", "expected", "found", "holds", "where"],
                 [["Q7.1", "any combination computes what one device does", *_same(counted)],
                  ["Q7.2", "the degrees multiply to the ranks, and ranks of `tp` are neighbors", *_groups(counted)],
                  ["Q7.3", "each dimension divides what it shards, and nothing else", *_divided(estimated)]])


def _same(counted):
    largest = max(map(equal.difference, counted["compositions"]))
    return ("0", f"at most {largest:.0e}", verdict(largest <= EXACT),
            f"losses and gradient norms of {equal.STEPS} steps in f64, of {len(counted['compositions'])} compositions "
            "in several orders")


def _groups(counted):
    shown = counted["layout"]
    ranks = len(shown["ranks"])
    product = 1
    for axis in ("pp", "dp", "cp", "tp"):
        product *= 1 + max(at[axis] for at in shown["ranks"])
    tp = next(kind for kind in shown["groups"] if kind["name"] == "tp")
    apart = max(group[-1] - group[0] for group in tp["ranks"])
    return (f"{ranks}; 1; 1", f"{product}; {apart}; {tp['nodes']}",
            verdict(product == ranks and apart == 1 and tp["nodes"] == 1),
            "product of the degrees, distance of two ranks of `tp`, nodes of a group: by `--mesh_show json`")


def _divided(estimated):
    found = estimated["memory"]

    def share(way, name, length=memory.LENGTHS[0]):
        return (memory.of(found, "none", length)["simulated"][name]
                / memory.of(found, way, length)["simulated"][name])

    zero, cp = share("DP 8, ZeRO-3", "weights"), share("CP 8", "activations")
    kept = share("CP 8", "weights")
    return ("8; 8; 1", f"{zero:.2f}; {cp:.2f}; {kept:.2f}",
            verdict(abs(zero / 8 - 1) < 0.01 and abs(cp / 8 - 1) < 0.05 and kept == 1),
            "weights by ZeRO-3, activations by `cp`, weights by `cp`; `cp` in the book's figure divides activations by 64")


