"""What evens out the load of experts, and what it does to the loss; and a mixture of experts beside a
dense model with as much work for a token."""
import json
import statistics

from tools.base import say
from tools.short_runs import run, table

MODEL = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "seq_len": 128,
         "ffn_hidden_size": 384, "micro_batch_size": 8}
STEPS, EVERY, LATE = 400, 5, 100  # and over how many of the last steps means are taken
EVAL_SAMPLES = 256
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_ffn_hidden_size": 192}
# {name: flags}. The dense model has the MLP that a token of the mixture goes through.
BALANCES = {name: {**MIXTURE, "balance": name} for name in ("none", "sample", "batch", "bias")}
RUNS = {"dense": {}, **BALANCES, "capacity": {**MIXTURE, "balance": "none", "capacity_factor": 1.25},
        "shared": {**MIXTURE, "balance": "bias", "num_experts_per_tok": 1, "num_shared_experts": 1}}
SEEDS = {"dense": (1, 2, 3), "bias": (1, 2, 3)}


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
                              sum(layer["dropped"] for layer in record.get("experts", []))
                              for record in records[-LATE:]), 2)})
    return {"steps": STEPS, "every": EVERY, "runs": found}


def _load(record):
    """The fullest expert's load over the mean, the mean of the layers; 0 without experts."""
    layers = record.get("experts", [])
    return round(statistics.fmean(max(layer["tokens"]) * len(layer["tokens"]) / sum(layer["tokens"])
                                  for layer in layers), 4) if layers else 0


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


def balance_table(found):
    """Load and loss by balance."""
    choices = MODEL["micro_batch_size"] * MODEL["seq_len"] * MIXTURE["num_experts_per_tok"]
    rows = []
    for name in (*BALANCES, "capacity"):
        own = runs_of(found, name)[0]
        rows.append([f"`{name}`" if name in BALANCES else "`none`, capacity 1.25",
                     f"{max(own['load']):.2f}", f"{late_load(own):.2f}",
                     f"{100 * own['dropped'] / choices / MODEL['num_layers']:.1f} %",
                     f"{own['val_loss']:.3f}"])
    return table(["`--balance`", "fullest expert, at most", f"in the last {LATE} steps", "dropped",
                  "validation loss"], rows,
                 f"Load over the mean, the mean of {MODEL['num_layers']} layers, "
                 f"{MIXTURE['num_experts']} experts, `k` = {MIXTURE['num_experts_per_tok']}, "
                 f"{STEPS} steps; choices dropped of the last {LATE} steps.")


def dense_table(found):
    """The mixture beside dense models, by seed."""
    rows = []
    for name, told in (("dense", "dense"), ("bias", "8 experts, `k` = 2"),
                       ("shared", "8 experts, `k` = 1, and a shared one")):
        losses = [own["val_loss"] for own in runs_of(found, name)]
        spread = f" ({min(losses):.3f}–{max(losses):.3f})" if len(losses) > 1 else ""
        rows.append([told, f"{statistics.median(losses):.3f}{spread}", str(len(losses))])
    return table(["", "validation loss", "seeds"], rows,
                 f"After {STEPS} steps. A token meets an MLP of width {MODEL['ffn_hidden_size']} in each "
                 f"model, in mixtures as two experts of {MIXTURE['moe_ffn_hidden_size']}. Medians, in "
                 "brackets the lowest and the highest.")
