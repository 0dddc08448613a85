"""Judge of ch04.ex4: the ledger of a step of one block and one micro-batch."""

FLAGS = {"cp_size": 8, "cp_method": "ulysses", "num_heads": 8, "num_kv_heads": 2, "num_layers": 1,
         "steps": 1, "sample_tokens": 0, "eval_samples": 0}
RANKS = 8
HEADS = 64  # of a rank's rows, of which (u-1)/u travel: 24 + 8 forward, 8 + 24 backward


def measure(lab):
    """Bytes that rank 0 sends in exchanges of tokens for heads."""
    ledger = lab.run("ch04", ranks=RANKS, **FLAGS).read("ledger.json")
    return ledger["cp_heads.all_to_all"]["wire_bytes"]


def suspects(measured):
    """[(a wrong answer, its words)], by how many heads it lets travel."""
    of_heads = (
        (40, "a kv head is counted once: 8 ranks read 2 of them, so each goes to 4 ranks"),
        (52, "in backward, too, a kv head is counted as often as it was sent: each copy has a "
             "gradient of its own"),
        (32, "this is forward or backward alone, or counts 2 bytes: a number of f32 has 4"),
        (48, "the outputs travel, too: back to the ranks of their rows, and their gradients again"),
        (64 * 8 / 7, "a rank keeps the eighth that is for itself: (u-1)/u travels"),
        (16, "these are q and the outputs alone: keys and values travel, too"),
        (64 * 8, "this is what all 8 ranks send"),
        (64 / 4, "this counts numbers: one of f32 has 4 bytes"))
    return [(measured * heads / HEADS, words) for heads, words in of_heads]
