"""Regions of column- and row-parallel products in PyTorch, against this chapter's program.

    python3 -m tools.book.in_pytorch ch03      runs it and the program, and writes what it found
"""
import sys
from pathlib import Path

from torch.autograd import Function
from torch.nn.functional import silu

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fixtures import llama_in_torch as llama  # noqa: E402  (the path comes first)
from tests.fixtures.llama_in_torch import sum_over_ranks  # noqa: E402
from tools.book.in_pytorch import SEQ_LEN  # noqa: E402

RANKS, B = 2, 2


# [lines]
class Enter(Function):  # f: every rank has all of x, and a partial sum of dx
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, dx: sum_over_ranks(dx))


class Leave(Function):  # f*: every rank has a partial sum of y, and all of dy
    forward = staticmethod(lambda ctx, y: sum_over_ranks(y))
    backward = staticmethod(lambda ctx, dy: dy)


def mlp(x, gate, up, down):  # this rank's gate and up [h_ff/tp, h], down [h, h_ff/tp]
    x = Enter.apply(x)
    return Leave.apply((silu(x @ gate.T) * (x @ up.T)) @ down.T)
# [lines]


def part(name, weight, rank):
    """A rank's part of a weight, and whether ranks have different parts."""
    rows = any(f".{kind}_proj." in name for kind in ("q", "k", "v", "gate", "up"))
    if rows or ".o_proj." in name or ".down_proj." in name:
        return weight.detach().chunk(RANKS, 0 if rows else 1)[rank].clone().requires_grad_(), True
    return weight, False


def of_rank(rank):
    parts = {name: part(name, weight, rank) for name, weight in llama.read_weights().items()}
    named = {name: weight for name, (weight, _) in parts.items()}

    def attend(x, of, positions):
        return Leave.apply(llama.attention(Enter.apply(x), of, positions, ranks=RANKS))

    def feed(x, of):
        return mlp(x, *(of(f"mlp.{kind}_proj") for kind in ("gate", "up", "down")))
    blocks = llama.blocks(named, attend=attend, feed=feed)

    def gradients(step):
        x, targets = llama.micro_batch(step * B, B)
        for block in blocks:
            x = block(x)
        loss = llama.loss_of(x, targets, B * SEQ_LEN)
        loss.backward()
        return loss.detach()

    def squares():
        of = {cut: sum(weight.grad.pow(2).sum() for weight, is_cut in parts.values() if is_cut == cut)
              for cut in (True, False)}
        return sum_over_ranks(of[True]) + of[False]
    return llama.train(list(named.values()), gradients, squares)


if __name__ == "__main__":
    llama.run(of_rank, RANKS, {"micro_batch_size": B, "tp_size": RANKS})
