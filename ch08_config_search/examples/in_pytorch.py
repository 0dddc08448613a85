"""A record of a program on meta in PyTorch, against the products that this chapter's program carries out.

    python3 -m tools.book.in_pytorch ch08      runs it, and writes what it found

The layers' products run on tensors without data; what the mode has taken down has to be the operations of the products
in figures/counts.json, forward and backward.
"""
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

RECORD = Path(__file__).resolve().parents[1] / "figures" / "counts.json"
LAYERS, HIDDEN, KV, FFN, WORDS = 2, 64, 32, 192, 256
TOKENS, MICRO_BATCHES = 2 * 64, 2


# [lines]
class Record(TorchDispatchMode):  # what a program does, in its order and without a clock
    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.mm.default:
            (m, k), n = args[0].shape, args[1].shape[1]
            self.events.append(("matmul", m, n, k))
        return out
# [lines]


class Layer(nn.Module):
    """A layer's products, and what is between them as far as shapes go."""

    def __init__(self):
        super().__init__()
        widths = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, KV), "v": (HIDDEN, KV), "o": (HIDDEN, HIDDEN),
                  "gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}
        for name, (inside, outside) in widths.items():
            setattr(self, name, nn.Linear(inside, outside, bias=False, device="meta"))

    def forward(self, x):
        keys = torch.cat([self.k(x), self.v(x)], 1)
        x = x + self.o(self.q(x) + keys)
        return x + self.down(self.gate(x) * self.up(x))


def main():
    head = nn.Linear(HIDDEN, WORDS, bias=False, device="meta")
    layers = [Layer() for _ in range(LAYERS)]
    with Record() as record:
        for _ in range(MICRO_BATCHES):
            x = torch.empty(TOKENS, HIDDEN, device="meta", requires_grad=True)
            for layer in layers:
                x = layer(x)
            head(x).sum().backward()
    found = sum(2 * m * n * k for _, m, n, k in record.events)
    expected = sum(json.loads(RECORD.read_text())["products"].values())
    print(json.dumps({"ranks": 1, "torch": torch.__version__, "compared": len(record.events),
                      "difference": abs(found - expected) / expected}))


if __name__ == "__main__":
    main()
