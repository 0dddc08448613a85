"""When does a region of tensor parallelism hide its messages? The book's appendix A3.

    python3 -m ch03_tensor_sequence.figures.hiding TFLOPS GB_PER_S TP HIDDEN_SIZE [BYTES]

prints the ratios: a rank's speed, the bandwidth of an all-gather, ranks, channels, and the bytes
of a value.
"""
import sys

from . import runs

H100 = 989e12  # FLOP/s in bf16, without sparsity
# The book's bandwidths of all-gathers of 256 MB, GB/s, by the number of nodes of 8 H100.
NODES = {1: 249.8, 8: 69.0}
GPUS_OF_A_NODE = 8
HIDDEN_SIZES = (4096, 8192, 16384)
BYTES = 2               # of a bf16 value
LINEAR, REGION = 2, 24  # t_comm / t_compute = (tp-1)/(this · h) · peak_flops/peak_bw
MESSAGES = 4            # of a layer's forward pass: a gather and a reduce-scatter of each region


def ratio(tp, hidden_size, flops, bandwidth, products=LINEAR, of_a_value=BYTES):
    """t_comm / t_compute: a gather of s b h values, (tp-1)/tp · s b h / peak_bw, over the products
    after it: 2 · s b h · h/tp operations of one linear layer of h · h weights, or 24 of a layer, two regions.
    peak_bw are values a second. Tokens cancel."""
    return (tp - 1) / (products * hidden_size) * flops / (bandwidth / of_a_value)


def table():
    """H100s of the book as Markdown."""
    rows = []
    for nodes, rate in NODES.items():
        tp = nodes * GPUS_OF_A_NODE
        for hidden_size in HIDDEN_SIZES:
            rows.append([f"{tp}, {nodes} node{'s' * (nodes > 1)}", f"{rate:g}", f"{hidden_size:,}",
                         *(f"{ratio(tp, hidden_size, H100, 1e9 * rate, products):.2f}"
                           for products in (LINEAR, REGION, REGION / MESSAGES))])
    enough = ratio(GPUS_OF_A_NODE, 1, H100, 1e9 * NODES[1], REGION / MESSAGES)  # 1/h of it is the ratio
    return runs.table(["`tp` of H100s", "all-gather, GB/s", "h", "one message over one linear layer: 2",
                       "one message over a layer: 24", "a layer's four messages over the layer: 24 / 4"], rows,
                      "t_comm / t_compute of a forward pass in bf16, at the peaks of the data sheet. Above 1 the messages take "
                      f"longer than the products; within a node the last column is 1 at h = {enough:,.0f}.")


def main(arguments):
    """Prints it for the reader's own machine; the exit code."""
    try:
        tera, giga, tp, hidden_size, size = map(float, [*arguments, str(BYTES)][:5])
        if min(tera, giga, hidden_size, size) <= 0 or tp < 2:
            raise ValueError
    except ValueError:
        print("usage: TFLOPS GB_PER_S TP HIDDEN_SIZE [BYTES], all above 0 and at least 2 ranks; "
              "try 989 249.8 8 8192", file=sys.stderr)
        return 2
    for name, products in (("one message over one linear layer", LINEAR), ("one message over a layer", REGION),
                           ("a layer's four messages over the layer", REGION / MESSAGES)):
        found = ratio(tp, hidden_size, 1e12 * tera, 1e9 * giga, products, size)
        print(f"t_comm / t_compute, {name}: {found:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
