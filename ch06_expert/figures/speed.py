"""What `./book bench` says of experts: a layer of them beside a dense one with as much work for a token,
and ranks that shard them beside ranks that have them all.

The runs that are compared take turns. Models have the widths of the bench's A and B, and few layers, for
it is layers that are compared.
"""
import array
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.bench import CONFIGS, DTYPES, SKIPPED_STEPS
from tools.bench.steady import train
from tools.book.rounds import measure_again, with_range
from tools.book.short_runs import table
from tools.look import runs
from tools.look import trace as traces

EXPERTS, CHOSEN, RANKS = 8, 2, 2
GOALS = {"layer": 0.75, "ep": 0.9}
# Tokens of bytes, so that the head is a small part of a step.
LAYERS, VOCABULARY = 2, 256
SEGMENTS = {"dense": ("mlp",), "mixture": ("dispatch", "experts", "combine")}
PROBED_STEPS, LEAST_STEPS, MOST_STEPS = 2, 2, 50
RANDOM_TOKENS, RANDOM_COUNT = "random.bin", 1 << 20


def mixture(config, experts=EXPERTS):
    """Flags of experts of which a token meets CHOSEN, together as wide as the dense MLP."""
    return {"num_experts": experts, "num_experts_per_tok": CHOSEN,
            "moe_ffn_hidden_size": config["ffn_hidden_size"] // CHOSEN}


# What every chapter measures, with experts.
MODELS = {name: {**config, **mixture(config)} for name, config in CONFIGS.items()}


def _flags(name, dtype):
    return {**CONFIGS[name], "num_layers": LAYERS, "vocab_size": VOCABULARY, "dtype": dtype}


def _cases(name, dtype, scratch):
    """{case: (kind, ranks, flags)}: on one rank the dense model, then experts on text and on random
    bytes; then experts on ranks that all have them and on ranks that shard them, on text and
    where every token goes to every expert."""
    config = _flags(name, dtype)
    shared = {**config, "micro_batch_size": config["micro_batch_size"] // RANKS}
    experts, all_chosen = mixture(config), mixture(config, CHOSEN)
    # As much as no training: what it has learned would make experts of some bytes.
    spread = {"data": scratch / RANDOM_TOKENS, "token_dtype": "uint16", "lr": 1e-9}
    return {"dense": ("dense", 1, config),
            "text": ("mixture", 1, {**config, **experts}),
            "random": ("mixture", 1, {**config, **experts, **spread}),
            **{f"{way}_{ep}": ("mixture", RANKS, {**shared, **flags, "ep_size": ep})
               for way, flags in (("text", experts), ("all", all_chosen)) for ep in (1, RANKS)}}


def write_random_tokens(folder):
    """Bytes as ids of 16 bits: as bytes they would be no text, which no run takes."""
    ids = array.array("H", list(random.Random(0).randbytes(RANDOM_COUNT)))
    if sys.byteorder != "little":
        ids.byteswap()
    (folder / RANDOM_TOKENS).write_bytes(ids.tobytes())


def measure(chapter, seconds, rounds):
    """{experts: [{config, dtype, rounds: [{case: _summary()}]}]}"""
    found = []
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        scratch = Path(scratch)
        write_random_tokens(scratch)
        models = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
        steps = {model: _steps_for(seconds, _run(
            chapter, scratch, PROBED_STEPS, *_cases(*model, scratch)["text"])["step_ms"])
            for model in models}
        found = [{"config": name, "dtype": dtype, "rounds": []} for name, dtype in models]

        def measured(model):
            return {case: _run(chapter, scratch, SKIPPED_STEPS + steps[model], *what)
                    for case, what in _cases(*model, scratch).items()}

        for number in range(rounds):
            for model, own in zip(models, found):
                say(f"book: round {number + 1}/{rounds}  {' '.join(model)}: experts beside a dense "
                    "MLP, and divided over ep")
                own["rounds"].append(measured(model))
        for model, own in zip(models, found):
            measure_again(own["rounds"], " ".join(model), _ratios, lambda model=model: measured(model))
    return {"experts": found}


def _ratios(found):
    """Of one round, what is printed with the range of the rounds."""
    own = {"rounds": [found]}
    ratios = {"layer": layer_ratio(own, "text"), "random": layer_ratio(own, "random"),
              "step": step_ratio(own, "text", "dense"),
              **{way: step_ratio(own, f"{way}_{RANKS}", f"{way}_1") for way in ("text", "all")}}
    return {name: ratio["median"] for name, ratio in ratios.items()}


def _steps_for(seconds, step_ms):
    """Each of the cases of a model measures for a fraction of the time, for there are many."""
    return max(LEAST_STEPS, min(MOST_STEPS, round(seconds * 1000 / 5 / step_ms)))


def _run(chapter, scratch, steps, kind, ranks, flags):
    """Medians of rank 0's later steps, of which the last is never left out."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run_dir = Path(folder) / "run"
        recorded = train(chapter, run_dir, ranks, **flags, steps=steps, trace_steps=steps)
        records, _ = runs.read_metrics(run_dir)
    skipped = min(SKIPPED_STEPS, steps - 1)
    own = list(traces.steps(recorded).items())[skipped:]
    layer_ms = [sum(span.duration for span in recorded.ranks[0].spans
                    if span.step == step and span.category == "phase"
                    and span.name in SEGMENTS[kind]) / 1000 for step, _ in own]
    step_ms = statistics.median((shares[0].end - shares[0].begin) / 1000 for _, shares in own)
    found = {"step_ms": step_ms, "layer_ms": statistics.median(layer_ms),
             "tokens_per_s": 1000 * flags["micro_batch_size"] * flags["seq_len"] * ranks / step_ms}
    if kind == "mixture":
        layers = [layer["tokens"] for record in records[skipped:] for layer in record["experts"]]
        found["load"] = statistics.fmean(over_mean(tokens) for tokens in layers)
        found["load_of_rank"] = statistics.fmean(over_mean(of_ranks(tokens)) for tokens in layers)
    return found


def over_mean(counts):
    """The largest over the mean."""
    return max(counts) * len(counts) / sum(counts)


def of_ranks(tokens):
    """Of the tokens of each expert, those of each rank that shards them."""
    here = len(tokens) // RANKS
    return [sum(tokens[first:first + here]) for first in range(0, len(tokens), here)]


def spread_of(values):
    """Median, lowest and highest."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def layer_ratio(own, case):
    """Tokens/s of a layer with experts over those of the dense one: of the rounds."""
    return spread_of(r["dense"]["layer_ms"] / r[case]["layer_ms"] for r in own["rounds"])


def step_ratio(own, case, base):
    """Tokens/s of steps over those of another case: of the rounds."""
    return spread_of(r[case]["tokens_per_s"] / r[base]["tokens_per_s"] for r in own["rounds"])


def _median(own, case, measure_):
    return statistics.median(r[case][measure_] for r in own["rounds"])


def _cell(ratio):
    return with_range(ratio["median"], ratio["min"], ratio["max"])


def layer_table(record):
    """Layers of experts beside dense ones, as Markdown."""
    rows = [[f"{own['config']} {own['dtype']}", f"{_median(own, 'dense', 'layer_ms'):.1f}",
             f"{_median(own, 'text', 'layer_ms'):.1f}", _cell(layer_ratio(own, "text")),
             f"{_median(own, 'text', 'load'):.1f}", _cell(layer_ratio(own, "random")),
             f"{_median(own, 'random', 'load'):.1f}", _cell(step_ratio(own, "text", "dense"))]
            for own in record["experts"]]
    return table(["", "dense, ms", "experts, ms", "tokens/s of the layer over dense", "load",
                  "with random bytes", "load", "tokens/s of the step over dense"], rows,
                 f"{EXPERTS} experts, `k` = {CHOSEN}, each 1/{CHOSEN} as wide as the dense MLP; one "
                 f"rank, {LAYERS} layers of the widths of A and B. Milliseconds of all layers in a "
                 "step, medians of rounds; ratios of runs in turns, their median with the lowest and "
                 "the highest. Load: of the fullest expert, over the mean.")


def ep_table(record):
    """Ranks that shard experts beside ranks that do not, as Markdown."""
    rows = []
    for own in record["experts"]:
        label = f"{own['config']} {own['dtype']}"
        for way, title in (("text", f"{EXPERTS}"), ("all", f"{CHOSEN}, both chosen by all")):
            rows.append([label, title, f"{_median(own, f'{way}_1', 'tokens_per_s'):,.0f}",
                         f"{_median(own, f'{way}_{RANKS}', 'tokens_per_s'):,.0f}",
                         _cell(step_ratio(own, f"{way}_{RANKS}", f"{way}_1")),
                         f"{_median(own, f'{way}_{RANKS}', 'load_of_rank'):.2f}"])
    return table(["", "experts", "tokens/s, `ep` = 1", f"`ep` = {RANKS}", "ratio",
                  "rows of the fuller rank"], rows,
                 f"{RANKS} ranks of one thread, the same models and batch. Rows over their mean.")


def lines(record):
    """Both tables, for bench.md."""
    if "experts" not in record:
        return []
    return ["", *layer_table(record).splitlines(), "", *ep_table(record).splitlines()]


def page(record):
    """What stands on the page: ratios, or what measures them."""
    if "experts" not in record:
        return "Not measured yet: `./book bench ch06 --json ch06_expert/figures/bench.json`.\n"
    shared, host = (f"{{}}_{RANKS}", "{}_1"), record["machine"]
    rows = [[f"{own['config']} {own['dtype']}", _cell(layer_ratio(own, "text")),
             _cell(layer_ratio(own, "random")), _cell(step_ratio(own, "text", "dense")),
             *(_cell(step_ratio(own, *(case.format(way) for case in shared)))
               for way in ("text", "all")),
             f"{_median(own, f'text_{RANKS}', 'load_of_rank'):.2f}"] for own in record["experts"]]
    return table(["tokens/s", "layer over dense", "nearly even load", "step over dense",
                  f"`ep` = {RANKS} over 1", "even load", "fuller rank"], rows,
                 f"{EXPERTS} experts, `k` = {CHOSEN}, each 1/{CHOSEN} as wide as the dense MLP; {LAYERS} "
                 "layers of the widths of A and B. Medians of runs in turns, in brackets the lowest "
                 "and the highest; of disturbed ones we print none. The speeds are in [bench.json](../ch06_expert/figures/bench.json). Nearly even: on "
                 f"random bytes. Even: {CHOSEN} experts, both chosen by every token. Fuller rank: its "
                 f"rows over their mean, on text. {host['cpu']}, {host['threads']} threads, "
                 f"{' '.join(host['isa'])}; commit {record['commit'][:12]}, {record['date'][:10]}.")


def text(record):
    """Ratios with their goals, for the terminal."""
    for own in record.get("experts", []):
        label = f"{own['config']} {own['dtype']}"
        for case, data in (("text", "text"), ("random", "random bytes")):
            yield (f"{label}: a layer of {EXPERTS} experts, k={CHOSEN}, reaches "
                   f"{_cell(layer_ratio(own, case))} of the dense layer's tokens/s on {data}, the "
                   f"fullest expert with {_median(own, case, 'load'):.2f} of the mean "
                   f"(goal: {GOALS['layer']}); the step "
                   f"{_cell(step_ratio(own, case, 'dense'))}")
        for way in ("text", "all"):
            two = f"{way}_{RANKS}"
            yield (f"{label}: {RANKS} ranks with ep={RANKS} reach "
                   f"{_cell(step_ratio(own, two, f'{way}_1'))} of their tokens/s with ep=1, the "
                   f"fuller rank with {_median(own, two, 'load_of_rank'):.2f} of the mean "
                   f"(goal: {GOALS['ep']})")
