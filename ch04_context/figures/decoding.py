"""A text that grows under context parallelism: what a token sends, counted, and what caches hold."""
from . import runs

CP = (1, 2, 4)
SHAPE = {**runs.SHAPE, "seq_len": 256, "micro_batch_size": 1, "dp_size": 1}
TOKENS = (16, 32, 128)  # of the samples; two differences
BYTES = 4


def values_of_a_token(cp):
    """What a rank sends of out and lse, in values."""
    return SHAPE["num_layers"] * (cp - 1) * (SHAPE["hidden_size"] + SHAPE["num_heads"])


def cache_bytes(cp):
    """Keys and values that a rank has room for."""
    channels = SHAPE["hidden_size"] // SHAPE["num_heads"]
    return (SHAPE["num_layers"] * -(-SHAPE["seq_len"] // cp) * 2 * SHAPE["num_kv_heads"] * channels
            * BYTES)


def count(program):
    """[{cp, sent: bytes of a token, among the first ones and later}]."""
    found = []
    for cp in CP:
        sent = [runs.run(program, cp, **SHAPE, cp_size=cp, steps=2, sample_tokens=tokens)[1].get(
            "cp.all_gather", {"wire_bytes": 0})["wire_bytes"] for tokens in TOKENS]
        found.append({"cp": cp, "sent": [(after - before) / (more - few) for few, more, before, after
                                         in zip(TOKENS, TOKENS[1:], sent, sent[1:])]})
    return found


def table(found):
    """What a cache holds and a token sends."""
    rows = []
    for case in found:
        cp = case["cp"]
        rows.append([str(cp), f"{cache_bytes(cp):,}", f"{BYTES * values_of_a_token(cp):,}",
                     *(f"{size:,.0f}" for size in case["sent"])])
    return runs.table(["`cp`", "cache of a rank, by formula", "sent for a token, by formula",
                       f"counted, tokens {TOKENS[0]} to {TOKENS[1]}",
                       f"tokens {TOKENS[1]} to {TOKENS[2]}"], rows,
                      f"Bytes of rank 0, a small model in f32 with {SHAPE['num_heads']} heads and "
                      f"{SHAPE['num_kv_heads']} kv heads, room for {SHAPE['seq_len']} tokens.")
