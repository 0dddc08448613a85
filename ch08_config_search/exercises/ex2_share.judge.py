"""Judge of ch08.ex2: the replays of three layouts, with a number of the cluster as the reader has it."""
from pathlib import Path

from tools.base import BookError
from tools.exercise import lab as labs

HERE = Path(__file__).parent
FLAGS = "--model 8B --seq_len 4096 --nodes 4 --cp_size 1 --pp_size 1 --recompute none"
KNOWN = {"net.gbs": "a message alone between two nodes gets 45 GB/s, so a NIC is as fast as the file says",
         "node.gbs": "two GPUs of one node exchange at 360 GB/s, as the file says"}
NEAR = 0.02


def judge(answer, lab):
    """Lines for the right number; NotYet for another, with the layout whose step it does not explain."""
    key, _, value = answer.partition(" ")
    try:
        number = float(value)
    except ValueError:
        raise BookError(f"{answer!r} is no key and value; try \"memory_gbs 1200\"", 2) from None
    key = key.removeprefix("links.")
    changed = lab.changed(HERE / "ex2_share.json", **{key: number})
    rows = []
    for flags, measured in labs.rows_of(HERE / "ex2_share.md"):
        found = lab.plan(changed, "1M", f"{FLAGS} {flags}")["step_s"]
        rows.append(f"{flags:<60} measured {measured:6.3f} s   with {answer} {found:6.3f} s")
        if abs(found / measured - 1) > NEAR:
            raise labs.NotYet(f"with {answer} this step would be {'shorter' if found < measured else 'longer'} than measured",
                              rows[-1])
    if key in KNOWN:
        raise labs.NotYet(KNOWN[key], *rows)
    return rows
