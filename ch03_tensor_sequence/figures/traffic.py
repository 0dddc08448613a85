"""Messages and bytes that a layer costs, counted: Tab3.1, Q3.3 and Q3.4.

Two runs that differ by one layer differ by what a layer sends.
"""
from . import runs

LAYERS = (2, 3)
RANKS = (2, 4)
STEPS, SAMPLES = 2, 2
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
BYTES = 4  # of a value: f32
NORMS = 2  # of a layer
RECOMPUTED = {"recompute": "full"}
# {way: ({kind: messages forward}, {kind: messages backward})} of a layer: two regions.
FORWARD = {"tensor": {"all_reduce": 2}, "kept": {"all_gather": 2, "reduce_scatter": 2},
           "again": {"all_gather": 2, "reduce_scatter": 2}}
BACKWARD = {"tensor": {"all_reduce": 2}, "kept": {"all_gather": 2, "reduce_scatter": 2},
            "again": {"all_gather": 4, "reduce_scatter": 2}}
SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # in (tp-1)/tp of the values
# What full recomputation sends once more of a forward pass: all but the last sum of a block.
SKIPPED = {"tensor": "all_reduce", "kept": "reduce_scatter", "again": "reduce_scatter"}


def messages(way, recompute=False):
    """{kind: messages} of a layer and micro-batch, by formula."""
    counts = {kind: FORWARD[way].get(kind, 0) + BACKWARD[way].get(kind, 0) for kind in KINDS}
    if recompute:
        for kind, count in FORWARD[way].items():
            counts[kind] += count - (kind == SKIPPED[way])
    return counts


def units(counts):
    """What they send, in units of (tp-1)/tp · s b h values."""
    return sum(SENT[kind] * count for kind, count in counts.items())


def _of_activations(ledger):
    """{kind: (calls, wire bytes)} of the communicator tp in a step."""
    return {kind: tuple(ledger.get(f"tp.{kind}", {"calls": 0, "wire_bytes": 0})[what] / STEPS
                        for what in ("calls", "wire_bytes")) for kind in KINDS}


def count(program):
    """[{way, ranks, recompute, messages, sent}] of a layer."""
    cases = [(way, ranks, {}) for ranks in RANKS for way in runs.WAYS]
    cases += [(way, RANKS[0], RECOMPUTED) for way in runs.WAYS]
    found = []
    for way, ranks, flags in cases:
        few, more = (_of_activations(runs.run(
            program, ranks, **{**runs.SHAPE, "num_layers": layers}, steps=STEPS, tp_size=ranks,
            micro_batch_size=SAMPLES, **runs.WAYS[way], **flags)[1]) for layers in LAYERS)
        found.append({"way": way, "ranks": ranks, "recompute": bool(flags),
                      "messages": {kind: more[kind][0] - few[kind][0] for kind in KINDS},
                      "sent": sum(more[kind][1] - few[kind][1] for kind in KINDS)})
    return found


def ledger(program):
    """The names of the messages of a run with sequence parallelism, inputs gathered again."""
    return sorted(runs.run(program, RANKS[0], **runs.SHAPE, steps=STEPS, tp_size=RANKS[0],
                           micro_batch_size=SAMPLES, **runs.WAYS["again"])[1])


def values():
    """s b h of these runs."""
    return SAMPLES * runs.SHAPE["seq_len"] * runs.SHAPE["hidden_size"]


def norm_bytes(case):
    """Under sequence parallelism the gradients of the layer's two norms are summed over tp too."""
    tp = case["ranks"]
    own = 2 * (tp - 1) / tp * NORMS * runs.SHAPE["hidden_size"] * BYTES
    return 0 if case["way"] == "tensor" else own


def counted_units(case):
    """Sent by a layer, as the ledger has it, in units of (tp-1)/tp · s b h values."""
    tp = case["ranks"]
    return (case["sent"] - norm_bytes(case)) / (BYTES * values()) * tp / (tp - 1)


def messages_table(cases):
    """Messages of a layer, forward and backward together."""
    rows = []
    for case in cases:
        if case["recompute"] or (case["way"], case["ranks"]) == ("kept", RANKS[-1]):
            continue  # the table is long enough
        predicted = messages(case["way"])
        predicted["all_reduce"] += NORMS * (case["way"] != "tensor")
        rows.append([runs.WAY_NAMES[case["way"]], str(case["ranks"]),
                     *(f"{case['messages'][kind]:.4g} ({predicted[kind]})" for kind in KINDS)])
    return runs.table(["", "`tp`", *(kind.replace("_", "-") + "s" for kind in KINDS)], rows,
                      "Messages of rank 0 for a layer and a micro-batch, counted by the ledger; in "
                      "brackets predicted. All-reduces under sequence parallelism are the sums of "
                      "the two norms' gradients, once a step.")


def sent_table(cases):
    """Bytes of a layer."""
    rows = []
    for case in cases:
        predicted = units(messages(case["way"], case["recompute"]))
        found = counted_units(case)
        name = runs.WAY_NAMES[case["way"]] + (", full recomputation" if case["recompute"] else "")
        rows.append([name, str(case["ranks"]), str(predicted), f"{found:.3f}",
                     f"{found / predicted:.4f}"])
    return runs.table(["", "`tp`", "by formula", "counted", "ratio"], rows,
                      "Values that rank 0 sends for a layer and a micro-batch, in units of "
                      "(tp-1)/tp · s b h. The sum of the norms' gradients, 2 h values a layer and "
                      "step, is left out.")
