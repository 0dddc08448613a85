"""Judge of ch09.ex2: what the emulated GPU counts of a tiled product."""

SIZE = M, N, K = 96, 160, 64
TILE, BYTES = 32, 4
TILES = (M // TILE) * (N // TILE)


def measure(lab):
    """Bytes that the blocks of one rung ask of global memory."""
    return lab.kernels("ch09.matmul", *SIZE)["tiled"]["bytes"]


def suspects(measured):
    """[(a wrong answer, its words)]"""
    return [((M * K + K * N + M * N) * BYTES, "each matrix once is what a cache without end would leave: blocks "
                                              "of a row of tiles all ask for the same rows of a"),
            (TILES * 2 * TILE * K * BYTES, "the tiles of c are written, too"),
            (measured / BYTES, "these are numbers: one of f32 has 4 bytes"),
            (measured / TILES, "this is what one block asks for: c has 15 tiles"),
            (TILES * (TILE * K + TILE * TILE) * BYTES, "a block needs rows of a and columns of b: two tiles in "
                                                       "each step")]
