"""Judge of ch06.ex2: the ledger of a step on two ranks."""

FLAGS = {"num_experts": 8, "num_experts_per_tok": 8, "moe_ffn_hidden_size": 64, "ep_size": 2,
         "micro_batch_size": 4, "steps": 1, "sample_tokens": 0, "eval_samples": 0}


def measure(lab):
    """Bytes that rank 0 sends as rows, their outputs, and the gradients of both."""
    return lab.run("ch06", ranks=2, **FLAGS).read("ledger.json")["ep.all_to_all"]["wire_bytes"]


def suspects(measured):
    """[(a wrong answer, its words)], as parts of the right one."""
    return [(measured * part, words) for part, words in (
        (2, "half of the rows are for experts of the rank's own, and do not travel: (ep-1)/ep does"),
        (1 / 2, "rows travel to their experts and back, and so do gradients: four exchanges of a layer; "
                "a number of f32 has 4 bytes"),
        (1 / 8, "a token is a row for each of its choices: 8 times as many rows as tokens"),
        (1 / 4, "one exchange of four, or numbers in place of bytes: rows and outputs travel forward, "
                "and the gradients of both backward; or one layer of four"),
        (1 / 16, "one exchange of one layer: there are four of each"),
        (3 / 4, "outputs travel back, and have gradients, too: two exchanges forward, two backward"))]
