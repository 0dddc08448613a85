"""Schematics of what backward needs: a block with what it saves, and what recomputation keeps.

SAVED is what the code saves, in the book's symbols; a course test compares it with a recorded run.
"""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

# (layer, what it saves, its name in a recording, bytes of a block at 2 bytes a number)
SAVED = (("RMSNorm", "x", "residual", "2 s b h"),
         ("q, k, v", "its input", "norm", "2 s b h"),
         ("attention", "q, k, v", "qkv", "2 s b h (1 + 2 a_kv/a)"),
         ("", "probabilities", "probabilities", "2 s b a s"),
         ("output", "its input", "attention", "2 s b h"),
         ("RMSNorm", "x", "residual", "2 s b h"),
         ("gate, up", "its input", "norm", "2 s b h"),
         ("SwiGLU", "gate, up", "gate_up", "4 s b h_ff"),
         ("down", "its input", "swiglu", "2 s b h_ff"))
PROBABILITIES = 3         # of SAVED: what selective recomputation drops
ADDED_AFTER = (4, 8)      # the residual connections

# (mode, what of SAVED is kept, the book's bytes of a block, what is computed again)
MODES = (("none", range(len(SAVED)), "s b h (34 + 5 a s/h)", ""),
         ("selective", [i for i in range(len(SAVED)) if i != PROBABILITIES], "34 s b h", "scores"),
         ("full", [0], "2 s b h", "again"))


def block_saved():
    """One transformer block, from above, and what each layer keeps for its backward pass."""
    row, height, left, right, plus = 52, 42, 66, 268, 40
    drawing = schematic.Drawing(700, "What one transformer block saves for its backward pass",
                                "Each layer keeps what it reads: " + "; ".join(
                                    f"{layer or 'attention'}: {what}, {size} bytes"
                                    for layer, what, _, size in SAVED))
    drawing.text(left, 40, "a block", bold=True)
    drawing.text(right, 40, "keeps, in bytes (bf16)", bold=True)
    y, begin, middle = 82, 68, left + 88
    drawing.arrow((middle, 52), (middle, y - 2))
    for number, (layer, what, _, size) in enumerate(SAVED):
        tall = height + row if layer == "attention" else height
        if layer:
            drawing.box(left, y, 176, tall, "forward", layer)
        drawing.line((left + 178, y + height / 2), (right - 2, y + height / 2), quiet=True)
        dropped = number == PROBABILITIES
        drawing.box(right, y, WIDTH - MARGIN - right, height, "ghost" if dropped else "activations")
        ink = "ink" if dropped else schematic.palette.text_on(schematic.FILLS["activations"])
        drawing.text(right + 12, y + height / 2 + 8, what, 20, ink=ink)
        drawing.text(WIDTH - MARGIN - 12, y + height / 2 + 8, size, 20, "end", ink, bold=True)
        y += row
        if number in ADDED_AFTER:  # the residual connection goes around the layers
            drawing.text(middle, y + 18, "+", 30, "middle", bold=True)
            drawing.arrow((middle, begin), (left - 26, begin), (left - 26, y + 8),
                          (middle - 16, y + 8))
            begin, y = y + 30, y + plus
    drawing.text(left, y + 24, "Every layer keeps what it reads.", 20)
    drawing.text(left, y + 54, "Dashed: kept only by attention that stores them whole.", 20)
    return drawing.svg()


def recompute():
    """For each mode: what of the block is kept, and what the backward pass computes again."""
    drawing = schematic.Drawing(622, "What recomputation keeps, and what it computes again",
                                "; ".join(f"{mode}: {size} bytes by the book" for mode, _, size, _
                                          in MODES))
    cell, top, unit = 44, 24, 128  # of work: one forward pass
    for number, (mode, kept, size, again) in enumerate(MODES):
        y = top + number * 182
        drawing.text(MARGIN, y + 26, mode, bold=True)
        drawing.text(WIDTH - MARGIN, y + 26, size, 20, "end")
        drawing.text(MARGIN, y + 74, "keeps", 20, ink="muted")
        for index in range(len(SAVED)):
            drawing.box(150 + index * (cell + 8), y + 46, cell, 40,
                        "activations" if index in kept else "ghost")
        drawing.text(MARGIN, y + 130, "works", 20, ink="muted")
        x = 150
        drawing.box(x, y + 102, unit, 44, "forward", "forward")
        x += unit + 6
        extra = {"": 0, "scores": 90, "again": unit}[again]  # the scores are less; their name is not
        if again:
            drawing.box(x, y + 102, extra, 44, "forward", again, 20)
            x += extra + 6
        drawing.box(x, y + 102, 2 * unit, 44, "backward", "backward")
    drawing.legend(582, {"activations": "kept", "ghost": "dropped, computed again"})
    return drawing.svg()


FIGURES = {"block_saved.svg": block_saved, "recompute.svg": recompute}
