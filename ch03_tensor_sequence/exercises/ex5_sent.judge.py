"""Judge of ch03.ex5: the ledger of a step under sequence parallelism."""

FLAGS = {"tp_size": 2, "sequence_parallel": None, "steps": 1, "sample_tokens": 0,
         "eval_samples": 0}
UNITS = 45  # of (t-1)/t s b h values: 4 layers of 10, embedding 2, head 3


def measure(lab):
    """Bytes that rank 0 sends over tp."""
    ledger = lab.run("ch03", ranks=2, **FLAGS).read("ledger.json")
    return sum(entry["wire_bytes"] for name, entry in ledger.items() if name.startswith("tp."))


def suspects(measured):
    """[(a wrong answer, its words)], by the units that it counts."""
    of_step = (
        (36, "these are the bytes without sequence parallelism: inputs are gathered again in "
             "backward"),
        (44, "the head is a linear layer, too: it gathers its input again in backward"),
        (42, "the embedding's two messages or the head's three are missing"),
        (43, "the embedding's two messages or the head's three are missing"),
        (40, "these are the layers alone: embedding and head send as well"),
        (53, "a region gathers one input again, not two: queries, keys and values have the same"),
        (90, "a gather or reduce-scatter sends (t-1)/t of a tensor, half of it on two ranks"),
        (22.5, "one number of f32 has 4 bytes, not 2"),
        (11.25, "this counts numbers: one of f32 has 4 bytes"))
    return [(measured * units / UNITS, words) for units, words in of_step]
