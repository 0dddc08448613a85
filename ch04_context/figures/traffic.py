"""What a layer sends over cp, by method: counted by the ledger, beside formulas.

Two runs that differ by one layer differ by what a layer sends. More ranks than RUN_CP are not run:
the program takes their dry runs, and its ledger counts what rank 0 would send.
"""
from tools.run import estimates

from . import runs

LAYERS = (2, 3)
CP = (2, 4, 8, 16, 32, 64)
RUN_CP = 8
STEPS = 2
BYTES = 4  # of a value: f32
NODE = 8   # the largest group that exchanges tokens for heads under ring_ulysses
# Heads for all ranks; tokens that divide into the pieces of all.
SHAPE = {"num_heads": 64, "num_kv_heads": 8, "hidden_size": 256, "ffn_hidden_size": 64,
         "seq_len": 256, "micro_batch_size": 1, "dp_size": 1}
# Operations over cp: communicator and kind.
KINDS = ("cp_ring.send", "cp_ring_gradients.send", "cp_ring.all_gather", "cp_ring.reduce_scatter",
         "cp_heads.all_to_all")


def group_size(method, cp):
    """Ranks that exchange tokens for heads."""
    return {"ulysses": cp, "ring_ulysses": min(NODE, cp // 2)}.get(method, 1)


def flags_of(method, cp):
    """How the program is told; None where a ring of groups is a ring."""
    if method != "ring_ulysses":
        return {"cp_size": cp, "cp_method": method}
    u = group_size(method, cp)
    return {"cp_size": cp, "cp_method": method, "ulysses_size": u} if u > 1 else None


def messages(method, cp):
    """{kind: operations} of a layer and micro-batch, forward and backward, by formula."""
    u = group_size(method, cp)
    n = cp // u
    found = dict.fromkeys(KINDS, 0)
    if method == "all_gather":
        found.update({"cp_ring.all_gather": 2, "cp_ring.reduce_scatter": 1})
    elif n > 1:
        found.update({"cp_ring.send": 2 * (n - 1), "cp_ring_gradients.send": n - 1})
    if u > 1:
        found["cp_heads.all_to_all"] = 4
    return found


def values(method, cp, shape):
    """What a rank sends of a layer and micro-batch, in values, by formula."""
    u = group_size(method, cp)
    n, rows = cp // u, shape["micro_batch_size"] * shape["seq_len"] // cp
    a, a_kv = shape["num_heads"], shape["num_kv_heads"]
    d = shape["hidden_size"] // a
    keys = u * rows * 2 * max(1, a_kv // u) * d  # of the group's rows, the kv heads of a rank
    exchanged = rows * (a + 2 * max(a_kv, u)) * d + rows * a * d
    return 3 * (n - 1) * keys + 2 * (u - 1) * exchanged // u


def count(program):
    """[{method, cp, run, messages, sent}] of a layer."""
    found = []
    for method in runs.METHODS:
        for cp in CP:
            flags = flags_of(method, cp)
            if flags is None:
                continue
            few, more = (_ledger(program, cp, {**SHAPE, **flags, "num_layers": layers})
                         for layers in LAYERS)
            found.append({"method": method, "cp": cp, "run": cp <= RUN_CP,
                          "messages": {kind: more[kind][0] - few[kind][0] for kind in KINDS},
                          "sent": sum(more[kind][1] - few[kind][1] for kind in KINDS)})
    return found


def ledger(program):
    """The names of the messages of a run under Ulysses."""
    cp = CP[0]
    return sorted(runs.run(program, cp, **SHAPE, **flags_of("ulysses", cp), num_layers=LAYERS[0], steps=STEPS)[1])


def _ledger(program, cp, flags):
    """{communicator.kind: (operations, bytes)} of rank 0 in a step."""
    none = dict.fromkeys(KINDS, (0, 0))
    if cp > RUN_CP:
        return {**none, **estimates.read(program, flags, estimates.sent)}
    ledger = runs.run(program, cp, **flags, steps=STEPS)[1]
    return {**none, **{name: (entry["calls"] / STEPS, entry["wire_bytes"] / STEPS)
                       for name, entry in ledger.items()}}


def messages_table(cases):
    """Operations of a layer: a row for each number of ranks, and a column for each method."""
    rows = []
    for cp in CP:
        row = [str(cp)]
        for method in runs.METHODS:
            case = [case for case in cases if (case["method"], case["cp"]) == (method, cp)]
            if not case:
                row.append("")
                continue
            kinds = [kind for kind in KINDS if messages(method, CP[-1])[kind] > 0
                     or case[0]["messages"][kind] > 0]
            counted = [f"{case[0]['messages'][kind]:.4g}" for kind in kinds]
            predicted = [str(messages(method, cp)[kind]) for kind in kinds]
            row.append(f"{' + '.join(counted)} ({' + '.join(predicted)})")
        rows.append(row + ["run" if cp <= RUN_CP else "dry run"])
    return runs.table(["`cp`", *(f"`{method}`" for method in runs.METHODS), "ranks"], rows,
                      "Operations of rank 0 for a layer and a micro-batch, by the ledger (by formula). A "
                      "ring: keys on + gradients on. A gather: all-gathers + reduce-scatters. Ulysses: "
                      f"all-to-alls, also in groups of half of the ranks, at most {NODE}.")


def sent_table(cases):
    """Bytes of a layer."""
    rows = []
    for cp in CP:
        row = [str(cp)]
        for method in runs.METHODS:
            case = [case for case in cases if (case["method"], case["cp"]) == (method, cp)]
            if not case:
                row.append("")
                continue
            predicted, counted = BYTES * values(method, cp, SHAPE), case[0]["sent"]
            row.append(f"{predicted:,} · {counted / predicted:.4f}")
        rows.append(row + ["run" if cp <= RUN_CP else "dry run"])
    return runs.table(["`cp`", *(f"`{method}`" for method in runs.METHODS), "ranks"], rows,
                      "Bytes that rank 0 sends for a layer and a micro-batch by formula, and what the "
                      "ledger counted over that. The model is a small one in f32, of "
                      f"{SHAPE['num_heads']} heads and {SHAPE['num_kv_heads']} kv heads, and groups of "
                      f"`ring_ulysses` have at most {NODE} ranks.")
