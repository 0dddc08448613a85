"""The steps that this chapter estimates, of many models and sequences; the book's formulas."""
from tools.base import BookError, say
from tools.run.estimates import PARTS, estimate, find

MODES = ("none", "selective", "full")  # of --recompute
COMMON = {"micro_batch_size": 1, "dtype": "bf16", "grad_accumulation": "bf16", "attention": "naive"}
BY_MODEL = {"models": ("8B", "70B", "405B"), "seq_lens": (1024, 2048, 4096, 8192, 16384)}
BY_MODE = {"models": ("1B", "3B", "8B", "70B", "405B"), "seq_lens": (1024, 2048, 4096, 8192)}
# GPT-3 175B. SwiGLU's three matrices of 8/3 h have as many parameters as GPT's two of 4 h.
GPT3 = {"hidden_size": 12288, "num_layers": 96, "num_heads": 96, "num_kv_heads": 96,
        "ffn_hidden_size": 32768, "vocab_size": 51200, "seq_len": 2048}
LLAMA_1B = {"model": "1B", "dtype": "f32", "tie_word_embeddings": None, "seq_len": 1024,
            "micro_batch_size": 1}
# Llama 3.2 3B, which is no preset.
SHAPES = {"3B": {"hidden_size": 3072, "num_layers": 28, "num_heads": 24, "num_kv_heads": 8,
                 "ffn_hidden_size": 8192, "vocab_size": 128256}}
LARGER_BATCHES = (2, 4)  # micro-batch sizes of 8B, at the shortest sequence


def shape_of(model, seq_len, recompute="none", **more):
    """The flags of one case of the figures."""
    return {**SHAPES.get(model, {"model": model}), **COMMON, "seq_len": seq_len, "recompute": recompute, **more}


def wanted():
    """The flags of all cases, each once."""
    cases = [shape_of(model, seq_len) for model in BY_MODEL["models"]
             for seq_len in BY_MODEL["seq_lens"]]
    cases += [shape_of(model, seq_len, mode) for model in BY_MODE["models"] for mode in MODES
              for seq_len in BY_MODE["seq_lens"]]
    cases += [shape_of("8B", BY_MODE["seq_lens"][0], micro_batch_size=size)
              for size in LARGER_BATCHES]
    cases += [{**COMMON, **GPT3, "recompute": mode} for mode in MODES]
    cases.append(LLAMA_1B)
    return [case for number, case in enumerate(cases) if case not in cases[:number]]


def collect(program):
    """All cases that the figures and the claims need."""
    cases = wanted()
    say(f"book: estimating {len(cases)} training steps")
    return [estimate(program, flags) for flags in cases]


def book_per_layer(shape, mode):
    """The book's bytes of activations of one layer, in units of s b h."""
    quadratic = 5 * shape["num_heads"] * shape["seq_len"] / shape["hidden_size"]
    return {"none": 34 + quadratic, "selective": 34, "full": 2}[mode]


def token_channels(shape):
    """s b h: tokens in flight times the width of the residual stream."""
    return shape["seq_len"] * shape["micro_batch_size"] * shape["hidden_size"]


def llama_parameters(shape):
    """The number of parameters, from the shape alone."""
    hidden, ffn = shape["hidden_size"], shape["ffn_hidden_size"]
    kv_width = hidden // shape["num_heads"] * shape["num_kv_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * ffn + 2 * hidden
    embeddings = 1 if shape["tie_word_embeddings"] else 2
    return embeddings * shape["vocab_size"] * hidden + shape["num_layers"] * layer + hidden


def gpt_parameters(shape):
    """The book's formula: a GPT's matrices and norms, no learned positions."""
    h, layers = shape["hidden_size"], shape["num_layers"]
    return h * shape["vocab_size"] + layers * (12 * h * h + 13 * h) + 2 * h


def states_table(cases):
    """Weights, gradients and optimizer states of the figures' models, as Markdown."""
    rows = []
    for model in BY_MODE["models"]:
        case = find(cases, shape_of(model, BY_MODE["seq_lens"][0]))
        count, shape = case["parameters"], case["shape"]
        if count != llama_parameters(shape):
            raise BookError(f"{model} has {count} parameters, by its shape "
                            f"{llama_parameters(shape)}")
        found = sum(case["simulated"][part] for part in PARTS if part != "activations")
        rows.append(f"| {model} | {1e-9 * gpt_parameters(shape):.2f} | {1e-9 * count:.2f} | "
                    + " | ".join(f"{each * count / 2**30:,.0f}" for each in (16, 18, 20))
                    + f" | {found / 2**30:,.0f} |")
    return ("| model | Ψ of the book's formula, 10⁹ | Ψ of this Llama, 10⁹ | 16 Ψ, GiB | 18 Ψ, GiB | "
            "20 Ψ, GiB | dry run of a step, GiB |\n|---|---:|---:|---:|---:|---:|---:|\n"
            + "\n".join(rows) + "\n")
