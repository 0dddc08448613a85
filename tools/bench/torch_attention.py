"""Times causal or full attention of one shape by PyTorch: scaled_dot_product_attention on its backends, and
FlashAttention-3 where this Python has it (https://github.com/Dao-AILab/flash-attention, folder hopper).

Run by `./book gpu-check` under a Python whose torch sees a GPU, with the shape as JSON. Prints
{name: {"forward": ms, "backward": ms}}, or {name: {"why": ...}} of what does not run here.
"""
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP, CALLS, ROUNDS = 3, 20, 5


def median_ms(call):
    """Of rounds of calls that are queued at once, as ladder_bench has it, so that the host's part of a
    call lies beside the device's."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def timed(attend, q, k, v):
    """Each pass of attend(q, k, v)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    output = attend(q, k, v)
    gradient = torch.randn_like(output)
    return {"forward": median_ms(lambda: attend(q, k, v)),
            "backward": median_ms(lambda: torch.autograd.grad(output, (q, k, v), gradient,
                                                              retain_graph=True))}


def by_sdpa(backend, causal):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return attend


def flash_3(causal, deterministic):
    """Of [batch, positions, heads, channels]; older versions return the logarithms of the sums, too."""
    from flash_attn_interface import flash_attn_func

    def attend(q, k, v):
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal,
                                deterministic=deterministic)
        return found[0] if isinstance(found, tuple) else found
    return attend


def main():
    shape = json.loads(sys.argv[1])
    causal = shape["causal"]
    q, k, v = torch.randn(3, 1, shape["num_heads"], shape["seq_len"], shape["head_dim"],
                          device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, make in (("sdpa, flash", lambda: by_sdpa(SDPBackend.FLASH_ATTENTION, causal)),
                       ("sdpa, cuDNN", lambda: by_sdpa(SDPBackend.CUDNN_ATTENTION, causal)),
                       ("FlashAttention-3", lambda: flash_3(causal, False)),
                       ("FlashAttention-3, in order", lambda: flash_3(causal, True))):
        try:
            found[name] = timed(make(), q, k, v)
        except Exception as error:  # whatever a version lacks: the others go on
            found[name] = {"why": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
