"""Ring attention in PyTorch, against this chapter's program.

    python3 -m tools.book.in_pytorch ch04      runs it and the program, and writes what it found
"""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import Function

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fixtures import llama_in_torch as llama  # noqa: E402  (the path comes first)
from tools.book.in_pytorch import SEQ_LEN  # noqa: E402

RANKS, B = 2, 2


def shift(x, by):
    """Sends x so many ranks on around the ring, and returns what comes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x.contiguous(), (rank + by) % ranks)
    dist.recv(came, (rank - by) % ranks)
    sent.wait()
    return came


# [lines]
class PassOn(Function):  # to the next rank of the ring; in backward the gradient comes back
    forward = staticmethod(lambda ctx, x: shift(x, 1))
    backward = staticmethod(lambda ctx, dx: shift(dx, -1))


def ring_attention(q, k, v, rank, cp):  # [b, a, s/cp, d]: this rank's share of the sample
    out, lse, rows = 0, torch.tensor(-torch.inf), q.size(-2)
    for step in range(cp):
        k, v = (PassOn.apply(k), PassOn.apply(v)) if step else (k, v)
        earlier = rank - (rank - step) % cp  # so many shares before the queries
        hidden = torch.ones(rows, rows).triu(1 + earlier * rows).bool()
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -1e30)
        both = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        out, lse = (lse - both).exp() * out + (scores - both).exp() @ v, both  # merges
    return out
# [lines]


def of_rank(rank):
    named = llama.read_weights()
    weights, share = list(named.values()), slice(rank * SEQ_LEN // RANKS, (rank + 1) * SEQ_LEN // RANKS)

    def attend(x, of, positions):
        return llama.attention(x, of, positions, lambda q, k, v, _: ring_attention(q, k, v, rank, RANKS))
    blocks = llama.blocks(named, torch.arange(SEQ_LEN)[share], attend)

    def gradients(step):
        x, targets = (of_all[:, share] for of_all in llama.micro_batch(step * B, B))
        for block in blocks:
            x = block(x)
        loss = llama.loss_of(x, targets, B * SEQ_LEN)
        loss.backward()
        for weight in weights:
            dist.all_reduce(weight.grad)
        return llama.sum_over_ranks(loss.detach())
    return llama.train(weights, gradients)


if __name__ == "__main__":
    llama.run(of_rank, RANKS, {"micro_batch_size": B, "cp_size": RANKS, "cp_layout": "contiguous"})
