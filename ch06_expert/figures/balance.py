"""What evens out the load of experts, and what it does to the loss; and a mixture of experts beside a
dense model with as much work for a token."""
import json
import statistics

from tools.base import say
from tools.book.short_runs import run, table

MODEL = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "seq_len": 128,
         "ffn_hidden_size": 384, "micro_batch_size": 8}
STEPS, EVERY, LATE = 400, 5, 100  # and over how many of the last steps means are taken
EVAL_SAMPLES = 256
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_ffn_hidden_size": 192,
           "norm_topk_prob": None}
BALANCES = {name: {**MIXTURE, "balance": name} for name in ("none", "sample", "batch", "bias")}
RUNS = {**BALANCES, "capacity": {**MIXTURE, "balance": "none", "capacity_factor": 1.25}}
SEEDS = {"bias": (1, 2, 3)}
# The dense model has the MLP that a token of the mixture goes through.
BESIDE = {"dense": {}, "mixture": BALANCES["bias"]}
BESIDE_STEPS, BESIDE_EVERY, BESIDE_SEEDS = 1000, 100, (1, 2, 3)


def measure(program):
    """{steps, every, runs: [a run]}; loss: of each step, load: of every so many steps."""
    found = []
    for name, flags in RUNS.items():
        for seed in SEEDS.get(name, (1,)):
            say(f"book: training the small model: {name}, seed {seed}")
            records, _ = run(program, 1, **MODEL, **flags, steps=STEPS, seed=seed,
                             eval_interval=STEPS, eval_samples=EVAL_SAMPLES)
            found.append({"name": name, "seed": seed,
                          "loss": [round(float(record["loss"]), 5) for record in records],
                          "val_loss": round(float(records[-1]["val_loss"]), 5),
                          "load": [_load(record) for record in records[EVERY - 1::EVERY]],
                          "dropped": round(statistics.fmean(
                              sum(layer["dropped"] for layer in record["experts"])
                              for record in records[-LATE:]), 2)})
    return {"steps": STEPS, "every": EVERY, "runs": found}


def measure_beside(program):
    """{steps, runs: [a run]}: validation losses of mixtures and of dense models."""
    found = []
    for name, flags in BESIDE.items():
        for seed in BESIDE_SEEDS:
            say(f"book: training longer: {name}, seed {seed}")
            records, _ = run(program, 1, **MODEL, **flags, steps=BESIDE_STEPS, seed=seed,
                             eval_interval=BESIDE_EVERY, eval_samples=EVAL_SAMPLES)
            found.append({"name": name, "seed": seed, "flops": float(records[-1]["flops"]),
                          "val_loss": [[int(record["step"]), round(float(record["val_loss"]), 5)]
                                       for record in records if "val_loss" in record]})
    return {"steps": BESIDE_STEPS, "runs": found}


def _load(record):
    """The fullest expert's load over the mean, the mean of the layers."""
    return round(statistics.fmean(max(layer["tokens"]) * len(layer["tokens"]) / sum(layer["tokens"])
                                  for layer in record["experts"]), 4)


def text(record):
    """balance.json: a line for each run."""
    head = json.dumps({key: value for key, value in record.items() if key != "runs"},
                      indent=1).rstrip()[:-1].rstrip()
    runs = ",\n  ".join(json.dumps(own) for own in record["runs"])
    return f'{head},\n "runs": [\n  {runs}\n ]\n}}\n'


def runs_of(found, name):
    return [own for own in found["runs"] if own["name"] == name]


def late_load(own):
    """The mean of the last steps."""
    return statistics.fmean(own["load"][-LATE // EVERY:])


def spread(values):
    """Of several: the median, the lowest and the highest."""
    text = f"{statistics.median(values):.3f}"
    return f"{text} ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else text


def balance_table(found):
    """Load and loss by balance."""
    choices = MODEL["micro_batch_size"] * MODEL["seq_len"] * MIXTURE["num_experts_per_tok"]
    rows = []
    for name in RUNS:
        own = runs_of(found, name)
        rows.append([f"`{name}`" if name in BALANCES else "`none`, capacity 1.25",
                     f"{max(own[0]['load']):.2f}", f"{late_load(own[0]):.2f}",
                     f"{100 * own[0]['dropped'] / choices / MODEL['num_layers']:.1f} %",
                     spread([one["val_loss"] for one in own])])
    return table(["`--balance`", "fullest expert's highest load", f"its load in the last {LATE} steps", "dropped",
                  "validation loss"], rows,
                 f"Load over the mean load, averaged over layers; choices dropped in the last {LATE} steps. In brackets the "
                 f"lowest and the highest of {len(SEEDS['bias'])} seeds.")
