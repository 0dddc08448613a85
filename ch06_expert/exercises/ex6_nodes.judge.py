"""Judge of ch06.ex6: the ledger of a step on four ranks, two nodes."""

FLAGS = {"num_experts": 8, "num_experts_per_tok": 8, "moe_ffn_hidden_size": 64, "ep_size": 4,
         "node_size": 2, "dispatch": "by_node", "micro_batch_size": 2, "steps": 1,
         "sample_tokens": 0, "eval_samples": 0}


def measure(lab):
    """Bytes that rank 0 sends to the other node as copies, sums, and the gradients of both."""
    return lab.run("ch06", ranks=4, **FLAGS).read("ledger.json")["ep_rail.all_to_all"]["net_bytes"]


def suspects(measured):
    """[(a wrong answer, its words)], as parts of the right one."""
    return [(measured * part, words) for part, words in (
        (4, "a copy for each of the 4 experts there: that is `direct`; by node one copy goes, and is "
            "handed on inside"),
        (8, "a copy for each expert, also for those of the own node: none of that crosses by node"),
        (2, "the copy for the own node does not cross: one of two does"),
        (1 / 2, "copies go there and sums come back, and both have gradients: four exchanges of a layer"),
        (1 / 4, "one exchange of four, or one layer of four; or numbers in place of bytes"),
        (1 / 16, "one exchange of one layer: there are four of each"))]
