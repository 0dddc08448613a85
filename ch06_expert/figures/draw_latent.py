"""Schematics of latent attention: where keys and values come from and what is cached of them, why a
position cannot go through the latent, and attention in the space of latents."""
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

CACHED, MADE, WEIGHT, QUERY = "activations", "forward", "plain", "message"
HEADS = 4
HALF = WIDTH / 2
SMALL = 20
FRAME = 294  # the top of the rows of heads, in origins()


def row_of_heads(drawing, left, top, width, name, kind, shared=0.0):
    """A box for each head; with `shared` that part of it, at its right, is of all heads."""
    cell = width / HEADS
    for head in range(HEADS):
        x, own = left + head * cell, cell - 8
        drawing.box(x, top, own * (1 - shared), 46, kind, f"{name}{head}", SMALL)
        if shared:
            drawing.box(x + own * (1 - shared), top, own * shared, 46, CACHED)


def frame(drawing, left, width):
    """Around the rows of all heads: an arrow that ends at it goes to each of them."""
    x, y = left - 5, left + width - 3
    drawing.line((x, FRAME), (y, FRAME), (y, 408), (x, 408), (x, FRAME), quiet=True, width=1.5)


def origins():
    """x -> keys and values of every head, and x -> a latent -> keys and values of every head."""
    drawing = schematic.Drawing(458, "Where keys and values come from", (
        "Left: x makes a key and a value of each head, and all of them are cached. Right: x makes "
        "a latent and one rotated piece of a key, and these are cached. The latent makes each head's "
        "own part of its key, and its value; the rotated piece is the rest of every key."))
    drawing.text(MARGIN, 34, "heads of their own", bold=True)
    drawing.text(HALF + 24, 34, "a latent", bold=True)
    width = HALF - MARGIN - 24
    for left in (MARGIN, HALF + 24):
        drawing.box(left + width / 2 - 50, 52, 100, 42, "optimizer", "x", bold=True)
    # Left: all of it is made of x.
    middle = MARGIN + width / 2
    frame(drawing, MARGIN, width)
    drawing.arrow((middle, 96), (middle, FRAME - 2))
    drawing.text(middle + 14, 200, "k_proj, v_proj", SMALL)
    row_of_heads(drawing, MARGIN, 302, width, "k", CACHED)
    row_of_heads(drawing, MARGIN, 356, width, "v", CACHED)
    # Right: by way of the latent.
    left = HALF + 24
    middle = left + width / 2
    latent = width * 0.64
    right = left + latent + 10 + (width - latent - 10) / 2  # the middle of k_rope
    drawing.line((middle, 96), (middle, 124))
    for x in (left + latent / 2, right):
        drawing.arrow((middle, 124), (x, 124), (x, 150))
    drawing.text(middle + 12, 115, "kv_a_proj", SMALL)
    drawing.box(left, 154, latent, 54, CACHED, "latent c", bold=True)
    drawing.box(left + latent + 10, 154, width - latent - 10, 54, CACHED, "k_rope", SMALL)
    frame(drawing, left, width)
    drawing.arrow((left + latent / 2, 210), (left + latent / 2, FRAME - 2))
    drawing.text(left + latent / 2 + 14, 248, "kv_b_proj", SMALL)
    row_of_heads(drawing, left, 302, width, "k", MADE, shared=0.33)
    row_of_heads(drawing, left, 356, width, "v", MADE)
    pieces = [left + (head + 1) * width / HEADS - 8 - 0.33 * (width / HEADS - 8) / 2
              for head in range(HEADS)]
    drawing.line((right, 210), (right, 270), quiet=True, width=2)
    drawing.line((pieces[0], 270), (max(right, pieces[-1]), 270), quiet=True, width=2)
    for x in pieces:
        drawing.arrow((x, 270), (x, 300), quiet=True, width=2)
    drawing.line((HALF, 20), (HALF, 408), quiet=True, dashed=True, width=1.5)
    drawing.legend(422, {CACHED: "in the cache", MADE: "made of it"})
    return drawing.svg()


