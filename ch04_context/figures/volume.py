"""What a rank sends for the attention of one layer, by formula: every --cp_method.

    python3 -m ch04_context.figures.volume CP SEQ_LEN

prints it for the book's 8B.
"""
import sys

from . import runs

LLAMA_8B = {"h": 4096, "a": 32, "a_kv": 8}
SEQ_LEN, RANKS = 131072, (2, 4, 8, 16, 32)
OWN, ACC = 2, 4  # bytes of a bf16 value, and of a sum
NODE = 8         # the largest group that exchanges tokens for heads under ring_ulysses
MIB = 2**20


def sent(method, cp, s, h, a, a_kv, u=None):
    """(forward, backward): bytes that a rank of cp sends for one sample and layer. Keys and values
    go round n places, or to all of them; u ranks exchange tokens for heads."""
    u = {"ring": 1, "all_gather": 1, "ulysses": cp}.get(method, u)
    n, rows, d = cp // u, s // cp, h // a
    keys = u * rows * 2 * max(1, a_kv // u) * d  # of the group's rows, this rank's kv heads
    forward, backward = (n - 1) * keys * OWN, (n - 1) * keys * (OWN + ACC)
    qkv, out = rows * (a + 2 * max(a_kv, u)) * d, rows * h
    back = OWN if u <= a_kv else ACC  # copies of a kv head are still to be summed
    forward += (u - 1) * (qkv + out) * OWN // u
    backward += (u - 1) * (qkv * back + out * OWN) // u
    return forward, backward


def table():
    """MiB of a layer of 8B over cp: forward and backward."""
    rows = []
    for cp in RANKS:
        cells = []
        for method in runs.METHODS:
            group = min(NODE, cp // 2)
            if method == "ring_ulysses" and group < 2:
                cells.append("")
                continue
            forward, backward = sent(method, cp, SEQ_LEN, **LLAMA_8B, u=group)
            cells.append(f"{forward / MIB:,.0f} + {backward / MIB:,.0f}")
        rows.append([str(cp), *cells])
    return runs.table(["`cp`", *(f"`{method}`" for method in runs.METHODS)], rows,
                      f"MiB that a rank sends for a layer of 8B and a sample of {SEQ_LEN:,} tokens, "
                      "forward + backward. Gradients of keys and values are in f32, all else in bf16. "
                      f"Groups of `ring_ulysses` have at most {NODE} ranks, and at least two lie "
                      "on a ring.")


def main(arguments):
    """Prints it for one cp; the exit code."""
    try:
        cp, s = map(int, arguments)
        if cp < 2 or s % (2 * cp):
            raise ValueError
    except ValueError:
        print(f"usage: CP SEQ_LEN, a multiple of 2 CP; try 8 {SEQ_LEN}", file=sys.stderr)
        return 2
    for method in ("ring", "all_gather", "ulysses"):
        forward, backward = sent(method, cp, s, **LLAMA_8B)
        print(f"{method:<12} {forward / MIB:10.1f} MiB forward {backward / MIB:10.1f} backward")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
