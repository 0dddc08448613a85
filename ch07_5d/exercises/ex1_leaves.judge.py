"""Judge of ch07.ex1: what rank 0 sends to the other node over tp."""

FLAGS = {"dp_size": 2, "tp_size": 2, "mesh_order": "tp,pp,cp,dp", "node_size": 2, "hidden_size": 64,
         "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 192, "num_layers": 2, "seq_len": 64,
         "micro_batch_size": 4, "steps": 1, "sample_tokens": 0, "eval_samples": 0}


def measure(lab):
    """Bytes that leave the node, of rank 0."""
    return lab.run("ch07", ranks=4, **FLAGS).read("ledger.json")["tp.all_reduce"]["net_bytes"]


def suspects(measured):
    """[(a wrong answer, its words)], as parts of the right one."""
    return [(measured * part, words) for part, words in (
        (2, "with two ranks an all-reduce sends 2 (n-1)/n = 1 times the tensor, not twice"),
        (1 / 2, "forward alone, or half of the tensor: a rank sends its half of the sum to be made, and then the half "
                "that it has summed"),
        (1 / 4, "numbers in place of bytes: f32 has 4 of them"),
        (0.8, "embedding and head have an all-reduce each, too"),
        (0.4, "embedding and head, too, and two all-reduces of a layer forward and two backward"))]
