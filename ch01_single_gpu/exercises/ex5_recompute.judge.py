"""Judge of ch01.ex5: estimates of all three modes decide."""
from tools.base import BookError
from tools.exercise.lab import NotYet

MODES = ("none", "selective", "full")
FLAGS = {"model": "1B", "dtype": "bf16", "seq_len": 8192, "micro_batch_size": 1,
         "attention": "naive"}
GIB = 2**30
LIMIT = 48 * GIB


def judge(answer, lab):
    """Lines for a right answer; NotYet for a mode that does not fit, or costs more than another."""
    mode = answer.rpartition(" ")[2].lower()
    if mode not in MODES:
        raise BookError(f"{answer!r} is no mode; try one of {', '.join(MODES)}", 2)
    found = {name: lab.estimate("ch01", **FLAGS, recompute=name)["simulated"] for name in MODES}
    rows = [f"{name:<10} peak {one['peak_total'] / GIB:6.1f} GiB   {one['flops'] / 1e12:7.1f} TFLOP"
            for name, one in found.items()]
    fitting = [name for name in MODES if found[name]["peak_total"] <= LIMIT]
    best = min(fitting, key=lambda name: found[name]["flops"])
    if mode not in fitting:
        raise NotYet(f"{mode} does not fit: its peak is above 48 GiB", rows[MODES.index(mode)])
    if found[mode]["flops"] > found[best]["flops"]:
        raise NotYet(f"{mode} fits, but computes more again than it must: another mode fits, too",
                     rows[MODES.index(mode)])
    return rows
