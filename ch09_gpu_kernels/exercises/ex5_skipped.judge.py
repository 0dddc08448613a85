"""Judge of ch09.ex5: asks each pair of a query and a key which tiles hold one that is seen."""
import re

from tools.exercise.lab import NotYet

PIECE, SIZE, KEYS = 96, 64, 384
POSITIONS = [*range(PIECE), *range(KEYS - PIECE, KEYS)]  # of rank 0's queries
DOCUMENTS = (0, 40, 200)
BLOCKS, TILES = len(POSITIONS) // SIZE, KEYS // SIZE
LINE = re.compile(rf"(\d):((?: +[.mw]){{{TILES}}})")


def begin(position):
    """Where its document begins."""
    return max(each for each in DOCUMENTS if each <= position)


def sees(query, key):
    return begin(query) <= key <= query


def pairs(block, tile):
    """(query, key), by their positions."""
    return [(query, key) for query in POSITIONS[block * SIZE:(block + 1) * SIZE]
            for key in range(tile * SIZE, (tile + 1) * SIZE)]


def letter(block, tile):
    seen = [sees(*pair) for pair in pairs(block, tile)]
    return "w" if all(seen) else "m" if any(seen) else "."


def read(answer):
    """{block: letters} of the reader's lines."""
    found = {}
    for line in answer.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if not match or int(match[1]) >= BLOCKS:
            raise NotYet(f"this line is no block with {TILES} letters: '{line.strip()}'",
                         "a line is such as: 0: m . . . . .")
        found[int(match[1])] = match[2].split()
    return found


def judge(answer, _lab):
    """Lines for a right table; NotYet for the first tile that is wrong."""
    found = read(answer)
    for block in range(BLOCKS):
        if block not in found:
            raise NotYet(f"a line is missing: block {block}")
        for tile, given in enumerate(found[block]):
            if given != letter(block, tile):
                raise NotYet(words(block, tile, given), f"block {block}, tile {tile} is not '{given}'")
    tiles = [letter(block, tile) for block in range(BLOCKS) for tile in range(TILES)]
    return [f"the rung goes over {len(tiles) - tiles.count('.')} of {len(tiles)} tiles, and masks "
            f"{tiles.count('m')} of them"]


def words(block, tile, given):
    """What to say of a letter that is wrong."""
    seen = [pair for pair in pairs(block, tile) if sees(*pair)]
    if not seen:
        one = pairs(block, tile)
        if all(query >= key for query, key in one):
            return "every key of this tile is before its queries, but of another document: nobody sees it"
        if any(query < key for query, key in one) and any(query >= key for query, key in one):
            return "the block's two runs of positions lie on both sides of this tile, and neither sees it"
        return "all keys of this tile are behind its queries"
    if given == ".":
        return f"query {seen[0][0]} sees key {seen[0][1]}, so the tile is needed"
    if given == "m":
        return "each query sees each key of this tile: a mask would change nothing"
    query, key = next(pair for pair in pairs(block, tile) if not sees(*pair))
    why = "behind it" if key > query else "of the document before"
    return f"query {query} does not see key {key}, which is {why}: this tile needs a mask"
