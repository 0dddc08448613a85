"""What the pages of kernels show: counts of ./book lab, and what a card's data sheet says of them.

labs.json holds what the labs' programs print, which no machine changes. make.py asks for all of it here.
"""
import re
from math import log10

from tools.base import ROOT
from tools.book.showcase import json_text
from tools.lab import lab
from tools.lab.labs import LABS
from tools.look import palette, schematic
from tools.look.schematic import MARGIN, WIDTH

DATA = "labs.json"
PRODUCT, STALLS = "ch09.matmul", "ch09.stalls"
IDEAS = ("primer", "layer_norm", "coalescing", "banks", "divergence", "occupancy", "fusion", "reduction")
ATTENTION, LENGTHS, MASKS, DECODING = "ch09.attention", (64, 128, 256), "ch09.masks", "ch09.decoding"
DEGREES, EXPONENTIALS, ORDERS, BLOCKS = (f"attention_{word}" for word in ("degrees", "exponentials", "orders", "blocks"))
SHOWN = (PRODUCT, STALLS, ATTENTION, MASKS, DECODING, *(f"ch09.{idea}" for idea in IDEAS))
CARD, SHEET = lab.CARD, lab.SHEET  # of the roofline
HEADS = {"predicted_bytes": "bytes, predicted", "bytes": "bytes, counted",
         "predicted_flops_per_byte": "flops/byte", "sectors_per_load": "sectors/load",
         "sectors_per_store": "sectors/store", "requests": "requests", "global_requests": "requests, global",
         "shared_requests": "requests, shared", "fmas_per_request": "FMAs/request",
         "percent_of_peak_at_most": "% of peak at most",
         "predicted_bank_conflicts": "conflicts, predicted", "bank_conflicts": "conflicts, counted",
         "predicted_divergent_branches": "divergent, predicted", "divergent_branches": "divergent, counted",
         "predicted_barriers": "barriers, predicted", "barriers": "barriers, counted",
         "atomic_steps": "atomic steps", "launches": "launches", "scores_bytes": "bytes of scores", "blocks": "blocks",
         "predicted_blocks_held": "blocks held",
         "predicted_warps_held": "warps held", "predicted_bytes_in_flight": "bytes in flight"}
LEFT_OUT = ("predicted_flops", "flops")  # of a table: wide, and for tensor cores alone
AXIS = (0.04, 200.0)  # of the roofline: flops/byte
RATES = (0.1, 1500.0)  # TFLOP/s


def count(program):
    """{labs.json: text}, where the labs' programs are built beside a chapter's."""
    programs = {LABS[name].program for name in SHOWN}
    if not all((program.parent / each).exists() for each in programs):
        return {}
    data = {name: record(name, program.parent) for name in SHOWN}
    lengths = [record(ATTENTION, program.parent, (length, 64)) for length in LENGTHS]
    words = {f"attention_{word}": lab.run_program(program.parent / LABS[ATTENTION].program, word)
             for word in ("degrees", "exponentials", "orders", "blocks")}
    return {DATA: json_text({**data, "attention_lengths": lengths, **words})}


def record(name, folder, size=None):
    """What a lab's program prints, at the lab's own sizes unless others are given."""
    each = LABS[name]
    size = size or tuple(each.size.values())
    rungs = lab.run_program(folder / each.program, *each.words, *size)
    for rung in rungs:
        rung.pop("error", None)  # whose last digits are the machine's
    return {"size": size, "rungs": rungs}


