"""Schematics of what a rank may compute while its messages travel."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

MATMUL, SUM, GATHER = 224, 216, 150  # widths
CHUNKS = 4                           # of a product
SEGMENT, PIECE, MESSAGE = 148, 76, 100  # widths: of half a layer, of a chunk or half; of a sum
# (what it is, [(kind, label, width)] that a rank computes, the same of what travels below it); a
# kind of None is a gap.
BACKWARD = (
    ("none", (("backward", "dx = dy W", MATMUL), ("wait", "", SUM),
              ("backward", "dW = dyᵀ x", MATMUL)),
     ((None, "", MATMUL), ("tp", "dx: all-reduce", SUM))),
    ("weight_grad", (("backward", "dx = dy W", MATMUL), ("backward", "dW = dyᵀ x", MATMUL)),
     ((None, "", MATMUL), ("tp", "dx: all-reduce", SUM))),
    ("weight_grad, sequence parallel",
     (("backward", "dx = dy W", MATMUL), ("backward", "dW = dyᵀ x", MATMUL)),
     (("tp_gather", "x: gather", GATHER), (None, "", MATMUL - GATHER),
      ("tp", "dx: reduce-scatter", SUM))))
FORWARD = (
    ("weight_grad: nothing hides forward's sums",
     (("forward", "attention", SEGMENT), ("wait", "", MESSAGE), ("forward", "MLP", SEGMENT),
      ("wait", "", MESSAGE)),
     ((None, "", SEGMENT), ("tp", "sum", MESSAGE), (None, "", SEGMENT), ("tp", "sum", MESSAGE))),
    ("chunks: of the last product of a region",
     (("forward", "attn", PIECE), *(("forward", f"o {i}", 56) for i in range(CHUNKS)),
      ("wait", "", 52)),
     ((None, "", PIECE + 56), *(("tp", str(i), 56) for i in range(CHUNKS - 1)),
      ("tp", str(CHUNKS - 1), 52))),
    ("batch_halves: of the micro-batch's samples",
     tuple(("forward", f"{name} {half}", PIECE + 20) for name in ("attn", "MLP")
           for half in (0, 1)),
     ((None, "", PIECE + 20), *(("tp", f"sum {half}", PIECE + 20) for _ in range(2)
                                for half in (0, 1)))))


def _draw(title, ways, legend):
    drawing = schematic.Drawing(52 + len(ways) * 138, title, "; ".join(
        f"{way}: {', '.join(label or 'waits' for _, label, _ in computed)}"
        for way, computed, _ in ways))
    for number, (way, computed, travels) in enumerate(ways):
        y = 14 + number * 138
        drawing.text(MARGIN, y + 22, way, bold=True)
        for top, boxes in ((y + 36, computed), (y + 78, travels)):
            x = MARGIN
            for kind, label, width in boxes:
                if kind:
                    drawing.box(x, top, width - 4, 38, kind, label, 20)
                x += width
            assert x <= WIDTH - MARGIN
    drawing.legend(14 + len(ways) * 138 + 8, legend)
    return drawing.svg()


def backward():
    """A column-parallel layer's backward: what is computed, and below it what travels."""
    return _draw("Backward of a column-parallel layer", BACKWARD,
                 {"backward": "backward", "tp": "sums", "tp_gather": "gathers",
                  "wait": "the rank waits"})


def forward():
    """A layer's forward: what is computed, and below it what travels."""
    return _draw("Forward of a layer", FORWARD, {"forward": "forward", "tp": "sums",
                                                 "wait": "the rank waits"})


FIGURES = {"overlap_backward.svg": backward, "overlap_forward.svg": forward}
