"""One forward, one backward in PyTorch, against this chapter's program.

    python3 -m tools.book.in_pytorch ch05      runs it and the program, and writes what it found
"""
import sys
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fixtures import llama_in_torch as llama  # noqa: E402  (the path comes first)
from tools.book.in_pytorch import SEQ_LEN  # noqa: E402

RANKS, B, MICRO_BATCHES = 2, 1, 5
SHAPE = (B, SEQ_LEN, llama.CONFIG["hidden_size"])


def receive(rank):
    x = torch.empty(SHAPE, dtype=torch.float64)
    dist.recv(x, rank)
    return x.requires_grad_()


# [lines]
def one_f_one_b(forward, m, rank, p):  # forward(i, x): micro-batch i through this rank's layers
    kept, sent, ahead = deque(), [], p - 1 - rank  # forward passes before the first backward pass
    for step in range(m + ahead):
        if step < m:
            x = receive(rank - 1) if rank > 0 else None
            y = forward(step, x)  # on the last rank the loss
            sent += [dist.isend(y.detach(), rank + 1)] if rank < p - 1 else []
            kept.append((x, y))
        if step >= ahead:
            x, y = kept.popleft()  # the oldest micro-batch in flight
            y.backward(receive(rank + 1) if rank < p - 1 else None)
            sent += [dist.isend(x.grad, rank - 1)] if rank > 0 else []
    for work in sent:
        work.wait()
# [lines]


def of_rank(rank):
    named = llama.read_weights()
    half = llama.LAYERS // 2
    blocks = llama.blocks(named)[1 + half:] if rank else llama.blocks(named)[:1 + half]
    weights = [weight for name, weight in named.items() if rank == any(
        part in name for part in ("lm_head", "model.norm", *(f"layers.{n}." for n in range(half, llama.LAYERS))))]

    def gradients(step):
        losses = [torch.zeros((), dtype=torch.float64)]

        def forward(micro_step, x):
            tokens, targets = llama.micro_batch((step * MICRO_BATCHES + micro_step) * B, B)
            x = tokens if x is None else x
            for block in blocks:
                x = block(x)
            if rank < RANKS - 1:
                return x
            losses.append(llama.loss_of(x, targets, MICRO_BATCHES * B * SEQ_LEN))
            return losses[-1]
        one_f_one_b(forward, MICRO_BATCHES, rank, RANKS)
        return llama.sum_over_ranks(sum(losses).detach())

    def squares():
        return llama.sum_over_ranks(sum(weight.grad.pow(2).sum() for weight in weights))
    return llama.train(weights, gradients, squares)


if __name__ == "__main__":
    llama.run(of_rank, RANKS, {"micro_batch_size": B, "pp_size": RANKS, "grad_acc_steps": MICRO_BATCHES})
