"""Judge of ch03.ex4: weights of a rank, for several numbers of kv heads."""

FLAGS = {"tp_size": 4, "num_heads": 8, "num_layers": 1}
ASKED, ONE_EACH, TWO_EACH = 2, 4, 8  # kv heads; on 4 ranks the last two are one and two a rank


def measure(lab):
    """Bytes of k_proj on one rank. Keys and values differ with kv heads, and are equally large."""
    of_kv_heads = {heads: lab.estimate("ch03", num_kv_heads=heads, **FLAGS)["simulated"]["weights"]
                   for heads in (ASKED, ONE_EACH, TWO_EACH)}
    one_head = (of_kv_heads[TWO_EACH] - of_kv_heads[ONE_EACH]) / 2
    return one_head + (of_kv_heads[ASKED] - of_kv_heads[ONE_EACH]) / 2


def suspects(measured):
    """[(a wrong answer, its words)], by how many kv heads of f32 it counts."""
    of_heads = (
        (1 / 2, "a kv head is not cut: 4 ranks hold 2 heads, so each of them is on two ranks"),
        (2, "this is k_proj whole, or keys and values: a rank holds one of two kv heads of keys"),
        (8, "this is the weight of 8 heads: keys have 2, and a rank holds one of them"),
        (1 / 4, "this counts numbers: one of f32 has 4 bytes"))
    return [(measured * heads, words) for heads, words in of_heads]
