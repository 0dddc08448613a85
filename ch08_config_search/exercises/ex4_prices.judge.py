"""Judge of ch08.ex4: tokens for the money, of the best layouts on two clusters."""
import re

from tools.base import BookError
from tools.exercise.lab import NotYet

PRICES = {"h100_nvl8": 2.00, "h200": 2.24}  # of a card and an hour; invented
MODELS = ("8B", "70B")
CHOSEN = "--recompute none --cp_size 1"
FORM = re.compile(r"8B (\w+),? 70B (\w+)", re.I)


def judge(answer, lab):
    """Lines for both clusters right; NotYet with the model for which the other one trains more."""
    found = FORM.fullmatch(answer)
    if not found or not set(found.groups()) <= set(PRICES):
        raise BookError(f"{answer!r} does not name a cluster for each model; try \"8B h200, 70B h100_nvl8\"", 2)
    rows = []
    for model, chosen in zip(MODELS, found.groups()):
        best = {name: lab.plan(name, "1M", f"--model {model} --seq_len 4096 --nodes 4 {CHOSEN}") for name in PRICES}
        tokens = {name: 3600 * each["tokens_per_s_per_rank"] / PRICES[name] for name, each in best.items()}
        rows += [f"{model:<4} {name:<10} {best[name]['tokens_per_s_per_rank']:8.0f} tokens/s/GPU   "
                 f"{tokens[name] / 1e6:7.2f} million tokens for 1.00   {best[name]['flags']}" for name in PRICES]
        if tokens[chosen] < max(tokens.values()):
            raise NotYet(f"for {model} the other cluster trains more tokens for the money",
                         f"{chosen}: {best[chosen]['tokens_per_s_per_rank']:.0f} tokens/s/GPU")
    return rows
