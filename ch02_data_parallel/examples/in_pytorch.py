"""Data parallelism in PyTorch, with buckets that are summed while backward runs, against this chapter's program.

    python3 -m tools.book.in_pytorch ch02      runs it and the program, and writes what it found
"""
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fixtures import llama_in_torch as llama  # noqa: E402  (the path comes first)
from tools.book.in_pytorch import SEQ_LEN  # noqa: E402

RANKS, B = 2, 3
BUCKET = 4000  # elements, which makes several buckets


# [lines]
def sum_bucket(weights, works):  # works: the sums to wait for before the update
    flat, missing = weights[0].new_zeros(sum(weight.numel() for weight in weights)), set(weights)

    def ready(weight):  # its gradient is final
        missing.remove(weight)
        if not missing:
            works.append(dist.all_reduce(flat, async_op=True))  # under the rest of backward
            missing.update(weights)  # for the next step

    for weight, grad in zip(weights, flat.split([weight.numel() for weight in weights])):
        weight.grad = grad.view_as(weight)  # backward adds to the bucket itself
        weight.register_post_accumulate_grad_hook(ready)
# [lines]


def buckets_of(weights):
    """Lists of at least so many elements, but for the last one."""
    found = [[]]
    for weight in weights:
        if sum(other.numel() for other in found[-1]) >= BUCKET:
            found.append([])
        found[-1].append(weight)
    return found


def of_rank(rank):
    named, works = llama.read_weights(), []
    blocks = llama.blocks(named)
    buckets = buckets_of(llama.in_order_of_backward(named))
    for bucket in buckets:
        sum_bucket(bucket, works)

    def gradients(step):
        x, targets = llama.micro_batch((step * RANKS + rank) * B, B)
        for block in blocks:
            x = block(x)
        loss = llama.loss_of(x, targets, RANKS * B * SEQ_LEN)
        loss.backward()
        assert len(works) == len(buckets) > 2
        while works:
            works.pop().wait()
        return llama.sum_over_ranks(loss.detach())
    return llama.train(list(named.values()), gradients)


if __name__ == "__main__":
    llama.run(of_rank, RANKS, {"micro_batch_size": B})
