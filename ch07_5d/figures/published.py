"""Published layouts, the recipes: what their sources report, beside what a dry run says of the same flags."""
from tools import chapters
from tools.base import say
from tools.book.short_runs import table
from tools.run import estimates, recipes

CHAPTER = chapters.resolve("ch07")


def published():
    """{name: Recipe} of those whose source reports something."""
    found = {name: recipes.load(CHAPTER, name) for name in recipes.names(CHAPTER)}
    return {name: recipe for name, recipe in found.items() if recipe.reported}


def estimate_all(program):
    say("book: estimates of published layouts")
    return {"published": {name: estimates.read(program, {flag: None if value is True else value
                                                         for flag, value in recipe.flags.items()}, _parse)
                          for name, recipe in published().items()}}


def _parse(found):
    config, mesh = found["config"], found["mesh"]
    return {"parameters": found["parameters"], "ranks": mesh["dp"] * mesh["pp"] * mesh["cp"] * mesh["tp"],
            "sequences": config["micro_batch_size"] * config["grad_acc_steps"] * config["dp_size"],
            "seq_len": config["seq_len"], "peak": found["simulated"]["peak_total"]}


def here(what, own):
    """What the dry run has in the place of a fact; None where it has nothing, as of speed."""
    if what == "parameters":
        return f"{own['parameters'] / 1e9:.2f} billion"
    if what in ("GPUs", "chips"):
        return f"{own['ranks']:,} ranks"
    if what == "sequences in a batch":
        return f"{own['sequences']:,} of {own['seq_len']:,} tokens"
    if what == "tokens in a batch":
        return f"{own['sequences'] * own['seq_len'] / 1e6:.2f} million"
    return None


def published_table(found):
    rows = []
    for name, recipe in published().items():
        for fact in recipe.reported:
            text = here(fact["what"], found[name])
            if text:
                rows.append([f"`{name}`", fact["what"], f"[{fact['value']}]({fact['source']})", text])
        rows.append([f"`{name}`", "peak memory of the fullest rank", "-", f"{found[name]['peak'] / 2**30:.1f} GiB"])
    return table(["recipe", "what", "its source", "here"], rows,
                 "Here: by a dry run of the recipe's flags. What a source says of speed is left out, because a dry run "
                 "takes no time.")
