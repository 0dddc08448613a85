"""When does a block of attention hide the keys and values of the next one?

    python3 -m ch04_context.figures.hiding TFLOPS GB_PER_S TOKENS_OF_A_RANK KV_SHARE [BYTES]

prints t_comm / t_compute of a ring's step: a rank's speed, a link's bandwidth, s/cp, a_kv/a, and
the bytes of a value. The book derives no such ratio.
"""
import sys

from . import runs

H100 = 989e12  # FLOP/s in bf16, without sparsity
# GB/s in one direction of a GPU: data sheet; a GPU's part of the book's 3,200 Gb/s of a node.
LINKS = {"NVLink": 450.0, "network": 50.0}
# {model: a_kv / a}
MODELS = {"8B": 8 / 32, "70B": 8 / 64, "as many kv heads as heads": 1.0}
OWN, ACC = 2, 4  # bytes of a bf16 value, and of a sum
# Products of a block: scores and out; backward makes scores again, and four gradients.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


def ratio(tokens, kv_share, flops, bandwidth, of_a_value=OWN, backward=False, hidden_by=1):
    """t_comm / t_compute of a step under zig-zag, where half of a block's pairs are computed.

    A message has 2 (a_kv/a) h · b s/cp values. A product has 2 · (s/cp)²/2 · b h operations, of
    pairs of which the mask leaves half. h and b cancel; tokens = s/cp do not. `hidden_by`: messages
    that one block has to hide, cp-1 of them in an all-gather."""
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    size = 3 * of_a_value if backward else of_a_value  # keys, and gradients of twice their bytes
    return hidden_by * 2 * kv_share * size / (products * tokens) * flops / bandwidth


def tokens_needed(kv_share, flops, bandwidth, **which):
    """Tokens of a rank from which on a step hides its message."""
    return ratio(1, kv_share, flops, bandwidth, **which)


def table():
    """H100s as Markdown: tokens of a rank that are enough."""
    rows = []
    for link, rate in LINKS.items():
        for model, share in MODELS.items():
            enough = [tokens_needed(share, H100, 1e9 * rate, **which)
                      for which in ({}, {"backward": True}, {"hidden_by": 7})]
            rows.append([f"{link}, {rate:g} GB/s", model, f"{share:g}",
                         *(f"{tokens:,.0f}" for tokens in enough)])
    return runs.table(["link of an H100", "model", "`a_kv/a`", "ring, forward", "ring, backward",
                       "all-gather of 8 ranks, forward"], rows,
                      "Tokens of a rank, s/cp, from which on t_comm / t_compute is at most 1, in "
                      "bf16 under zig-zag. Speeds are the data sheet's peaks.")


def main(arguments):
    """Prints it for the reader's own machine; the exit code."""
    try:
        tera, giga, tokens, share, size = map(float, [*arguments, str(OWN)][:5])
        if min(tera, giga, tokens, share, size) <= 0:
            raise ValueError
    except ValueError:
        print("usage: TFLOPS GB_PER_S TOKENS_OF_A_RANK KV_SHARE [BYTES], all above 0; "
              "try 989 450 4096 0.25", file=sys.stderr)
        return 2
    for name, backward in (("forward", False), ("backward", True)):
        found = ratio(tokens, share, 1e12 * tera, 1e9 * giga, size, backward)
        print(f"t_comm / t_compute of a step, {name}: {found:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
