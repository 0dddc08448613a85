"""Times the products that gpu_bench has timed, given as the JSON that it prints, by torch.matmul.

Run by `./book gpu-check` under a Python whose torch sees a GPU. Prints the rates in the same order.
"""
import ctypes
import json
import re
import statistics
import sys
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
WARM_UP, TIMED = 3, 10


def operands(kind, m, n, k, dtype):
    """Of a linear layer's forward pass, the gradient of its input or of its weight."""
    def numbers(*shape):
        return (torch.rand(*shape, device="cuda", dtype=torch.float32) - 0.5).to(dtype)

    if kind == "weight":
        return numbers(k, m).T, numbers(k, n)
    return numbers(m, k), numbers(n, k).T if kind == "forward" else numbers(k, n)


def seconds_of(a, b):
    """The median of a few calls."""
    times = []
    for _ in range(WARM_UP + TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.matmul(a, b)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[WARM_UP:])


def library():
    """The cuBLASLt that torch has loaded, which need not be the one that gpu_bench finds."""
    loaded = re.search(r"\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    if loaded is None:
        return "no cuBLASLt"
    version = ctypes.CDLL(loaded[0]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    number = version()  # 130100 for 13.1.0
    return f"cuBLASLt {number // 10000}.{number // 100 % 100}.{number % 100}"


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for each in json.loads(sys.argv[1]):
        m, n, k = each["m"], each["n"], each["k"]
        a, b = operands(each["kind"], m, n, k, DTYPES[each["dtype"]])
        found.append({"tflops": 2e-12 * m * n * k / seconds_of(a, b), "library": library()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
