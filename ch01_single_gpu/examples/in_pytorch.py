"""A training step in PyTorch, with gradient accumulation and full recomputation, against this chapter's program.

    python3 -m tools.book.in_pytorch ch01      runs it and the program, and writes what it found
"""
import sys
from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fixtures import llama_in_torch as llama  # noqa: E402  (the path comes first)
from tools.book.in_pytorch import STEPS  # noqa: E402

B, GRAD_ACC = 2, 3


# [lines]
def train_step(blocks, weights, batch, optimizer, max_norm):  # batch: [(tokens, targets)], each [b, s]
    total = sum(targets.numel() for _, targets in batch)  # tokens of all micro-batches
    loss = 0
    for x, targets in batch:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)  # keeps x; backward runs the block again
        share = cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum") / total
        share.backward()  # adds to the gradients of earlier micro-batches
        loss += share.detach()
    norm = clip_grad_norm_(weights, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm
# [lines]


def of_rank(_):
    named = llama.read_weights()
    weights, blocks = list(named.values()), llama.blocks(named)
    optimizer, found = llama.optimizer_of(weights), []
    for step in range(STEPS):
        batch = [llama.micro_batch((step * GRAD_ACC + i) * B, B) for i in range(GRAD_ACC)]
        llama.warm_up(optimizer, step)
        found.append([float(x) for x in train_step(blocks, weights, batch, optimizer, llama.CLIP)])
    return found


if __name__ == "__main__":
    llama.run(of_rank, 1, {"micro_batch_size": B, "grad_acc_steps": GRAD_ACC, "recompute": "full"})
