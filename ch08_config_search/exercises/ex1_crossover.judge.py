"""Judge of ch08.ex1: the NIC with which tensor parallelism over two nodes is as fast as on one."""
from pathlib import Path

from tools.base import BookError

CLUSTER = Path(__file__).parents[1] / "clusters" / "h100_nvl8.json"
BATCH = "1M"
FLAGS = "--model 8B --seq_len 4096 --dp_size 1 --pp_size 1 --cp_size 1 --micro_batch_size 8 --recompute none"
SLOW = (20, 10)  # GB/s of a NIC: what waits is the network alone, so a step is c + d / g


def step(lab, gbs):
    """Seconds on two nodes."""
    changed = lab.changed(CLUSTER, **{"net.gbs": gbs})
    return lab.plan(changed, BATCH, f"{FLAGS} --nodes 2 --tp_size 16")["step_s"]


def measure(lab):
    """GB/s of a NIC. BookError where the step there is not that of one node."""
    one = lab.plan(CLUSTER, BATCH, f"{FLAGS} --nodes 1 --tp_size 8")["step_s"]
    fast, slow = (step(lab, gbs) for gbs in SLOW)
    sent = (slow - fast) / (1 / SLOW[1] - 1 / SLOW[0])
    found = sent / (one - (fast - sent / SLOW[0]))
    if abs(step(lab, found) / one - 1) > 0.005:
        raise BookError(f"at {found:.1f} GB/s the step is not the one of a single node")
    return found


def suspects(measured):
    """[(a wrong answer, its words)], as parts of the right one."""
    return [(measured * part, words) for part, words in (
        (8, "that is what the eight NICs of a node reach together, or a NIC's Gbit/s"),
        (2.13, "on two nodes each GPU has half of every product: computing takes half as long"),
        (0.8, "backward gathers the shards of its inputs once more: ten exchanges of a layer, not eight"),
        (0.4, "forward alone: backward sends as much, and gathers the shards of its inputs again"),
        (0.5, "numbers in place of bytes: bf16 has two of them"))]
