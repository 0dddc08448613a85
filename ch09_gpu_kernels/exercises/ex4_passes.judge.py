"""Judge of ch09.ex4: what tensor cores do in a backward pass of attention that goes over its tiles twice."""

SIZE = LENGTH, WIDTH = 128, 128
HEADS = 2
PRODUCT = 2 * HEADS * LENGTH * LENGTH * WIDTH


def measure(lab):
    """Operations of the products of both passes."""
    return lab.kernels("ch09.attention", *SIZE)["flash_2_backward"]["flops"]


def suspects(measured):
    """[(a wrong answer, its words)]"""
    return [(5 * PRODUCT, "five products are those of one pass, in which blocks add to dQ as they come"),
            (4 * PRODUCT, "four products are those of the first pass, which makes dK and dV alone"),
            (6 * PRODUCT, "the second pass needs scores and dP again, and then dS K: three products"),
            (2 * PRODUCT, "two products are those of forward"),
            (measured / 2, "this is one head, or an addition was not counted")]
