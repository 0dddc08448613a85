"""The book's claims about pipeline parallelism, each beside what was found here."""
from tools.book.short_runs import table

from . import counts, memory, nodes, planned, scaling

EXACT = 1e-12  # relative difference of what is equal but for rounding in f64
CLOSE = 1e-5   # of a simulated bubble from a formula's


def verdict(holds):
    return "yes" if holds else "**no**"


def claims_table(simulated, counted, estimated, numbers, data):
    """The claims of these numbers; simulated: schedules.json, counted: counts.json, estimated:
    memory.json, data: all of them by name. One whose data are not there yet is left out."""
    rows = [_row("Q5.1", "bubble: `p-1` naive, `(p-1)/m`, interleaved `(p-1)/(v m)`",
                 _bubbles(simulated)),
            _row("Q5.2", "the 24 bubbles of the figure", _all_bubbles(simulated)),
            _row("Q5.3", "AFAB keeps activations of `m` micro-batches, 1F1B of `p`", _kept(counted)),
            _row("Q5.4", "states fall by `p`, activations stay", _memory(estimated)),
            _row("Q5.5", "every schedule has the gradients of one rank", _same(counted)),
            _row("Q5.6", "from 8 to 16 ranks, beyond a node, a pipeline loses 14.9 %, `tp` 42.7 %",
                 _boundary(data.get("scaling"))),
            _row("Q5.7", "`m` = `p-1` gives about half of the tokens/s of `m` = 32 with `p` = 2",
                 _few(data.get("scaling"))),
            _row("Q5.8", "`v` stages on a rank send `v` times as much", _sent(simulated)),
            _row("Q5.9", "bandwidth of an all-reduce halves from 2 to 4 nodes; that of an all-gather "
                 "falls with every doubling", _nodes(data.get("nodes"))),
            _row("Q5.10", "W may wait; ZB-H1 idles less than 1F1B, ZB-H2 not at all", _waits(simulated)),
            _row("Q5.11", "a message has `s b h` values, however many layers", _values(counted))]
    return table(["", "the book", "expected", "found", "holds", "where"],
                 [row for row in rows if row[0] in numbers and row[2:]])


def _row(name, claim, cells):
    return [name, claim, *cells]


def _plane(simulated, name):
    return next(own for own in simulated["plane"] if own["name"] == name)


def _bubbles(simulated):
    p, m = planned.PLANE_RANKS, planned.PLANE_MICRO_BATCHES
    expected = (p - 1, *(planned.book_bubble(p, m, v) for v in (1, 1, 2)))
    found = [_plane(simulated, name)["bubble"]
             for name in ("naive", "afab", "1f1b", "interleaved, v = 2")]
    return (", ".join(f"{value:.3g}" for value in expected),
            ", ".join(f"{value:.3g}" for value in found),
            verdict(max(abs(a - b) for a, b in zip(expected, found)) < CLOSE),
            f"simulated: naive, AFAB, 1F1B, interleaved with `v` = 2; `p` = {p}, `m` = {m}")


def _all_bubbles(simulated):
    p = planned.BOOK_RANKS
    same = [case for case in simulated["bubbles"]
            if abs(case["bubble"] - planned.book_bubble(p, case["m"], case["v"])) < CLOSE]
    others = [case for case in simulated["bubbles"] if case not in same]
    by_ours = all(abs(case["bubble"] - planned.bubble(p, case["m"], case["v"])) < CLOSE
                  for case in simulated["bubbles"])
    few = all(case["m"] < p and case["v"] > 1 for case in others)
    return (str(len(simulated["bubbles"])), str(len(same)), verdict(not others),
            f"simulated. The other {len(others)} have fewer micro-batches than ranks, and `v` above 1"
            if few and by_ours else "simulated")


def _kept(counted):
    def peak(name, m):
        return next(own["peak"] for own in counted["peaks"]
                    if (own["schedule"], own["m"]) == (name, m))
    p, m = memory.SMALL_RANKS, memory.MICRO_BATCHES[-1]
    grows, stays = peak("afab", m) / peak("afab", p), peak("1f1b", m) / peak("1f1b", p)
    return (f"{m / p:g}; 1", f"{grows:.2f}; {stays:.2f}",
            verdict(abs(grows / (m / p) - 1) < 0.05 and abs(stays - 1) < 0.01),
            f"peak of rank 0 with `m` = {m} over that with `m` = {p}, on {p} ranks")


