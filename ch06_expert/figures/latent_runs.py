"""Small models of as many parameters, whose attention caches more or less of a position: losses, memory
of training, and the cache while a text is continued."""
import tempfile

from tools.base import say
from tools.book.short_runs import run, table
from tools.book.showcase import output_of, rows_of
from tools.run import estimates
from tools.run.estimates import words_of

from . import latent
from .balance import spread

MIB = 2**20
MODEL = {"hidden_size": 192, "num_layers": 4, "num_heads": 6, "seq_len": 128, "micro_batch_size": 4}
STEPS, SEEDS, EVAL_SAMPLES = 300, (1, 2, 3), 256
FFN = 512  # of latent attention; the others' MLPs are wider by what their attention has less
WIDTH = 32  # of a head
MLA = {"attention_kind": "mla", "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
       "v_head_dim": 32}
SAMPLE, SAMPLE_LINES = "A sample of what it learnt:", 3  # as the program says; that and what follows
HEADS = {"MHA": 6, "GQA": 2, "MQA": 1}  # of keys and values


def attention_weights(kind):
    """Of a layer."""
    h, heads = MODEL["hidden_size"], MODEL["num_heads"]
    if kind != "MLA":
        return 2 * h * WIDTH * (heads + HEADS[kind])
    c, nope, rope, v = latent.widths(MLA)
    return (h * heads * (nope + rope) + h * (c + rope) + c + c * heads * (nope + v)
            + heads * v * h)


def flags_of(kind):
    """Of a model of as many parameters as the one with latent attention."""
    less = attention_weights("MLA") - attention_weights(kind)
    ffn = FFN + round(less / (3 * MODEL["hidden_size"]))
    own = MLA if kind == "MLA" else {"num_kv_heads": HEADS[kind]}
    return {**MODEL, **own, "ffn_hidden_size": ffn}


KINDS = (*HEADS, "MLA")


def cached_numbers(kind):
    """Of a position in a layer."""
    return 2 * HEADS[kind] * WIDTH if kind in HEADS else MLA["kv_lora_rank"] + MLA[
        "qk_rope_head_dim"]


def cache_bytes(kind):
    return MODEL["num_layers"] * MODEL["seq_len"] * cached_numbers(kind) * latent.F32


def measure(program):
    """[{kind, seed, loss: [of each step], val_loss}]"""
    found = []
    for kind in KINDS:
        for seed in SEEDS:
            say(f"book: training the small model: {kind}, seed {seed}")
            records, _ = run(program, 1, **flags_of(kind), steps=STEPS, seed=seed,
                             eval_interval=STEPS, eval_samples=EVAL_SAMPLES)
            found.append({"kind": kind, "seed": seed,
                          "loss": [round(float(record["loss"]), 4) for record in records[9::10]],
                          "val_loss": round(float(records[-1]["val_loss"]), 5)})
    return found


def demo(program):
    """What the model with latent attention has learnt, and how it continues a text from its cache."""
    flags = {**flags_of("MLA"), "steps": STEPS, "eval_interval": STEPS, "eval_samples": EVAL_SAMPLES,
             "sample_tokens": 120, "trace_steps": 0}
    with tempfile.TemporaryDirectory(prefix="book_latent_") as scratch:
        text = output_of(program, words_of({**flags, "run_dir": f"{scratch}/run"}))
    sample = text[text.index(SAMPLE):].rstrip().splitlines()
    return rows_of(text, ("validation loss",)) + "\n".join(sample[:SAMPLE_LINES]) + "\n"


def estimate_all(program):
    """Parameters, and what a step leaves of activations at most, by a dry run."""
    return [{"kind": kind, **estimates.read(program, flags_of(kind), lambda own: {
        "parameters": own["parameters"], "peak": own["simulated"]["peak_activations"]})}
            for kind in KINDS]


def count(program):
    """The same in a run, and the cache of a text that is continued."""
    found = []
    for kind in KINDS:
        records, _ = run(program, 1, **flags_of(kind), steps=2)
        cache = latent.say_of_cache(program, {**flags_of(kind), "while_sampling": None})
        found.append({"kind": kind, "peak": int(records[-1]["peak_bytes"]["activations"]),
                      "cache": cache["cache while sampling"]})
    return found


def losses_of(runs, kind):
    return [own["val_loss"] for own in runs if own["kind"] == kind]


def memory_table(estimated, counted):
    """The cache while sampling, and activations of training."""
    rows = []
    for kind in KINDS:
        own, said = latent.find(counted, kind=kind), latent.find(estimated, kind=kind)
        rows.append([kind, str(cached_numbers(kind)), f"{own['cache']:,} ({cache_bytes(kind):,})",
                     f"{own['peak'] / MIB:.2f} ({said['peak'] / MIB:.2f})"])
    return table(["", "numbers of a position in a layer", "cache while sampling, bytes",
                  "activations of training, at most, MiB"], rows,
                 f"{MODEL['num_layers']} layers of {MODEL['hidden_size']} channels and {MODEL['num_heads']} "
                 f"heads, f32; a cache of {MODEL['seq_len']} positions. In brackets: the cache by formula, activations "
                 "by a dry run.")


def losses_table(estimated, runs):
    """Validation losses of models of as many parameters."""
    rows = [[kind, str(cached_numbers(kind)), str(flags_of(kind)["ffn_hidden_size"]),
             f"{latent.find(estimated, kind=kind)['parameters']:,}", spread(losses_of(runs, kind))]
            for kind in KINDS]
    above = "; ".join(f"{kind} above {', '.join(lower)}" for kind, lower in apart(runs).items())
    return table(["", "numbers of a position in a layer", "`h_ff`", "parameters", "validation loss"],
                 rows, f"After {STEPS} steps of {MODEL['micro_batch_size']} samples; in brackets the lowest and "
                 f"the highest of {len(SEEDS)} seeds. MLPs make up for what attention has less. Ranges without "
                 f"overlap: {above or 'none'}.")


def apart(runs):
    """{kind: those of which every loss is lower than each of its own}; the others differ by noise."""
    found = {kind: [other for other in KINDS
                    if min(losses_of(runs, kind)) > max(losses_of(runs, other))] for kind in KINDS}
    return {kind: lower for kind, lower in found.items() if lower}
