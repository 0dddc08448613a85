"""The book's ELU in four ways: eager PyTorch, torch.compile, a kernel in Triton, our kernel in CUDA.

    python3 ch09_gpu_kernels/examples/elu.py        needs PyTorch with CUDA and a GPU

Where something is missing for one of the ways, a line says so, and the others are timed.
"""
import sys

try:
    import torch
    from layer_norm import WARM_UP, by_events, load
except ImportError as missing:
    print(f"elu.py needs PyTorch: {missing}; try pip install torch", file=sys.stderr)
    sys.exit(2)
try:
    import triton
    from triton import language as tl
except ImportError:
    triton = None

ROWS, COLUMNS = 4096, (1024, 2048, 4096, 8192, 12288, 15872)  # f32, as in the book
ALPHA, BLOCK = 1.5, 1024


def eager(x):
    return torch.where(x < 0, ALPHA * (torch.exp(x) - 1), x)


if triton:
    @triton.jit
    def elu_kernel(x_of, y_of, n, alpha: tl.constexpr, block: tl.constexpr):
        """A program takes a block of neighbors; the mask leaves out what lies behind the end."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(x_of + at, mask=at < n)
        tl.store(y_of + at, tl.where(x < 0, alpha * (tl.exp(x) - 1), x), mask=at < n)


def by_triton(x):
    if triton is None:
        raise ImportError("no module named triton")
    y = torch.empty_like(x)
    elu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), ALPHA, BLOCK)
    return y


WAYS = {"eager": lambda: eager, "torch.compile": lambda: torch.compile(eager), "Triton": lambda: by_triton,
        "CUDA": lambda: load().elu}  # each compiles when it is first called


def usable(x):
    """{way: its function of a matrix}: those that run on x. The others have a line each."""
    found = {}
    for name, make in WAYS.items():
        try:
            call = make()
            y = call(x)
        except Exception as error:  # every compiler has errors of its own
            print(f"{name} is left out: {(str(error) or type(error).__name__).splitlines()[0]}")
            continue
        torch.testing.assert_close(y, eager(x), rtol=1e-5, atol=1e-6)
        found[name] = call
    return found


def gb_per_s(call, x):
    """The least that any ELU moves, each number in and out once, by the time between two events."""
    for _ in range(WARM_UP):
        call(x)
    return 2 * x.nbytes / by_events(lambda: call(x)) / 1e6


def main():
    if not torch.cuda.is_available():
        print("elu.py needs a GPU, and PyTorch finds none; try it where nvidia-smi lists one", file=sys.stderr)
        return 2
    ways = usable(torch.randn(ROWS, COLUMNS[0], device="cuda"))
    print(f"ELU of {ROWS} rows in f32 on {torch.cuda.get_device_name()}, GB/s")
    print(f"{'columns':>8}" + "".join(f"{name:>15}" for name in ways))
    for columns in COLUMNS:
        x = torch.randn(ROWS, columns, device="cuda")
        print(f"{columns:8}" + "".join(f"{gb_per_s(call, x):15.0f}" for call in ways.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
