"""Judge of ch02.ex4: the ledger of a step on two ranks."""

FLAGS = {"zero_stage": 2, "gather_overlap": "none", "grad_acc_steps": 4, "steps": 1,
         "sample_tokens": 0, "eval_samples": 0}
PARTS = 5  # of (n-1)/n of all parameters: gradients in 4 micro-batches, weights once


def measure(lab):
    """Bytes that rank 0 sends of gradients and weights."""
    ledger = lab.run("ch02", ranks=2, **FLAGS).read("ledger.json")
    return sum(ledger[f"dp.{kind}"]["wire_bytes"] for kind in ("reduce_scatter", "all_gather"))


def suspects(measured):
    """[(a wrong answer, its words)], by how often it lets half of all parameters travel."""
    of_step = (
        (2, "gradients travel in every micro-batch: a rank of stage 2 has no room for a sum of "
            "whole ones"),
        (4, "the updated weights are missing: they are gathered once"),
        (8, "it is stage 3 that gathers weights in every micro-batch: here they stay whole"),
        (9, "gradients are reduced to shards only: a reduce-scatter sends half of an all-reduce"),
        (10, "a rank sends (n-1)/n of a tensor, half of it on two ranks: its own part stays"),
        (1.25, "this counts numbers: one of f32 has 4 bytes"),
        (2.5, "one number of f32 has 4 bytes, not 2"))
    return [(measured * parts / PARTS, words) for parts, words in of_step]
