"""The book's claims about expert parallelism, each beside what was found here."""
from tools.book.short_runs import table

from . import counts, hiding, memory, nodes, ways

EXACT = 1e-12  # relative difference of what is equal but for rounding in f64
NEARLY = 0.1   # of a message's time: what shows where it is hidden


def verdict(holds):
    return "yes" if holds else "**no**"


def claims_table(counted, estimated, numbers):
    """The claims of these numbers; counted: counts.json, estimated: memory.json."""
    rows = [["Q6.1", "experts on several ranks compute what one device does", *_same(counted)],
            ["Q6.2", "memory and work of the experts are divided by `ep`", *_divided(counted, estimated)],
            ["Q6.3", "two all-to-alls of a layer forward, two backward: routed tokens times `h`",
             *_messages(counted)],
            ["Q6.4", "a token goes to at most `M` nodes, and less leaves a node", *_nodes(counted)],
            ["Q6.5", "without data parallelism, `ep` ranks would repeat attention", *_repeated(estimated)]]
    return table(["", "the book", "expected", "found", "holds", "where"],
                 [row for row in rows if row[0] in numbers])


def _same(counted):
    largest = max(max(counts.differences(counted["losses"], name)) for name in counts.BALANCES)
    return ("0", f"at most {largest:.0e}", verdict(largest <= EXACT),
            f"how far losses and gradient norms of {len(counts.AGREEING) - 1} layouts are from one rank's: "
            f"{counts.STEPS} steps in f64, each `--balance`")


def _case(found, ep):
    return next(own for own in found if own["ep"] == ep)


def _divided(counted, estimated):
    ep = memory.EP[-1]
    one, many = (_case(estimated["ep"], size)["weights"] for size in (1, ep))
    rest = one - 2 * memory.expert_parameters(memory.MIXTRAL)
    weights = (one - rest) / (many - rest)
    as_counted = all(int(_case(counted["small"], own["ep"])[name]) == own[name]
                     for own in estimated["small"] for name in memory.STATES)
    work = _case(estimated["ep"], 1)["flops"] / _case(estimated["ep"], ep)["flops"]
    return (f"{ep}; {ep}", f"{weights:.2f}; {work:.2f}",
            f"memory {verdict(abs(weights / ep - 1) < 0.01 and as_counted)}, work "
            f"{verdict(abs(work / ep - 1) < 0.01)}",
            f"`ep` = 1 over `ep` = {ep}: Mixtral's shape on {ep} data-parallel ranks, which divide the batch "
            f"already. A small model agrees to the byte"
            + ("" if as_counted else ": **no**"))


def _messages(counted):
    own = next(case for case in counted["messages"] if case["k"] == 8 and case["ep"] == 4)
    layers, expected = memory.layers_with_experts(memory.SMALL), counts.message_bytes(4, 8)
    found = own["calls"] / layers
    return (f"4; {expected:,.0f}", f"{found:g}; {own['bytes']:,.0f}",
            verdict(found == 4 and own["bytes"] == expected),
            "operations of a layer, bytes of rank 0 in a step; `ep` = 4, each token to every expert")


def _nodes(counted):
    limited, free = (next(own for own in counted["nodes"] if own["allowed"] == allowed)
                     for allowed in (4, 8))
    once = limited["once"] / free["once"]
    rows = limited["rows"] / free["rows"]
    return ("4; below 1", f"{limited['most']}; {once:.2f}", verdict(limited["most"] <= 4 and once < 1),
            f"random scores, `M` = 4 of {counts.NODES} nodes; copies that leave a node, over those without `M`, "
            f"if a node gets one copy. With one for each choice: {rows:.2f}")


def _repeated(estimated):
    ep = memory.EP[-1]
    one, many = (_case(estimated["ep"], size)["flops"] for size in (1, ep))
    return ("1", f"{many / one:.2f}", verdict(abs(many / one - 1) < 0.01),
            f"a rank's work with `ep` and its own tokens, over its work without `ep`; if {ep} ranks had the "
            f"same tokens, they would do attention {ep} times")


def dispatch_table(on_their_way, on_nodes):
    """The claims about what hides rows and what shortens their way; of ways.json and nodes.json."""
    rows = [["Q6.4", "few nodes for a token: less leaves a node", *_between(on_nodes)],
            ["", "DualPipe hides the all-to-all nearly completely", *_under_computing(on_their_way)],
            ["", "`t_comm / t_compute = (EP-1) peak_flops / (12 num_experts hidden_size peak_bw)`",
             *_cheatsheet(on_their_way["ratio"])]]
    return table(["", "the book", "expected", "found", "holds", "where"], rows)


def _between(counted):
    shares = {}
    for way in nodes.WAYS:
        found = nodes.of_way(counted, way)
        shares[way] = found[0]["between"] / found[-1]["between"]
    return ("below 1", ", ".join(f"`{way}` {share:.2f}" for way, share in shares.items()),
            ", ".join(f"`{way}` {verdict(share < 0.9)}" for way, share in shares.items()),
            f"bytes between nodes by the ledgers, with 1 node for a token over those with {counted['nodes']}")


def _under_computing(measured):
    one, turns = (ways.find(measured, way) for way in ("one_by_one", "turns"))
    exposed = turns["rows_exposed_ms"] / turns["rows_ms"]
    return ("near 0", f"{one['rows_exposed_ms']:.0f} ms without turns, {turns['rows_exposed_ms']:.0f} with",
            verdict(exposed < NEARLY),
            f"how much of the {turns['rows_ms']:.0f} ms that rows travel is exposed, {100 * exposed:.0f} % with turns; "
            f"replayed on a link where they take {100 * ways.SHARE:.0f} % of a step")


def _cheatsheet(measured):
    over = []
    for own in measured["cases"]:
        bandwidth = 1e9 * measured["gb_per_s"]
        book = hiding.of_book(own["ranks"], own["experts"], hiding.SHAPE["hidden_size"],
                              1e9 * own["products_gflops"], bandwidth, hiding.VALUE_BYTES)
        over.append(own["comm_ms"] / own["compute_ms"] / book)
    return ("1", f"{min(over):.1f} to {max(over):.1f}", verdict(max(abs(x - 1) for x in over) < 0.25),
            "measured ratio over the book's, at the rate of the experts' products; from "
            "[the table of runs](measured.md#the-ratio-of-runs)")
