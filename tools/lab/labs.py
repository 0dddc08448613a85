"""Which labs there are: one entry each. Where their rungs are, and the program that runs them."""
from dataclasses import dataclass

MOST = 1 << 24  # multiplications or elements: a scalar rung takes a second for four million


@dataclass(frozen=True)
class Lab:
    """Kernels with one idea more from rung to rung."""

    source: str    # a folder, of which each .cu is a rung, or one .cu with several; from the root
    program: str   # a target; it prints a JSON object a rung, in the order of the sources
    words: tuple   # of its command line, before the sizes
    size: dict     # what --size names, with its defaults
    about: str     # in the list
    title: str     # above the table; {M} is a size
    notes: tuple   # below it
    on_a_card: tuple = ("time",)  # columns that only a card can fill
    most: int = MOST              # of the product of the sizes


LABS = {
    "ch09.matmul": Lab(
        "ch09_gpu_kernels/kernels/matmul", "lab_matmul", (), {"M": 128, "N": 256, "K": 128},
        "a product of matrices, from a thread an element to a persistent kernel",
        "c [{M}, {N}] = a [{M}, {K}] b",
        ("bytes: what blocks ask of global memory, in sectors of 32 bytes and whole boxes; at tails "
         "predicted is the most",
         "flops: of tensor cores, with zeros behind the ends; those of scalar instructions are not "
         "counted"), ("time", "of cuBLAS")),
}
