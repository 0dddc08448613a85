"""When is communication hidden? The book's appendix A3, for machines of known speed.

    python3 -m ch02_data_parallel.figures.hiding TFLOPS GB_PER_S RANKS [BYTES]

prints how many tokens a rank must have for its backward pass to hide the all-reduce of its
gradients: a rank's speed, the bus bandwidth of an all-reduce, and the bytes of a gradient.
"""
import sys
from statistics import fmean

from .overlap import note

H100 = 989e12  # FLOP/s in bf16, without sparsity
# The book's bandwidths of messages of 256 MB, GB/s by nodes of 8 H100: all-reduce, all-gather.
BOOK_BANDWIDTHS = {1: (436.0, 249.8), 8: (99.6, 69.0), 64: (32.9, 11.0)}
GPUS_OF_A_NODE, BOOK_SEQ_LEN = 8, 4096


def ratio(tokens, ranks, flops, bandwidth, of_a_value):
    """t_comm / t_compute: the all-reduce of all gradients, 2 (dp-1)/dp · bytes · Ψ / bandwidth,
    over the backward pass, 4 · tokens · Ψ / flops. Ψ, the number of parameters, cancels.

    The same formula holds for a layer of ZeRO-3: (dp-1)/dp · bytes · Ψ / bandwidth to gather it,
    over 2 · tokens · Ψ / flops to run it forward.
    """
    return (ranks - 1) / ranks * of_a_value * flops / (2 * tokens * bandwidth)


def enough_tokens(ranks, flops, bandwidth, of_a_value):
    """Tokens of a rank's micro-batch from which on the ratio is at most 1."""
    return ratio(1, ranks, flops, bandwidth, of_a_value)


def bus_bandwidth(ranks, size, seconds):
    """Bytes/s of an all-reduce as NCCL's tests count them: 2 (n-1)/n of the message per rank."""
    return 2 * (ranks - 1) / ranks * size / seconds


def of_this_machine(record):
    """(ranks, FLOP/s of a rank, bytes/s of an all-reduce) by a record of ./book bench."""
    found = next(entry for entry in record["collectives"] if entry["ranks"] == 2)
    rates = [result["summary"]["matmul_gflops"]["median"] for result in record["results"]
             if result["dtype"] == "f32" and result["ranks"] == found["ranks"]]
    return (found["ranks"], 1e9 * fmean(rates) / found["ranks"],
            bus_bandwidth(found["ranks"], found["large_bytes"], found["large_ms"] / 1000))


def table(record):
    """H100s of the book and the machine of the bench, as Markdown."""
    lines = ["| | ranks | TFLOP/s of a rank | all-reduce, GB/s | tokens for DP | "
             "all-gather, GB/s | tokens for ZeRO-3 |", "|---|---:|---:|---:|---:|---:|---:|"]
    for nodes, (reduce, gather) in BOOK_BANDWIDTHS.items():
        ranks = nodes * GPUS_OF_A_NODE
        needed = [enough_tokens(ranks, H100, 1e9 * rate, 2) for rate in (reduce, gather)]
        lines.append(f"| H100, bf16, {nodes} node{'s' * (nodes > 1)} | {ranks} | "
                     f"{H100 / 1e12:.0f} | {reduce:.1f} | {needed[0]:,.0f} | {gather:.1f} | {needed[1]:,.0f} |")
    ranks, flops, bandwidth = of_this_machine(record)
    lines.append(f"| this page's machine, f32 | {ranks} | {flops / 1e12:.3f} | "
                 f"{bandwidth / 1e9:.1f} | {enough_tokens(ranks, flops, bandwidth, 4):,.0f} | | |")
    return "\n".join(lines) + note(
        "Tokens of a rank from which on t_comm / t_compute ≤ 1. Speeds are peaks: of H100s the "
        "data sheet's, of this machine the matmul library's on one thread.")


def main(arguments):
    """Prints it for the reader's own machine; the exit code."""
    try:
        tera, giga, ranks, size = map(float, [*arguments, "4"][:4])
        if min(tera, giga, size) <= 0 or ranks < 2:
            raise ValueError
    except ValueError:
        print("usage: TFLOPS GB_PER_S RANKS [BYTES], all above 0 and at least 2 ranks; "
              "try 0.1 6.5 2", file=sys.stderr)
        return 2
    tokens = enough_tokens(ranks, 1e12 * tera, 1e9 * giga, size)
    print(f"{tokens:,.0f} tokens of a rank hide its all-reduce")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
