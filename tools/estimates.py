"""What a training step needs, on shapes alone: --estimate, for many models and sequences.

  flags        of the case, as the program got them; shape: what they come to
  predicted    bytes by the chapter's formulas, and operations of a step
  simulated    bytes that a step on shapes asked for, and its operations; activations: what forward
               leaves for backward
  book         bytes by the book's formulas, which are GPT's
  buffers      {name: its bytes} of communication, at their peaks: bytes that the step on shapes
               asked for, and predicted
  layer        {tensor: bytes} that one layer leaves for backward
"""
import json
import shlex
import tempfile
from pathlib import Path

from tools import machine
from tools.base import BookError, say
from tools.process import wait_for

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
SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "seq_len", "micro_batch_size", "tie_word_embeddings")
PARTS = ("weights", "gradients", "optimizer", "activations")


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


def is_offered(program):
    """Whether a chapter's program has --estimate."""
    held = []
    code, _ = wait_for([str(program), "--help"], None, held.append)
    return code == 0 and "--estimate_file" in "".join(held)


def output_of(command):
    """What a program on one rank prints. BookError if it fails, or if the launcher was told to
    stop: a training that is interrupted ends well."""
    held = []
    code, signals = wait_for(command, machine.thread_environment(), held.append)
    if signals:
        raise BookError("the measurement was interrupted", 128 + signals[0])
    if code != 0:
        raise BookError(f"`{shlex.join(command)}` ended with exit code {code}:\n{''.join(held)}")
    return "".join(held)


def words_of(flags):
    """The words of a command line; a flag whose value is None stands alone."""
    return [word for name, value in flags.items()
            for word in ([f"--{name}"] if value is None else [f"--{name}", str(value)])]


def estimate(program, flags):
    """One case: its flags, and of what the program says of it what the figures and tables use."""
    with tempfile.TemporaryDirectory(prefix="book_estimate_") as scratch:
        path = Path(scratch) / "estimate.json"
        command = [str(program), "--estimate", "--estimate_file", str(path), *words_of(flags)]
        output_of(command)
        try:
            return parse(flags, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BookError(f"`{shlex.join(command)}` wrote no estimate: "
                            f"{type(error).__name__}: {error}")


def parse(flags, found):
    """The case; KeyError, TypeError or ValueError where the estimate lacks what it should have."""
    # The first and the last block are the embedding and the head.
    layer = max(1, found["config"]["num_layers"] // 2)
    of_layer = {}
    for entry in found["activations"]:
        if entry["layer"] == layer:
            of_layer[entry["name"]] = of_layer.get(entry["name"], 0) + entry["bytes"]
    if not of_layer:
        raise ValueError(f"no activations of layer {layer}")
    return {"flags": flags, "parameters": found["parameters"],
            "shape": {name: found["config"][name] for name in SHAPE},
            "predicted": {name: found["predicted"][name] for name in (*PARTS, "flops")},
            "simulated": {name: found["simulated"][name]
                          for name in (*PARTS, "peak_total", "reserved", "flops")},
            "book": {name: found["book"][name]
                     for name in ("activations", "weights_gradients_optimizer")},
            "buffers": {entry["name"]: {name: entry[name] for name in ("bytes", "predicted")}
                        for entry in found.get("buffers", [])},
            "layer": of_layer}


def collect(program):
    """All cases that the figures and the claims need."""
    cases = wanted()
    say(f"book: estimating {len(cases)} training steps")
    return [estimate(program, flags) for flags in cases]


def find(cases, flags):
    """The case with exactly these flags; BookError if it was not collected."""
    for case in cases:
        if case["flags"] == flags:
            return case
    raise BookError(f"no estimate for {flags}; remake them with ./book figures")


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
