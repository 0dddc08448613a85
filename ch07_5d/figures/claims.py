"""The book's claims about combining dimensions, each beside what was found here."""
from tools.book.short_runs import table

from . import equal, memory, placed

EXACT = 1e-10


def verdict(holds):
    return "yes" if holds else "**no**"


def claims_table(counted, estimated, layer):
    """layer: what placed.mapped() prints."""
    return table(["", "the book", "expected", "found", "holds", "where"],
                 [["Q7.1", "any combination computes what one device does", *_same(counted)],
                  ["Q7.2", "the degrees multiply to the ranks, and ranks of `tp` are neighbors", *_groups(counted)],
                  ["Q7.3", "each dimension divides what it shards, and nothing else", *_divided(estimated)],
                  ["Q7.4", "the shapes in a layer with every dimension", *_shapes(layer)]])


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


def _shapes(layer):
    """Of attention, of what lies between two products' regions, and of the experts' weights."""
    sizes = {axis: placed.MAPPED[f"{axis}_size"] for axis in ("dp", "cp", "tp", "ep")}
    samples, tokens = placed.MAPPED["micro_batch_size"], placed.MAPPED["seq_len"] // sizes["cp"]
    attention, of_all = placed.shapes_in(layer, "attention_forward")
    added, _ = placed.shapes_in(layer, "add")
    experts, *_ = placed.shapes_in(layer, "grouped_linear_forward", "gate_proj")
    expected = [[samples, tokens, of_all[2] // sizes["tp"], of_all[3]],
                [samples * tokens // sizes["tp"], added[1]],
                [placed.MAPPED["num_experts"] // sizes["ep"], *experts[1:]]]
    found = [attention, added, experts]
    return ("; ".join(map(str, expected)), "; ".join(map(str, found)), verdict(found == expected),
            "attention, residual, weights of experts: by `--mesh_show shapes`")