def texts(data):
    """Every table and the roofline."""
    found = {"ladder.md": table(PRODUCT, data), "profiler.md": profiler_table(data[PRODUCT]["rungs"]),
             "roofline.md": roofline_table(data[PRODUCT]["rungs"]),
             "roofline.svg": roofline(data[PRODUCT]["rungs"]),
             "lab_stalls.md": table(STALLS, data),
             "lab_attention.md": table(ATTENTION, data), "attention_lengths.md": lengths_table(data),
             "attention_backward.md": backward_table(data),
             "attention_masks.md": masks_table(data[MASKS]),
             "attention_degrees.md": degrees_table(data[DEGREES]),
             "attention_exponentials.md": exponentials_table(data[EXPONENTIALS]),
             "attention_orders.md": orders_table(data[ORDERS]),
             "attention_blocks.md": blocks_table(data[BLOCKS]),
             "attention_decoding.md": decoding_table(data[DECODING])}
    return {**found, **{f"lab_{idea}.md": table(f"ch09.{idea}", data) for idea in IDEAS}}


def table(name, data):
    """A lab's counts as Markdown."""
    rungs, size = data[name]["rungs"], dict(zip(LABS[name].size, data[name]["size"]))
    keys = [key for key in HEADS if any(key in rung for rung in rungs) and key not in LEFT_OUT]
    heads = ["rung", *(HEADS[key] for key in keys)]
    rows = [[rung["name"], *(cell(rung.get(key)) for key in keys)] for rung in rungs]
    if name == PRODUCT:
        lines = lab.rungs(name)
        heads.insert(1, "lines")
        rows = [[row[0], lines[row[0]].length, *row[1:]] for row in rows]
    return markdown(f"{LABS[name].title.format(**size)}, on the emulated GPU.", heads, rows)


def lengths_table(data):
    """Bytes that attention asks for as the sequence grows."""
    rows = []
    for each in data["attention_lengths"]:
        by = {rung["name"]: rung for rung in each["rungs"]}
        rows.append([str(each["size"][0]), *(cell(by["naive"][key]) for key in ("predicted_bytes", "bytes", "scores_bytes")),
                     cell(by["flash_1"]["bytes"]), *(cell(by["blockwise"][key]) for key in ("predicted_bytes", "bytes")),
                     cell(by["naive"]["bytes"] / by["blockwise"]["bytes"])])
    return markdown("Two heads of 64 channels in f32, on the emulated GPU.",
                    ["S", "naive, predicted", "naive, counted", "naive keeps as scores", "flash_1", "blockwise, predicted",
                     "blockwise, counted", "naive / blockwise"], rows)


