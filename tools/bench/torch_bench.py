"""Trains a Llama of given shapes with PyTorch, for so many steps or until it is killed.

After every step a line of JSON tells how long it took: see tools/bench/turns.py. With --profile the
last steps run under torch.profiler, and a last line says where their time went. With --trace one more
step does, and is written as a trace that ui.perfetto.dev opens.
Run under a Python that has torch, by `./book bench --peers` on the CPU and by `./book gpu-check` on
a GPU. Everything that PyTorch offers for speed is on: scaled_dot_product_attention, fused AdamW,
fused projections of q, k, v and of gate, up, and with --compile torch.compile. The batch is fixed
and no value is read from any step.
"""
import argparse
import contextlib
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "seq_len", "micro_batch_size")


def rotate(x, cos, sin):
    """RoPE of x [B, N, S, D]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, a):
        super().__init__()
        self.heads, self.kv_heads = a.num_heads, a.num_kv_heads
        self.head_dim = a.hidden_size // a.num_heads
        width = (a.num_heads + 2 * a.num_kv_heads) * self.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(a.hidden_size, 1e-5), nn.RMSNorm(a.hidden_size, 1e-5)
        self.qkv = nn.Linear(a.hidden_size, width, bias=False)
        self.o = nn.Linear(a.num_heads * self.head_dim, a.hidden_size, bias=False)
        self.gate_up = nn.Linear(a.hidden_size, 2 * a.ffn_hidden_size, bias=False)
        self.down = nn.Linear(a.ffn_hidden_size, a.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        B, S, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, S, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v, is_causal=True,
            enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(B, S, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tokens and targets to the mean loss."""

    def __init__(self, a):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab_size, a.hidden_size)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.num_layers))
        self.norm = nn.RMSNorm(a.hidden_size, 1e-5)
        self.head = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
        pairs = a.hidden_size // a.num_heads // 2
        angle = torch.outer(torch.arange(a.seq_len),
                            10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs))
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def kind_of(name):
    """What an operator of PyTorch does: as limits.kind_of() of ours."""
    if "scaled_dot_product" in name:
        return "attention"
    return "matmul" if name in ("aten::mm", "aten::addmm", "aten::bmm") else "other"


def profiled(step, steps):
    """{kind: ms of a step}, each operator's time without that of those it calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    found = {"matmul": 0.0, "attention": 0.0, "other": 0.0}
    for event in recorded.key_averages():
        found[kind_of(event.key)] += 1e-3 * event.self_cpu_time_total / steps
    return found


def traced(step, file):
    """Writes what the CPU, and the GPU if there is one, do in a step."""
    with torch.profiler.profile() as recorded:
        step()
    recorded.export_chrome_trace(file)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Times training steps of PyTorch.")
    alike = any(word.startswith("--like") for word in sys.argv)
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, required=not alike)
    parser.add_argument("--dtype", choices=("f32", "bf16"), required=not alike)
    parser.add_argument("--like", metavar="RUN_DIR", help="shapes and dtype of a run of ours")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="default: until it is killed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", type=int, metavar="STEPS", help="this many more, after --steps")
    parser.add_argument("--trace", metavar="FILE", help="one more step, for ui.perfetto.dev")
    arguments = parser.parse_args()
    if alike:
        config = json.loads((Path(arguments.like) / "run.json").read_text(encoding="utf-8"))["config"]
        for name in (*SHAPE, "dtype"):
            setattr(arguments, name, config[name])
        if arguments.dtype not in ("f32", "bf16"):
            parser.error(f"{arguments.like} has dtype={arguments.dtype}; try a run in f32 or bf16")
    return arguments


def main():
    a = parse_arguments()
    torch.manual_seed(1)
    with torch.device(a.device):
        model = Llama(a)
        tokens, targets = (torch.randint(a.vocab_size, (a.micro_batch_size, a.seq_len))
                           for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    run = torch.compile(model) if a.compile else model
    phase = torch.profiler.record_function if a.trace else contextlib.nullcontext  # which costs no time

    def step():
        with phase("forward"), torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(tokens, targets)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if a.device == "cuda":
            torch.cuda.synchronize()  # a step is over when the GPU has done it

    for _ in itertools.count() if a.steps is None else range(a.steps):
        begin = time.perf_counter()
        step()
        print(json.dumps({"step_ms": 1e3 * (time.perf_counter() - begin),
                          "torch": torch.__version__, "threads": torch.get_num_threads()}),
              flush=True)
    if a.profile:
        print(json.dumps({"ms": profiled(step, a.profile)}))
    if a.trace:
        traced(step, a.trace)


if __name__ == "__main__":
    main()
