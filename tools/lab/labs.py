"""Which labs there are: one entry each. Where their rungs are, and the program that runs them."""
from dataclasses import dataclass, field

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
    on_card: tuple = ()           # words of tools/bench/ladder_bench.cpp, once for each run on a card
    profiled: str = ""            # its kernels have the name that Nsight Compute is told: which of on_card.METRICS
    takes: dict = field(default_factory=dict)  # of a size, all values that it can have
    has_gains: bool = False       # its rungs compute one result, each from the one before


def idea(name, about, size, on_card=None):
    """The lab of a file of kernels/ideas. A vector is a matrix of one row. On a card its rungs race."""
    words = (name,) if len(size) > 1 else (name, 1)
    sizes = " x ".join(f"{{{one}}}" for one in size)
    return Lab(f"ch09_gpu_kernels/kernels/ideas/{name}.cu", "lab_ideas", words, size, about,
               f"{sizes} numbers in f32",
               ("bytes: what blocks ask of global memory, in sectors of 32 bytes; at tails predicted is "
                "the most",), most=1 << 20, on_card=on_card or (("--measure", "ideas", "--rung", name),))


LABS = {
    "ch09.matmul": Lab(
        "ch09_gpu_kernels/kernels/matmul", "lab_matmul", (), {"M": 128, "N": 256, "K": 128},
        "a product of matrices, from a thread an element to a persistent kernel",
        "c [{M}, {N}] = a [{M}, {K}] b",
        ("bytes: what blocks ask of global memory, in sectors of 32 bytes and whole boxes; at tails "
         "predicted is the most",
         "flops: of tensor cores, with zeros behind the ends; those of scalar instructions are not "
         "counted",
         "a block: for one tile of c, of which a persistent block takes several",
         "flops/byte: of matrices of 4,096 x 4,096; tflops from memory alone: what these leave of the rate of an "
         "H100, the roof over the rung",
         "gain in bytes: those counted of the rung before, over this rung's"),
        ("bytes by Nsight Compute", "time", "of cuBLAS", "gain in time"),
        on_card=tuple(("--m", n, "--n", n, "--k", n, *inputs)
                      for n, inputs in (("4096", ()), ("8192", ()), ("4096", ("--inputs", "zeros")))),
        profiled="accesses", has_gains=True),
    "ch09.stalls": Lab(
        "ch09_gpu_kernels/kernels/matmul", "lab_matmul", ("stalls",), {"M": 128, "N": 256, "K": 128},
        "the product's rungs in f32: what their warps wait for",
        "c [{M}, {N}] = a [{M}, {K}] b in f32",
        ("requests: instructions of warps to global and shared memory; fmas: those that multiply and add",
         "percent of peak at most: a multiprocessor of an H100 begins four FMAs a cycle, and one request"),
        ("MIO throttle", "long scoreboard", "barrier"), profiled="stalls"),
    # Each of one idea: a file with several rungs.
    "ch09.primer": idea("primer", "an addition, a copy, a chain of FMAs: what a card is fed with",
                        {"N": 16384}, (("--measure", "card"),)),
    "ch09.layer_norm": idea("layer_norm", "LayerNorm, a block a row", {"ROWS": 64, "COLUMNS": 256}),
    "ch09.coalescing": idea("coalescing", "a copy of a matrix, by rows and by columns",
                            {"ROWS": 64, "COLUMNS": 256}),
    "ch09.banks": idea("banks", "a transpose, and what it meets in shared memory",
                       {"ROWS": 64, "COLUMNS": 256}),
    "ch09.divergence": idea("divergence", "a branch that parts lanes, warps, or nobody", {"N": 16384}),
    "ch09.occupancy": idea("occupancy", "copies, by how many blocks a multiprocessor holds",
                           {"N": 16384}),
    "ch09.fusion": idea("fusion", "ELU, a kernel an operation and one for all", {"N": 16384}),
    "ch09.reduction": idea("reduction", "a sum, by atomics, by trees, by shuffles", {"N": 16384}),
    "ch09.attention": Lab(
        "ch09_gpu_kernels/kernels/attention", "lab_attention", (), {"S": 256, "D": 64},
        "attention, from scores in memory to two warpgroups that take turns",
        "Two heads of {S} queries and keys, {D} channels wide",
        ("bytes: what blocks ask of global memory, in sectors of 32 bytes and whole boxes; at tails "
         "predicted is the most",
         "scores bytes: what is kept in memory besides operands; blocks: that can run side by side",
         "flops: of tensor cores; those of scalar instructions are not counted",
         "D: 64 or 128, or 192 with values of 128: flash_2, flash_3, flash_4 and flash_2_backward take "
         "these"), most=1 << 16, takes={"D": (64, 128, 192)},
        on_card=tuple(("--measure", *words, "--seq_len", "4096")
                      for words in (("attention",), ("attention", "--causal"), ("backward", "--causal")))),
    "ch09.masks": Lab(
        "ch09_gpu_kernels/kernels/attention", "lab_attention", ("masks",), {"P": 192, "D": 64},
        "attention under masks: documents, and the two ranges of zig-zag",
        "Two samples, two heads that share keys, pieces of {P} positions, {D} channels wide",
        ("flops predicted: of tiles in which some query sees a key, asked pair by pair",
         "bytes: what blocks ask of global memory, in sectors of 32 bytes and whole boxes; at tails "
         "predicted is the most",
         "no time: under a causal mask ./book lab ch09.attention takes it where there is a card"),
        (), most=1 << 14, takes={"D": (64, 128)}),
    "ch09.decoding": Lab(
        "ch09_gpu_kernels/kernels/attention", "lab_attention", ("decoding",), {"K": 1024, "D": 64},
        "one query and its cache: keys whole, and split over blocks",
        "One query of eight heads that share two heads of {K} keys, {D} channels wide",
        ("bytes: what blocks ask of global memory, in sectors of 32 bytes; at tails predicted is the most",
         "parts: as many as fill an H100, of at least 128 keys; parts bytes: outputs and lse to be merged",
         "keys of a block: of the one that has the most"), most=1 << 18, takes={"D": (64, 128)},
        on_card=tuple(("--measure", "decoding", "--num_heads", "32", "--seq_len", n) for n in ("4096", "65536"))),
}
