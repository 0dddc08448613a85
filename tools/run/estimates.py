"""What a chapter's program says without training: --estimate, read back.

  flags        of the case, as the program got them; shape: what they come to
  predicted    bytes by the chapter's formulas, and operations of a step
  simulated    bytes that a dry run asked for, and its operations; activations: what forward
               leaves for backward
  book         bytes by the book's formulas, which are GPT's
  buffers      {name: its bytes} of communication, at their peaks: bytes that the dry run
               asked for, and predicted
  layer        {tensor: bytes} that one layer leaves for backward
"""
import json
import shlex
import tempfile
from pathlib import Path

from tools import machine
from tools.base import BookError
from tools.process import wait_for

SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "seq_len", "micro_batch_size", "tie_word_embeddings")
PARTS = ("weights", "gradients", "optimizer", "activations")


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
    return read(program, flags, lambda found: parse(flags, found))


def read(program, flags, parse_all):
    """parse_all(what the program says of these flags)."""
    with tempfile.TemporaryDirectory(prefix="book_estimate_") as scratch:
        path = Path(scratch) / "estimate.json"
        command = [str(program), "--estimate", "--estimate_file", str(path), *words_of(flags)]
        output_of(command)
        try:
            return parse_all(json.loads(path.read_text(encoding="utf-8")))
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


def sent(found):
    """{communicator.kind: (operations, bytes sent)} of rank 0 in a step, as an estimate has them."""
    steps = found["sent"]["steps"]
    return {name: (entry["calls"] / steps, entry["wire_bytes"] / steps)
            for name, entry in found["sent"]["ledger"].items()}


def find(cases, flags):
    """The case with exactly these flags; BookError if it was not collected."""
    for case in cases:
        if case["flags"] == flags:
            return case
    raise BookError(f"no estimate for {flags}; remake them with ./book figures")


def largest(peak, limit):
    """The largest size whose peak(size) is within the limit, 0 if that of 1 is not. From some size
    on the peak grows by as much with each; it is asked for again where that line leads."""
    if peak(1) > limit:
        return 0

    def where(low, high):
        rise = peak(high) - peak(low)
        return int(low + (limit - peak(low)) * (high - low) / rise) if rise > 0 else 2 * high

    low, high = 1, 2
    while peak(high) <= limit:
        low, high = high, max(high, where(low, high)) + 1
    while high - low > 1:
        middle = min(max(where(low, high), low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low
