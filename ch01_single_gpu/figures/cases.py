"""The steps that this chapter estimates, of many models and sequences; the book's formulas."""
from tools.base import say
from tools.estimates import estimate

MODES = ("none", "selective", "full")  # of --recompute
COMMON = {"micro_batch_size": 1, "dtype": "bf16", "grad_accumulation": "bf16", "attention": "naive"}
BY_MODEL = {"models": ("8B", "70B", "405B"), "seq_lens": (1024, 2048, 4096, 8192, 16384)}
BY_MODE = {"models": ("1B", "8B", "70B", "405B"), "seq_lens": (1024, 2048, 4096, 8192)}
# GPT-3 175B. SwiGLU's three matrices of 8/3 h have as many parameters as GPT's two of 4 h.
GPT3 = {"hidden_size": 12288, "num_layers": 96, "num_heads": 96, "num_kv_heads": 96,
        "ffn_hidden_size": 32768, "vocab_size": 51200, "seq_len": 2048}
LLAMA_1B = {"model": "1B", "dtype": "f32", "tie_word_embeddings": None, "seq_len": 1024,
            "micro_batch_size": 1}
LARGER_BATCHES = (2, 4)  # micro-batch sizes of 8B, at the shortest sequence


def shape_of(model, seq_len, recompute="none", **more):
    """The flags of one case of the figures."""
    return {"model": model, **COMMON, "seq_len": seq_len, "recompute": recompute, **more}


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