def _memory(estimated):
    one, many = (memory.find_book(estimated["book"], case, 4096)
                 for case in ("1", "8, 4 layers each"))
    expected = sum(memory.BOOK_STATES[1]) / sum(memory.BOOK_STATES[8])
    states = sum(one[name] for name in memory.STATES) / sum(many[name] for name in memory.STATES)
    activations = many["peak_activations"] / one["peak_activations"]
    return (f"{expected:.2f}; 1", f"{states:.2f}; {activations:.2f}",
            verdict(abs(states / expected - 1) < 0.01 and abs(activations - 1) < 0.1),
            "8B on one rank and on rank 0 of 8 with 4 layers each: states, over; activations, under. "
            "Not 8: the embedding lies on one rank")


def _same(counted):
    largest = counts.largest_difference(counted["losses"])
    return ("0", f"at most {largest:.0e}", verdict(largest <= EXACT),
            f"relative difference of losses and gradient norms over {counts.STEPS} steps in f64, of "
            f"{len(counted['losses']) - 1} layouts from one rank: all schedules, also beside `dp`, "
            "`tp`, `cp`")


def _boundary(record):
    if record is None:
        return ()
    measured = record["scaling"]
    ours = {way: scaling.loss(scaling.rates(measured, way)) for way in ("few", "many", "tp")}
    book = scaling.BOOK_LOSS
    by_bubble = scaling.loss({p: scaling.expected("many", p) for p in (8, 16)})
    return (f"{book} %; {scaling.BOOK_TP_LOSS} %", f"{ours['few']:.1f} %; {ours['tp']:.1f} %",
            verdict(ours["few"] / ours["tp"] <= 1.2 * book / scaling.BOOK_TP_LOSS),
            f"replayed on emulated nodes of {measured['node_size']}, `m` = `p-1`; it holds where `pp` "
            f"loses as little beside `tp`, which has {scaling.SHAPE['num_layers']} layers and "
            f"{scaling.MANY * scaling.SHAPE['seq_len']:,} tokens. With `m` = {scaling.MANY} the bubble alone costs "
            f"{by_bubble:.1f} %, found {ours['many']:.1f} %")


def _few(record):
    if record is None:
        return ()
    measured = record["scaling"]
    book = scaling.BOOK["few"][2] / scaling.BOOK["many"][2]
    found = scaling.rates(measured, "few")[2] / scaling.rates(measured, "many")[2]
    formula = scaling.expected("few", 2) / scaling.expected("many", 2)
    return (f"{book:.2f}", f"{found:.2f}", verdict(abs(found / book - 1) < 0.15),
            f"replayed with a core for each rank; by `(p-1)/m`: {formula:.2f}")


def _nodes(record):
    if record is None:
        return ()
    measured, last = record["nodes"], nodes.NODES[-1]
    book, gathered = nodes.BOOK["all_reduce"], nodes.BOOK["all_gather"]
    found = nodes.change(measured, "all_reduce", 2, 4), nodes.change(measured, "all_gather", 1, last)
    expected = book[4] / book[2], gathered[last] / gathered[1]
    falls = all(nodes.change(measured, "all_gather", before, after) < 1
                for before, after in zip(nodes.NODES, nodes.NODES[1:]))
    return (f"{expected[0]:.2f}; falls, {expected[1]:.2f} from 1 to {last} nodes",
            f"{found[0]:.2f}; {'falls' if falls else 'does not'}, {found[1]:.2f}",
            verdict(abs(found[0] / expected[0] - 1) < 0.15 and falls),
            f"emulated nodes of {measured['node_size']}: links that nobody else uses. The book's "
            "bandwidths fall by more than the share of bytes that leaves the node explains; what else "
            "slows its links, ours do not have")


def _sent(simulated):
    p, v = planned.PLANE_RANKS, 2
    found = (_plane(simulated, f"interleaved, v = {v}")["messages"]
             / _plane(simulated, "1f1b")["messages"])
    exact = (v * p - 1) / (p - 1)
    return (str(v), f"{found:.2f}", verdict(abs(found / v - 1) < 0.1),
            f"messages of all ranks, `p` = {p}. Exactly `(v p - 1)/(p - 1)` = {exact:.2f}: the last "
            "rank sends to the first, too")


def _waits(simulated):
    found = [_plane(simulated, name) for name in ("1f1b", "zb_h1", "zb_h2")]
    one, h1, h2 = (own["inner_bubble"] for own in found)
    return ("less; 0", f"{h1:.3f} and {h2:.3f}, 1F1B {one:.3f}", verdict(h1 < one and abs(h2) < CLOSE),
            "simulated, F = B = W, each rank from its own first action to its own last; gradients: Q5.5")


def _values(counted):
    found = {own["bytes"] / own["calls"] / counts.VALUE_BYTES for own in counted["messages"]}
    return (f"{counts.message_values():,}", ", ".join(f"{size:,.0f}" for size in sorted(found)),
            verdict(found == {float(counts.message_values())}),
            "values in a message, of models of 8 and of 16 layers")
