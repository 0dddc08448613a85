"""The appendix's example: our LayerNorm called from Python, timed wrongly, rightly and by the profiler.

    python3 ch09_gpu_kernels/examples/layer_norm.py        needs PyTorch with CUDA, nvcc and a GPU
Under Nsight Compute it shows all that there is of one launch (the first call compiles, so make it before):

    ncu --set full --kernel-name regex:three_passes --launch-count 1 python3 ch09_gpu_kernels/examples/layer_norm.py
"""
import sys
import time
from pathlib import Path

try:
    import torch
    from torch.nn.functional import layer_norm as of_torch
    from torch.utils import cpp_extension
except ImportError as missing:
    if __name__ != "__main__":
        raise
    print(f"layer_norm.py needs PyTorch: {missing}; try pip install torch", file=sys.stderr)
    sys.exit(2)

HERE = Path(__file__).resolve().parent
ROWS = COLUMNS = 10_000  # as in the book
WARM_UP, CALLS = 10, 20


# [load]
def load():
    kernels = HERE.parent / "kernels/ideas"
    return cpp_extension.load(
        "usp_ideas", [str(HERE / "ideas_extension.cu"), str(HERE / "errors_in_torch.cu"),
                      str(kernels / "layer_norm.cu"), str(kernels / "fusion.cu")],
        extra_include_paths=[str(HERE.parent), str(HERE.parents[1] / "common")],
        extra_cflags=["-std=c++20"], extra_cuda_cflags=["-std=c++20"])
# [load]


# [timed]
def by_a_clock(call):
    """Milliseconds until launches have returned: too few, because the GPU is still at work."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e3


def by_events(call):
    """Milliseconds on the GPU, from an event before the calls to one after them."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(CALLS):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / CALLS
# [timed]


def by_the_profiler(call):
    """Milliseconds of the kernel alone."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / 1e3


def main():
    if not torch.cuda.is_available():
        print("layer_norm.py needs a GPU, and PyTorch finds none; try it where nvidia-smi lists one", file=sys.stderr)
        return 2
    ours = load().layer_norm
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    calls = {"three_passes": lambda: ours(x, 0), "row_in_shared": lambda: ours(x, 1),
             "PyTorch": lambda: of_torch(x, (COLUMNS,))}
    print(f"LayerNorm of {ROWS} x {COLUMNS} in f32 on {torch.cuda.get_device_name()}, ms a call")
    print(f"{'':16}{'a clock':>10}{'events':>10}{'profiler':>10}{'GB/s':>10}")
    for name, call in calls.items():
        torch.testing.assert_close(call(), calls["PyTorch"](), rtol=1e-4, atol=1e-5)
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        found = []
        for way in (by_a_clock, by_events, by_the_profiler):
            found.append(way(call))
            torch.cuda.synchronize()
        least = 2 * x.nbytes / found[1] / 1e6  # each number read once and written once
        print(f"{name:16}" + "".join(f"{ms:10.3f}" for ms in found) + f"{least:10.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
