"""Judge of ch07.ex10: how far the reader's layout is from the best one, both by chapter 8's planner."""
import re
from pathlib import Path

from tools.base import BookError
from tools.exercise.lab import NotYet

CLUSTER = Path(__file__).parents[2] / "ch08_config_search" / "clusters" / "h100_nvl8.json"
MEMORY_GIB, BATCH = 60, "1M"
TASK = "--model 70B --seq_len 4096 --nodes 4"
NAMES = ("dp_size", "tp_size", "pp_size", "cp_size", "zero_stage", "micro_batch_size", "recompute")
EXAMPLE = "--dp_size 1 --tp_size 8 --pp_size 4 --cp_size 1 --zero_stage 0 --micro_batch_size 1 --recompute full"
NEAR = 0.02
TOO_LARGE = re.compile(r"takes ([\d.]+ GiB) on rank (\d+), most of it ([\w ]+), and .*: ([\d.]+) are missing")


def check_form(answer):
    """BookError (2) unless the answer has each of the flags once, with a value, and no other."""
    words = answer.split()
    given = [word.removeprefix("--") for word in words[::2]]
    missing = [name for name in NAMES if name not in given]
    if missing or len(words) != 2 * len(NAMES) or not all(word.startswith("--") for word in words[::2]):
        what = f"--{missing[0]} is missing" if missing else "there is more than the seven flags and their values"
        raise BookError(f"{answer!r}: {what}; try \"{EXAMPLE}\"", 2)


def planned(lab, cluster, answer):
    """What the planner says of the reader's layout; NotYet with its reason where it refuses."""
    try:
        return lab.plan(cluster, BATCH, f"{TASK} {answer}")
    except BookError as error:
        _, found, said = str(error).partition("error: ")
        if error.code != 1 or not found:
            raise  # interrupted, or not the program's own refusal
    large = TOO_LARGE.search(said)
    if large:
        part = {"optimizer": "optimizer states"}.get(large[3], large[3])
        raise NotYet(f"it does not fit; the most memory goes to {part}",
                     f"rank {large[2]} needs {large[1]} and may use {MEMORY_GIB}: {large[4]} GiB are missing")
    raise NotYet("the planner refuses this layout", said.strip())


def waits(found):
    """What a step loses, in words."""
    lost = {"the bubble": found["bubble"], **{name: part for name, part in found["exposed"].items() if name != "pp"}}
    return ", ".join(f"{name} {100 * part:.1f} %" for name, part in lost.items())


def judge(answer, lab):
    """Lines for a layout as good as the best; NotYet with the distance, or with why it does not fit."""
    check_form(answer)
    cluster = lab.changed(CLUSTER, memory_gib=MEMORY_GIB)
    own, best = planned(lab, cluster, answer), lab.plan(cluster, BATCH, TASK)
    longer = own["step_s"] / best["step_s"] - 1
    rows = [f"a step of {own['step_s']:.2f} s, {100 * longer:.1f} % longer than the best one's {best['step_s']:.2f} s",
            f"{own['gib']:.1f} of {MEMORY_GIB} GiB on rank {own['fullest_rank']}; exposed: {waits(own)}"]
    if longer > NEAR:
        raise NotYet("it fits, but another layout is faster", *rows)
    return rows
