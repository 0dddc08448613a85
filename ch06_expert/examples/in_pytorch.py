"""Expert parallelism in PyTorch, on two ranks of gloo, against what transformers computes of a tiny Mixtral.

    python3 -m tools.book.in_pytorch ch06      runs it, and writes what it found

Both ranks read the same sample and hold half of the experts. tests/technique/pretrained.cpp holds this
project's model against the same file.
"""
import json
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.functional import cross_entropy, silu

FIXTURE = Path(__file__).resolve().parents[2] / "tests/data/mixtral/experts"
RANKS = 2


# [lines]
def experts(x, router, mine, k, E, ep):  # x [T, h]; mine: this rank's E/ep experts, as functions
    scores, choices = (x @ router.T).softmax(-1).topk(k)  # [T, k]
    gates = scores / scores.sum(-1, keepdim=True)
    order = choices.flatten().argsort(stable=True)  # rows sorted by expert
    here = choices.flatten().bincount(minlength=E)  # rows for each expert
    there = torch.empty_like(here)
    dist.all_to_all_single(there, here)  # counts first: E numbers
    to, by = here.view(ep, -1).sum(1).tolist(), there.view(ep, -1).sum(1).tolist()
    rows = all_to_all_single(x.new_empty(sum(by), x.size(1)), x[order // k], by, to)  # dispatch
    expert = torch.arange(E // ep).repeat(ep).repeat_interleave(there)  # of each row that came
    y = torch.cat([mine[e](rows[expert == e]) for e in range(E // ep)])
    y = y[expert.argsort(stable=True).argsort()]  # back in the order of the ranks
    back = all_to_all_single(x.new_empty(len(order), x.size(1)), y, to, by)  # combine
    return (gates[..., None] * back[order.argsort()].view(*gates.shape, -1)).sum(1)
# [lines]


def read(path):
    """{name: tensor in f64, or of integers} of a safetensors file."""
    raw = path.read_bytes()
    size, = struct.unpack("<Q", raw[:8])
    kinds = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32}
    found = {}
    for name, at in json.loads(raw[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = at["data_offsets"]
            values = torch.frombuffer(bytearray(raw[8 + size + begin:8 + size + end]), dtype=kinds[at["dtype"]])
            values = values.reshape(at["shape"])
            found[name] = values.double() if values.is_floating_point() else values.long()
    return found


def norm(x, weight, eps):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def rotate(x, theta):
    """RoPE of [a, s, d]: pairs are halves of a head."""
    half = x.size(-1) // 2
    angles = torch.outer(torch.arange(x.size(1)).double(), theta ** (-torch.arange(half).double() / half))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(),
                      second * angles.cos() + first * angles.sin()], -1)


def attention(x, of, heads, kv_heads, theta):
    """Causal, on one sample [s, h]; of: a projection's name -> its weight."""
    q, k, v = ((x @ of(name).T).view(len(x), n, -1).transpose(0, 1)
               for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)))
    k, v = (own.repeat_interleave(heads // kv_heads, 0) for own in (rotate(k, theta), v))
    scores = rotate(q, theta) @ k.transpose(1, 2) / q.size(-1) ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1) @ of("o_proj").T


def of_rank(rank, folder):
    """The largest relative difference of logits, and of gradients of this rank's weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    config, expected = json.loads((FIXTURE / "config.json").read_text()), read(FIXTURE / "expected.safetensors")
    weights = {name: value.requires_grad_() for name, value in read(FIXTURE / "model.safetensors").items()}
    E, eps = config["num_local_experts"], config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][expected["tokens"]]
    for layer in range(config["num_hidden_layers"]):
        def of(name, layer=layer):
            return weights[f"model.layers.{layer}.{name}.weight"]
        x = x + attention(norm(x, of("input_layernorm"), eps), lambda name, of=of: of(f"self_attn.{name}"),
                          config["num_attention_heads"], config["num_key_value_heads"],
                          config["rope_parameters"]["rope_theta"])

        def expert(number, of=of):
            w1, w2, w3 = (of(f"block_sparse_moe.experts.{number}.w{i}") for i in (1, 2, 3))
            return lambda rows: (silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
        own = [expert(number) for number in range(rank * E // RANKS, (rank + 1) * E // RANKS)]
        x = x + experts(norm(x, of("post_attention_layernorm"), eps), of("block_sparse_moe.gate"), own,
                        config["num_experts_per_tok"], E, RANKS)
    logits = norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    cross_entropy(logits, expected["targets"]).backward()
    pairs = [(logits, expected["logits_f64"])]
    for name, value in weights.items():
        if "experts" not in name:
            pairs.append((value.grad, expected[f"grad/{name}"]))
        elif value.grad is not None:  # of this rank's experts, from the rows of both ranks: their sum
            pairs.append((value.grad / RANKS, expected[f"grad/{name}"]))
    worst = torch.tensor(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"ranks": RANKS, "torch": torch.__version__, "compared": len(pairs),
                          "difference": float(worst)}))


if __name__ == "__main__":
    torch.multiprocessing.spawn(of_rank, (sys.argv[1],), RANKS)
