"""Llama 3's 405B on more and more GPUs of Meta's cluster, beside what its authors measured there."""
import json

from tools.base import say
from tools.book.short_runs import table
from tools.run import estimates

from . import searched

BASE = {"model": "405B", "dtype": "bf16", "seq_len": 8192, "cluster": "meta_24k", "plan": 2**24, "plan_best": 1,
        "plan_json": None, "tp_size": 8, "cp_size": 1, "zero_stage": 1, "micro_batch_size": 1}
NODES, GPUS = (128, 256, 512, 1024, 2048), 8
# Table 4 of the paper, https://arxiv.org/abs/2407.21783: the degrees, and the MFU on so many GPUs.
THEIRS = {"pp_size": 16, "pp_schedule": "interleaved", "pp_chunks": 4}
MEASURED = {8192: 0.43, 16384: 0.41}


def scale_all(program):
    """{"rows": the best layout of so many nodes, and the best of those with the authors' degrees}"""
    say("book: 405B on up to 16,384 GPUs")
    rows = []
    for nodes in NODES:
        for theirs in (False, True):
            if theirs and nodes * GPUS not in MEASURED:
                continue
            found = json.loads(estimates.output_of([str(program), *estimates.words_of(
                {**BASE, **(THEIRS if theirs else {}), "nodes": nodes})]))
            best = {name: found["best"][0][name] for name in ("flags", "step_s", "mfu", "gib", "bubble", "exposed",
                                                              "tokens_per_s_per_rank")}
            rows.append({"ranks": found["ranks"], "tokens": found["tokens"], "theirs": theirs, **best})
    return {"rows": rows}


def exposed(row):
    return sum(share for name, share in row["exposed"].items() if name != "pp")


def name_of(row):
    return f"{row['ranks']:,}{', their degrees' if row['theirs'] else ''}"


def scaled_table(found):
    """A row for each search."""
    return table(("GPUs", "layout", "step, s", "tokens/s/GPU", "MFU", "measured", "bubble", "exposed", "GiB"), [
        (name_of(row), searched.layout(row["flags"]), f"{row['step_s']:.2f}", f"{row['tokens_per_s_per_rank']:.0f}",
         f"{100 * row['mfu']:.1f} %", f"{100 * MEASURED[row['ranks']]:.0f} %" if row["theirs"] else "–",
         f"{100 * row['bubble']:.1f} %", f"{100 * exposed(row):.1f} %", f"{row['gib']:.1f}")
        for row in found["rows"]],
        f"405B by `clusters/meta_24k.json`, {found['rows'][0]['tokens']:,} tokens a step in samples of "
        f"{BASE['seq_len']:,}: the fastest layout under 1F1B with `tp` {BASE['tp_size']}, ZeRO-{BASE['zero_stage']} and "
        f"micro-batches of one sample. Their degrees: `pp` {THEIRS['pp_size']}, interleaved, here with "
        f"{THEIRS['pp_chunks']} stages on each rank; [the paper](https://arxiv.org/abs/2407.21783) has the measured MFU in table 4.")