def rotation():
    """The chain of a score, with RoPE in its middle and without."""
    drawing = schematic.Drawing(430, "Why a position cannot go through the latent", (
        "With RoPE on the whole key, a score is q turned by its position i, times the key W c turned by "
        "its position j: between q and W stands a rotation by i - j, which differs from key to key. "
        "Without it, W goes to the query once. So a key has a part without position, made of the latent, "
        "and a rotated part which all heads share and which is cached as it is."))
    drawing.text(MARGIN, 34, "If the whole key were rotated:", bold=True)
    cells = ((150, QUERY, "q, at i"), (200, "optimizer", "turn by i − j"), (130, WEIGHT, "W_k"),
             (150, CACHED, "c, at j"))
    x, top = MARGIN, 52
    places = []
    for width, kind, label in cells:
        drawing.box(x, top, width, 50, kind, label, SMALL)
        places.append(x + width / 2)
        x += width + 14
    drawing.arrow((places[2], top + 54), (places[2], top + 82), (places[0], top + 82),
                  (places[0], top + 56), strong=True, dashed=True)
    drawing.text(MARGIN, top + 112, "W_k cannot pass: the turn differs from key to key.", SMALL,
                 ink="accent")
    top = 232
    drawing.text(MARGIN, top - 20, "So a head's query and key have two parts:", bold=True)
    drawing.text(MARGIN, top + 32, "nope", SMALL, ink="muted")
    drawing.text(MARGIN, top + 132, "rope", SMALL, ink="muted")
    x, places = MARGIN + 70, []
    for width, kind, label in ((150, QUERY, "q"), (130, WEIGHT, "W_k"), (150, CACHED, "c, at j")):
        drawing.box(x, top, width, 50, kind, label, SMALL)
        places.append(x + width / 2)
        x += width + 14
    drawing.text(x + 6, top + 32, "no turn here", SMALL)
    drawing.arrow((places[1], top + 54), (places[1], top + 76), (places[0], top + 76),
                  (places[0], top + 56), strong=True)
    x = MARGIN + 70
    for width, kind, label in ((294, QUERY, "q_rope, turned by i"),
                               (270, CACHED, "k_rope, turned by j")):
        drawing.box(x, top + 100, width, 50, kind, label, SMALL)
        x += width + 14
    drawing.text(MARGIN, top + 184, "A score is the sum of both. k_rope is one for all heads.", SMALL)
    return drawing.svg()


def absorbed():
    """One head's new query among cached latents."""
    drawing = schematic.Drawing(520, "Attention in the space of latents", (
        "The query of one head goes through the transposed weight of its keys and becomes as wide as a "
        "latent. Beside it stands its rotated part. Its products with the cached rows give weights; the "
        "mean of the latents by these weights goes through the weight of the values, once. All heads read "
        "the same rows."))
    left, wide, narrow = MARGIN, 250, 100
    drawing.text(left, 34, "new token, head n", bold=True)
    drawing.box(left, 50, wide, 46, QUERY, "q, nope", SMALL)
    drawing.box(left + wide + 10, 50, narrow, 46, QUERY, "q_rope", SMALL)
    middle = left + wide / 2
    drawing.arrow((middle, 98), (middle, 150))
    drawing.text(middle + 14, 130, "W_kᵀ", SMALL)
    drawing.arrow((left + wide + 10 + narrow / 2, 98), (left + wide + 10 + narrow / 2, 150))
    drawing.text(left + wide + narrow / 2 + 24, 130, "turn by i", SMALL)
    drawing.box(left, 154, wide, 46, QUERY, "as wide as c", SMALL)
    drawing.box(left + wide + 10, 154, narrow, 46, QUERY, "at i", SMALL)
    drawing.text(left, 236, "the cache, for all heads", bold=True)
    for number, (latent, piece) in enumerate((
            ("c at 0", "k_rope"), ("c at 1", "k_rope"), ("…", "…"), ("c at i", "k_rope"))):
        y = 250 + number * 36
        drawing.box(left, y, wide, 32, CACHED, latent, SMALL)
        drawing.box(left + wide + 10, y, narrow, 32, CACHED, piece, SMALL)
    edge = left + wide + 10 + narrow
    x = edge + 80
    width = WIDTH - MARGIN - x
    drawing.text(x, 168, "for each position", SMALL, ink="muted")
    drawing.text(x, 194, "d_c + rope products", SMALL, ink="muted")
    drawing.arrow((edge + 4, 177), (edge + 40, 177), (edge + 40, 236), (x - 4, 236))
    drawing.line((edge + 2, 252), (edge + 10, 252), (edge + 10, 388), (edge + 2, 388), quiet=True)
    drawing.arrow((edge + 10, 266), (x - 4, 266))
    drawing.box(x, 212, width, 78, WEIGHT, "scores, softmax:\ni+1 weights", SMALL)
    y = 424
    drawing.arrow((x + width / 2, 292), (x + width / 2, y - 4))
    drawing.arrow((edge + 10, 374), (x + 40, 374), (x + 40, y - 4))
    drawing.text(edge + 22, 364, "every c", SMALL)
    drawing.box(x, y, width, 46, MADE, "mean of the c", SMALL)
    drawing.arrow((x - 4, y + 23), (left + wide + 4, y + 23))
    drawing.text((x + left + wide) / 2, y + 14, "W_v", SMALL, "middle")
    drawing.box(left, y, wide, 46, MADE, "output of head n", SMALL)
    drawing.legend(486, {QUERY: "of this head", CACHED: "in the cache", MADE: "result"})
    return drawing.svg()


FIGURES = {"latent_origins.svg": origins, "latent_rotation.svg": rotation,
           "latent_absorbed.svg": absorbed}
