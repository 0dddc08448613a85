"""What the program says of large models without training them: with fused operations and without."""
from tools.book.short_runs import table
from tools.run import estimates

BASE = {"dtype": "bf16", "seq_len": 4096, "micro_batch_size": 1}
MODELS = ("1B", "8B", "70B")
KERNELS, RECOMPUTE = ("reference", "fused"), ("none", "full")
SHOWN = {"model": "8B", **BASE, "recompute": "full", "kernels": "fused"}
GIB = 1 << 30


def case(found):
    """Of an estimate, what the tables show."""
    saved = {}
    for entry in found["activations"]:
        saved[entry["name"]] = saved.get(entry["name"], 0) + entry["bytes"]
    return {"saved": found["predicted"]["activations"], "logits": saved.get("logits", 0),
            "product": saved.get("swiglu", 0), "peak": found["predicted"]["peak_activations"],
            "simulated": {name: found["simulated"][name] for name in ("activations", "peak_activations")},
            "vocab_size": found["config"]["vocab_size"],
            "flops": found["predicted"]["flops"], "recomputed_flops": found["predicted"]["recomputed_flops"]}


def estimate_all(program):
    return {"models": [
        {"model": model, "recompute": recompute, "kernels": kernels, **estimates.read(
            program, {"model": model, **BASE, "recompute": recompute, "kernels": kernels}, case)}
        for model in MODELS for recompute in RECOMPUTE for kernels in KERNELS]}


def shown(program):
    """The program's own words."""
    return estimates.output_of([str(program), "--estimate", *estimates.words_of(SHOWN)])


def gib(bytes_):
    return f"{bytes_ / GIB:.2f}"


def pairs(record):
    """(reference, fused) of each model and way to recompute."""
    rows = record["models"]
    return list(zip(rows[::2], rows[1::2]))


def problem_table(record):
    rows = [reference for reference, _ in pairs(record) if reference["model"] == "8B"]
    return table(("recomputation", "saved, GiB", "logits, GiB", "the MLPs' products, GiB", "share of the logits"), [
        (row["recompute"], gib(row["saved"]), gib(row["logits"]), gib(row["product"]),
         f"{100 * row['logits'] / row['saved']:.0f} %") for row in rows],
        f"Llama 3's 8B in bf16, a vocabulary of {rows[0]['vocab_size']:,}, one sample of 4,096 tokens, reference kernels: what "
        "forward leaves for backward, by `--estimate`.")


def memory_table(record):
    return table(("model, recomputation", "saved, GiB", "saved fused, GiB", "peak, GiB", "peak fused, GiB",
                  "peak fused, simulated", "fused over reference"), [
        (f"{a['model']}, {a['recompute']}", gib(a["saved"]), gib(b["saved"]), gib(a["peak"]), gib(b["peak"]),
         gib(b["simulated"]["peak_activations"]), f"{b['peak'] / a['peak']:.2f}") for a, b in pairs(record)],
        "Activations of one sample of 4,096 tokens in bf16: what is saved between forward and backward, the peak by formula, "
        "and the peak of a dry run. The last column divides the two peaks by formula.")


def cost_table(record):
    return table(("model", "work needed, TFLOP", "done again fused, TFLOP", "again over needed"), [
        (a["model"], f"{(a['flops'] - a['recomputed_flops']) / 1e12:.1f}",
         f"{(b['recomputed_flops'] - a['recomputed_flops']) / 1e12:.2f}",
         f"{100 * (b['recomputed_flops'] - a['recomputed_flops']) / (a['flops'] - a['recomputed_flops']):.1f} %")
        for a, b in pairs(record) if a["recompute"] == "none"],
        "Floating-point operations of one sample of 4,096 tokens: what the model needs, and the product with the vocabulary "
        "that a fused head carries out once more.")


def tables(record):
    return {"problem.md": problem_table(record), "memory.md": memory_table(record), "cost.md": cost_table(record)}
