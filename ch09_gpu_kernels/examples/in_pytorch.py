"""A head and its loss by chunks in PyTorch, against the whole, and against the work of this chapter's program.

    python3 -m tools.book.in_pytorch ch09      runs it, and writes what it found

Loss and gradients have to be those of all logits at once; the operations of the products, forward and backward, have
to be those that figures/counts.json has of a fused head of the same shape.
"""
import json
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECORD = Path(__file__).resolve().parents[1] / "figures" / "counts.json"


# [lines]
def linear_cross_entropy(x, weight, targets, rows):  # holds so many rows of the logits at once
    def loss_of(x, targets):
        return functional.cross_entropy(x @ weight.T, targets, reduction="sum")

    loss = 0
    for part, wanted in zip(x.split(rows), targets.split(rows)):
        loss = loss + checkpoint(loss_of, part, wanted, use_reentrant=False)  # the logits again in backward
    return loss / len(targets)
# [lines]


class Products(TorchDispatchMode):
    """Adds up the operations of products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return out


def gradients(loss_of, x, weight):
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    loss = loss_of(x, weight)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def main():
    record = json.loads(RECORD.read_text())
    shape = record["model"]
    tokens, words = shape["micro_batch_size"] * shape["seq_len"], shape["vocab_size"]
    torch.manual_seed(1)
    x = torch.randn(tokens, shape["hidden_size"], dtype=torch.float64)
    weight = torch.randn(words, shape["hidden_size"], dtype=torch.float64)
    targets = torch.randint(words, (tokens,))
    whole = gradients(lambda x, w: functional.cross_entropy(x @ w.T, targets), x, weight)
    with Products() as products:
        chunks = gradients(lambda x, w: linear_cross_entropy(x, w, targets, record["rows"]), x, weight)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(chunks, whole))
    expected = record["runs"]["fused"]["head_flops"]
    print(json.dumps({"ranks": 1, "torch": torch.__version__, "compared": len(whole) + 1,
                      "difference": max(difference, abs(products.flops - expected) / expected)}))


if __name__ == "__main__":
    main()
