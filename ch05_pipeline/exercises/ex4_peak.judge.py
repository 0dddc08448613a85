"""Judge of ch05.ex4: the peaks of rank 0 in two runs of one step."""

FLAGS = {"pp_size": 4, "grad_acc_steps": 10, "micro_batch_size": 2, "steps": 1,
         "sample_tokens": 0, "eval_samples": 0}
RANKS = 4
SAVED = 6  # micro-batches that rank 0 holds under AFAB, and not under 1F1B


def measure(lab):
    """By how many bytes the activations of rank 0 peak higher under AFAB than under 1F1B."""
    peaks = [lab.run("ch05", ranks=RANKS, pp_schedule=name, **FLAGS).read("memory.json")
             ["peak_bytes"]["activations"] for name in ("afab", "1f1b")]
    return peaks[0] - peaks[1]


def suspects(measured):
    """[(a wrong answer, its words)], by the micro-batches that it counts."""
    of_step = (
        (10, "this is what AFAB holds: 1F1B holds something, too"),
        (4, "this is what 1F1B holds on rank 0: how much more is it under AFAB?"),
        (9, "it is the last rank that holds one micro-batch under 1F1B: rank 0 has to wait for "
            "gradients of p - 1 ranks"),
        (7, "rank 0 holds p micro-batches under 1F1B: p - 1 forward passes run ahead, and one more "
            "comes before the first backward"),
        (5, "rank 0 holds p micro-batches under 1F1B, not p + 1: each further forward pass comes "
            "after a backward pass"),
        (6 * 4, "this counts all 4 layers: a rank holds what its own one saves"),
        (6 / 4, "this is a quarter of it: a number of f32 has 4 bytes, and rank 0 has a whole "
                "layer"),
        (6 * 2, "this is twice of it: a micro-batch has 2 samples, 512 tokens in all"),
        (6 / 2, "this is half of it: a micro-batch has 2 samples, 512 tokens in all"))
    return [(measured * count / SAVED, words) for count, words in of_step]