def backward_table(data):
    """What attention asks for and multiplies, forward and backward, where tiles fill the sequence; and what backward
    would read if forward had kept its weights."""
    rows = []
    for each in data["attention_lengths"]:
        length, by = each["size"][0], {rung["name"]: rung for rung in each["rungs"]}
        if length % 128 == 0:
            forward, backward, product = by["flash_2"], by["flash_2_backward"], by["naive"]["predicted_flops"] // 2
            weights = by["naive"]["scores_bytes"] // 2  # of bf16
            rows.append([str(length), *(cell(one) for one in (
                forward["bytes"], backward["predicted_bytes"], backward["bytes"], forward["flops"] // product,
                backward["flops"] // product, backward["barriers"], weights, weights * 2 // length))])
    return markdown("Two heads of 64 channels in bf16, on the emulated GPU.",
                    ["S", "forward, bytes", "backward, predicted", "backward, counted", "products, forward",
                     "products, backward", "barriers, backward", "weights, if kept", "lse, kept"], rows)


def degrees_table(rows):
    """How far off a polynomial's powers of two are, and what they cost."""
    def millionths(error):
        return f"{error * 1e6:,.0f}" if error > 1e-5 else f"{error * 1e6:.2g}"
    return markdown("Over fractions from -1/2 to 1/2, in f32.", ["degree", "FMAs", "largest error, millionths", "taken"],
                    [[row["name"], str(row["fmas"]), millionths(float(row["error"])), "yes" if row["chosen"] else ""]
                     for row in rows])


def exponentials_table(rows):
    """What a row's softmax takes."""
    return markdown("A row of 1,024 keys, on the emulated GPU.",
                    ["rung", "tiles", "weights by the unit", "weights by the polynomial", "rescalings"],
                    [[row["name"], *(cell(round(row[key], 1) if row[key] % 1 else int(row[key]))
                                     for key in ("tiles", "by_unit", "by_polynomial", "rescalings"))] for row in rows])


def orders_table(rows):
    """Tiles of the multiprocessor that has the most, by the order in which blocks begin."""
    keys = ("lightest_by_head", "heaviest_by_head", "heaviest_of_all", "persistent")
    return markdown("Tiles of 128 queries by 128 keys under a causal mask, on 132 multiprocessors, by calculation.",
                    ["heads × S", "blocks", "mean tiles", "most: first queries first, by head",
                     "most: last queries first, by head", "most: last queries first, all heads",
                     "most: turns back and forth", "over the mean, %"],
                    [[row["name"].replace("x", "×"), cell(row["blocks"]), cell(row["mean"]), *(cell(row[key]) for key in keys),
                      cell(100 * (row[keys[-1]] / row["mean"] - 1))] for row in rows])


def blocks_table(rows):
    """What a block's memory is worth: fewer queries in it, and keys pass by more often."""
    keys = ("kept", "predicted_bytes_of_keys", "bytes_of_keys", "predicted_bytes", "bytes")
    return markdown("Two heads of 256 queries and keys, 64 channels in bf16, on the emulated GPU.",
                    ["r", "M = r d", "keys and values, 2 S² d² / M", "counted", "all bytes, predicted", "all bytes, counted"],
                    [[row["name"], *(cell(row[key]) for key in keys)] for row in rows])


def decoding_table(data):
    """One query with its cache: keys whole, and split."""
    keys, width = data["size"]
    return markdown(f"One query of eight heads that share two heads of {keys:,} keys, {width} channels wide, on the emulated "
                    "GPU.",
                    ["kernel", "blocks", "keys of a block", "bytes, predicted", "bytes, counted", "bytes of parts"],
                    [[rung["name"] + (f" in {rung['parts']} parts" if rung["parts"] > 1 else ""),
                      *(cell(rung[key]) for key in ("blocks", "keys_of_a_block", "predicted_bytes", "bytes",
                                                    "parts_bytes"))] for rung in data["rungs"]])


def masks_table(data):
    """Of each mask: how many tiles hold a score that is seen, and how many a rung went over."""
    piece, width = data["size"]
    tile = 4 * 2 * 128 * 64 * width  # operations of flash_2 for a tile of both heads
    by = {(rung["mask"], rung["name"]): rung for rung in data["rungs"]}
    rows = []
    for mask in dict.fromkeys(mask for mask, _ in by):
        forward, backward = by[mask, "flash_2"], by[mask, "flash_2_backward"]
        rows.append([mask, *(cell(one) for one in (
            forward["flops_without_a_mask"] // tile, forward["predicted_flops"] // tile, forward["flops"] // tile,
            forward["predicted_bytes"], forward["bytes"],
            round(100 * backward["flops"] / backward["flops_without_a_mask"]),
            backward["predicted_bytes"], backward["bytes"]))])
    return markdown(
        f"Two samples, two heads of {width} channels that share keys, pieces of {piece} positions, on the emulated GPU.",
        ["mask", "tiles of a head", "with a seen score", "counted", "bytes, predicted", "bytes, counted",
         "backward, % of all products", "its bytes, predicted", "its bytes, counted"], rows)


def markdown(caption, heads, rows):
    line = "|".join(["", "---", *["---:"] * (len(heads) - 1), ""])
    body = "\n".join("| " + " | ".join(row) + " |" for row in [heads, *rows][1:])
    return f"{caption}\n\n| {' | '.join(heads)} |\n{line}\n{body}\n"


def cell(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 1 and value > 0 else f"{value:,.1f}"
    return f"{value:,}"


# Of the book's first profile, a product of 4096 x 4096 matrices: sectors, and of these the excessive ones.
BOOK_SIZE, BOOK_SECTORS, BOOK_EXCESSIVE = 4096, 70_883_737_600, 60_144_222_208
SECTOR, IDEAL = 32, 4  # bytes; sectors of a request for 32 numbers


def profiler_table(rungs):
    """What formulas say of the book's product, beside what its profiler counted."""
    requests = BOOK_SIZE ** 3 // 32 + BOOK_SIZE ** 2 // 32  # of lanes a row apart: reads of a, writes of c
    excessive = {"naive": requests * (32 - IDEAL), "coalesced": 0}
    rows = []
    for rung in rungs:
        if rung["name"] in excessive:
            sectors, too_many = rung["bytes_at_4096"] // SECTOR, excessive[rung["name"]]
            book = (BOOK_SECTORS, BOOK_EXCESSIVE) if rung["name"] == "naive" else (None, None)
            rows.append([rung["name"], cell(sectors), cell(book[0]), cell(too_many), cell(book[1]),
                         f"{100 * too_many / sectors:.1f}"])
    return markdown(f"A product of {BOOK_SIZE} x {BOOK_SIZE} matrices, in sectors of {SECTOR} bytes.",
                    ["rung", "sectors, by formula", "by the book's profiler", "excessive, by formula",
                     "excessive, by the profiler", "of all, %"], rows)


# --- the roofline ---------------------------------------------------------------------------------


def roofline_table(rungs):
    """For each rung: what memory alone would allow, and how often a byte has to come from a cache."""
    rows = []
    for rung in rungs:
        needed = SHEET[rung["type"]] / rung["predicted_flops_per_byte"]  # TB/s asked for at the peak
        rows.append([rung["name"], rung["type"], cell(rung["predicted_flops_per_byte"]),
                     cell(lab.attainable(rung)), cell(float(SHEET[rung["type"]])), cell(needed),
                     cell(max(0.0, 100 * (1 - SHEET["memory"] / 1e3 / needed)))])
    return markdown(
        f"{CARD}: {SHEET['memory'] / 1e3:.2f} TB/s, by its data sheet. Matrices of 4,096 x 4,096. Nothing is measured.",
        ["rung", "type", "flops/byte", "TFLOP/s from memory alone", "peak", "TB/s asked at the peak",
         "of it from caches, %"], rows)


def place(value, low_high, begin, end):
    """On a logarithmic axis."""
    low, high = low_high
    return begin + log10(value / low) / log10(high / low) * (end - begin)


def roofline(rungs):
    """Two roofs, and where on them each rung stands."""
    drawing = schematic.Drawing(520, "Where the rungs stand under an H100's roofs", (
        "Horizontal: operations for each byte that blocks ask for, from 0.06 of the first rung to 85 of the last. "
        "Vertical: what memory alone would allow, up to the peak of f32 or bf16."))
    left, right, top, bottom = MARGIN + 60, WIDTH - MARGIN, 40, 440

    def at(intensity, rate):
        return place(intensity, AXIS, left, right), place(rate, RATES, bottom, top)

    drawing.line(at(AXIS[0], RATES[0]), at(AXIS[1], RATES[0]), quiet=True)
    drawing.line(at(AXIS[0], RATES[0]), at(AXIS[0], RATES[1]), quiet=True)
    slope = SHEET["memory"] / 1e3
    drawing.line(at(AXIS[0], AXIS[0] * slope), at(AXIS[1], AXIS[1] * slope))
    for dtype in ("f32", "bf16"):
        x, y = at(min(SHEET[dtype] / slope, AXIS[1]), SHEET[dtype])
        if dtype == "f32":
            drawing.line((x, y), at(AXIS[1], SHEET[dtype]))
        else:
            drawing.line(at(1.2, SHEET[dtype]), at(AXIS[1], SHEET[dtype]), dashed=True)
        drawing.text(at(0.06, 1)[0], y + 7, f"{dtype}: {SHEET[dtype]} TFLOP/s", 20)
    for intensity, names in together(rungs).items():
        x, y = at(intensity, min(intensity * slope, SHEET[names[0]["type"]]))
        drawing.box(x - 7, y - 7, 14, 14, "forward" if names[0]["type"] == "f32" else "optimizer")
        label = names[0]["name"] + (f", +{len(names) - 1}" if len(names) > 1 else "")
        drop, anchor = (26, "start") if intensity < 10 else (6 if len(names) > 1 else -12, "end")  # to the side without a roof
        if intensity * slope > SHEET[names[0]["type"]]:
            x, drop, anchor = right, 28, "end"
        drawing.text(x + {"start": 16, "end": -16}[anchor] * (x < right), y + drop, label, 20, anchor=anchor)
    for value in (0.1, 1, 10, 100):
        drawing.text(at(value, 1)[0], bottom + 28, f"{value:g}", 20, anchor="middle")
        drawing.text(left - 8, at(1, value)[1] + 7, f"{value:g}", 20, anchor="end")
    drawing.text((left + right) / 2, bottom + 60, "operations a byte that blocks ask for", 20, anchor="middle")
    drawing.text(MARGIN, 24, "TFLOP/s", 20)
    return drawing.svg()


def together(rungs):
    """{flops/byte: rungs}, those that ask alike in one place."""
    found = {}
    for rung in rungs:
        near = next((at for at in found if abs(at / rung["predicted_flops_per_byte"] - 1) < 0.05),
                    rung["predicted_flops_per_byte"])
        found.setdefault(near, []).append(rung)
    return found


# --- drawings -------------------------------------------------------------------------------------


def lanes():
    """What a warp asks for in one step: 32 sectors, or four."""
    drawing = schematic.Drawing(310, "What 32 lanes ask for in one step", (
        "Above: each lane reads a number of another row, and 32 sectors come, of which a number each is used. Below: "
        "lanes read numbers beside each other, which lie in four sectors, all of which are used."))
    each = (WIDTH - 2 * MARGIN) / 16
    drawing.text(MARGIN, 30, "lanes a row apart: 32 sectors, 4 of 32 bytes used", 20)
    for i in range(16):
        drawing.box(MARGIN + i * each, 50, each - 6, 34, "ghost")
        drawing.box(MARGIN + i * each, 50, (each - 6) / 4, 34, "forward")
    drawing.text(WIDTH - MARGIN, 116, "(16 of them drawn)", 20, anchor="end", ink="muted")
    drawing.text(MARGIN, 186, "lanes beside each other: 4 sectors, all used", 20)
    for i in range(4):
        for j in range(8):
            drawing.box(MARGIN + i * 8 * 12 + i * 10 + j * 12, 206, 10, 34, "forward")
    drawing.text(MARGIN, 290, "A sector is 32 bytes: what the memory brings at least.", 20, ink="muted")
    return drawing.svg()


def stages():
    """Copies and products in turn, and under each other."""
    drawing = schematic.Drawing(380, "Copies before products, and copies under products", (
        "Above: each step copies its tiles, then multiplies them. Below: one warp asks for tiles of steps to come, "
        "and two groups of warps multiply those that have come."))
    width, copy, product = 66, "message", "forward"
    drawing.text(MARGIN, 30, "one after the other: tma_wgmma", 20)
    for i in range(4):
        drawing.box(MARGIN + 2 * i * width, 46, width - 4, 44, copy, str(i))
        drawing.box(MARGIN + (2 * i + 1) * width, 46, width - 4, 44, product, str(i))
    drawing.text(MARGIN, 140, "a ring of four stages: ring, persistent", 20)
    for i in range(8):
        drawing.box(MARGIN + i * width, 156, width - 4, 44, copy, str(i))
        drawing.box(MARGIN + (i + 1) * width, 206, width - 4, 44, product, str(i))
    y = drawing.legend(300, {copy: "copy of a step's tiles", product: "product"})
    drawing.text(MARGIN, y + 30, "Boxes have the step's number. Lengths are not to scale.", 20, ink="muted")
    return drawing.svg()


def constants(*files):
    """{name: value} of the constexpr int of sources of the product's rungs that are numbers."""
    folder = ROOT / LABS[PRODUCT].source
    return {name: int(value) for file in files
            for line in re.findall(r"constexpr int (.+?);", (folder / file).read_text(encoding="utf-8"))
            for name, value in re.findall(r"(\w+) = (\d+)", line)}


def tiles():
    """A block's tile, a warp's, an instruction's: where each lies, and what a number that is read there is good for."""
    has = constants("swizzled.h", "mma.cu")
    block, depth, rows, columns = (has[name] for name in ("kTile", "kDepth", "kRows", "kColumns"))
    deep, wide = 16, 8  # of an instruction
    drawing = schematic.Drawing(500, "Tiles within tiles", (
        f"Left: of c, in global memory, a block computes a tile of {block} by {block}, and walks along the rows of a and "
        f"columns of b that it needs. Middle: its warps have parts of {rows} by {columns}, whose operands they read from "
        f"shared memory. Right: a warp's part, in registers, is made of instructions of {deep} by {wide}."))
    left, top, panel = MARGIN, 64, 216
    for i, text in enumerate(("global memory", "shared memory", "registers")):
        drawing.text(left + i * (panel + 16), 34, text, bold=True)
    # a below, b above c, and the step that is on its way.
    strip, c, tile = 52, panel - 64, 48
    for name, box in (("a", (left, top + strip + 12, strip, c)), ("b", (left + strip + 12, top, c, strip)),
                      ("c", (left + strip + 12, top + strip + 12, c, c))):
        drawing.box(*box, "plain")
        drawing.text(box[0] + box[2] - 10, box[1] + box[3] - 10, name, anchor="end")
    x, y = left + strip + 12 + tile, top + strip + 12 + tile // 2
    drawing.box(left, y, strip, tile, "message")
    drawing.box(x, top, tile, strip, "message")
    drawing.box(x, y, tile, tile, "forward")
    for begin, end in (((left + 6, y + tile / 2), (left + strip - 6, y + tile / 2)),
                       ((x + tile / 2, top + 6), (x + tile / 2, top + strip - 6))):
        drawing.arrow(begin, end)
    across, down = block // columns, block // rows
    left += panel + 16
    for i in range(across * down):
        width, height = panel / across, panel / down
        drawing.box(left + i % across * width, top + i // across * height, width - 4, height - 4,
                    "forward" if i == 0 else "plain", str(i))
    left += panel + 16
    across, down = columns // wide, rows // deep
    for i in range(across * down):
        width, height = panel / 2 / across, panel / down
        drawing.box(left + i % across * width, top + i // across * height, width - 4, height - 4,
                    "forward" if i == 0 else "plain")
    y = top + panel + 30
    for i, (rows_of, columns_of, whose) in enumerate(((block, block, "block"), (rows, columns, "warp"), (deep, wide, "mma"))):
        drawing.text(MARGIN + i * (panel + 16), y, f"{whose}: {rows_of} × {columns_of}", 20)
    for i, (way, numbers) in enumerate((
            ("global → shared memory", f"{block}"), ("shared memory → registers", f"{columns} or {rows}"),
            ("registers → tensor cores", f"{wide} or {deep}"))):
        drawing.text(MARGIN, y + 44 + 36 * i, way, 20, ink="muted")
        drawing.text(MARGIN + 310, y + 44 + 36 * i, f"a number serves {numbers} products", 20)
    drawing.text(MARGIN, y + 160, f"The rung mma, whose steps are {depth} deep. Not to scale.", 20,
                 ink="muted")
    return drawing.svg()


SCHEMATICS = {"lanes.svg": lanes, "tiles.svg": tiles, "stages.svg": stages}
