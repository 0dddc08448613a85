"""Judge of ch06.ex7: dry runs of two models that differ by a layer."""

WIDTH, HEADS = 7168, 128
FLAGS = {"attention_kind": "mla", "hidden_size": WIDTH, "num_heads": HEADS, "q_lora_rank": 1536,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "ffn_hidden_size": 1, "seq_len": 16, "micro_batch_size": 1}


def measure(lab):
    """Parameters of a layer's attention and of the norms of its latents."""
    one, two = (lab.estimate("ch06", **FLAGS, num_layers=layers)["parameters"] for layers in (1, 2))
    return two - one - 3 * WIDTH - 2 * WIDTH


def suspects(measured):
    """[(a wrong answer, its words)]"""
    out, expanded = HEADS * 128 * WIDTH, 512 * HEADS * 256
    queries, shortened = WIDTH * HEADS * 192, WIDTH * 1536 + 1536 * HEADS * 192
    return [(measured - out, "attention has a matrix behind it: o_proj reads the values of all heads"),
            (measured - shortened + queries,
             "queries come from a latent of their own: two narrow matrices in place of a wide one"),
            (measured + 512 * HEADS * 64, "the rotated piece does not come from the latent: kv_b_proj makes "
             "128 + 128 channels of a head"),
            (measured - expanded, "keys and values of all heads are made of the latent: kv_b_proj has weights, "
             "though decoding lends them to the query"),
            (measured - expanded - WIDTH * 576 + 2 * WIDTH * HEADS * 128,
             "keys and values are not made of x: of x comes the latent, and of that all heads")]
