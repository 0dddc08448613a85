"""A mesh in PyTorch, on eight ranks of gloo, against the groups that this chapter's program prints.

    python3 -m tools.book.in_pytorch ch07      runs it, and writes what it found

Each rank compares its groups with those of figures/counts.json, and then a copy that differs on one rank has to be found
by every rank that holds it, and by no other.
"""
import hashlib
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

RECORD = Path(__file__).resolve().parents[1] / "figures" / "counts.json"
SIZES = {"dp": 2, "pp": 2, "tp": 2}  # from the slowest axis to the fastest


# [lines]
def groups_along(axis, sizes):  # sizes {axis: ranks}, from the slowest axis to the fastest
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    return ranks.movedim(list(sizes).index(axis), -1).reshape(-1, sizes[axis]).tolist()


def copies_that_differ(tensor, group, ranks):  # ranks of a group that hold the same elements
    digest = hashlib.sha256(tensor.numpy().tobytes()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)  # 8 bytes a tensor
    digests = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(digests, own, group=group)
    return [rank for rank, other in zip(ranks, digests) if other != digests[0]]
# [lines]


def of_rank(rank, folder):
    """Wrong members of groups, and wrong ranks among those found to differ."""
    expected = json.loads(RECORD.read_text())["small_layout"]["groups"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=math.prod(SIZES.values()))
    wrong = compared = 0
    for axis in SIZES:
        found = groups_along(axis, SIZES)
        wrong += found != next(kind["ranks"] for kind in expected if kind["name"] == axis)
        groups = [dist.new_group(ranks) for ranks in found]  # every rank makes all of them
        group, ranks = next((made, ranks) for made, ranks in zip(groups, found) if rank in ranks)
        weight = torch.arange(5.0)
        weight[2] += rank == ranks[-1]  # the last one's copy has drifted
        wrong += copies_that_differ(weight, group, ranks) != ranks[-1:]
        compared += 2
    worst = torch.tensor(float(wrong))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"ranks": dist.get_world_size(), "torch": torch.__version__,
                          "compared": compared, "difference": float(worst)}))


if __name__ == "__main__":
    torch.multiprocessing.spawn(of_rank, (sys.argv[1],), math.prod(SIZES.values()))
