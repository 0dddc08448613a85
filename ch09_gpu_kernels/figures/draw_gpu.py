"""Schematics: what a GPU is made of, and how often a chain of operations goes to its memory and back."""
import re

from tools.base import ROOT
from tools.lab import lab, on_card
from tools.look import schematic
from tools.look.schematic import MARGIN, WIDTH

FOLDER = "ch09_gpu_kernels/kernels/ideas"
WARP, BANKS, WORD = 32, 32, 4  # threads; of shared memory, each of four bytes a cycle
QUARTERS = 4  # of a multiprocessor: each with a warp scheduler, a tensor core, a quarter of cores and registers
L2_MB, MEMORY_GB, L1_KIB = 50, 80, 256  # of an H100 SXM5, by NVIDIA's architecture white paper; L1 with shared memory
FMA_READS = 3  # numbers


def limits():
    """{name: value} of one multiprocessor, as the lab of occupancy has them, and how many there are."""
    text = (ROOT / FOLDER / "occupancy.h").read_text(encoding="utf-8")
    found = {name: int(value) << int(shift or 0)
             for name, value, shift in re.findall(r"(\w+) = (\d+)(?: << (\d+))?", text)}
    schedule = (ROOT / "tests/lab/schedule.h").read_text(encoding="utf-8")
    return {**found, "multiprocessors": int(re.search(r"kMultiprocessors = (\d+)", schedule)[1])}


def bytes_a_cycle():
    """{what: bytes that one multiprocessor gets of it in a cycle}, at the clock that the data sheet's rate in f32 implies."""
    count = limits()["multiprocessors"]
    gigahertz = lab.SHEET["f32"] * 1e3 / (2 * count * on_card.CORES)
    return {"registers": on_card.CORES * FMA_READS * WORD, "shared memory": BANKS * WORD,
            "device memory": lab.SHEET["memory"] / gigahertz / count}


def gpu():
    """All multiprocessors above the L2 and the memory that they share; and one of them from inside."""
    has, fed = limits(), bytes_a_cycle()
    count, shared, registers = has["multiprocessors"], has["shared_bytes"] >> 10, has["registers"] * WORD >> 10
    drawing = schematic.Drawing(520, "What an H100 is made of", (
        f"Left: {count} multiprocessors, which share an L2 cache of {L2_MB} MB; below it the device memory of {MEMORY_GB} GB. "
        f"Right: one multiprocessor has {QUARTERS} quarters, each with {on_card.CORES // QUARTERS} cores, a tensor core and "
        f"{registers // QUARTERS} KiB of registers, and {L1_KIB} KiB of L1 cache and shared memory. Below: bytes that a multiprocessor gets "
        "in a cycle."))
    left, across, side = MARGIN, 12, 24
    drawing.text(left, 32, f"{count} multiprocessors", bold=True)
    for i in range(count):
        drawing.box(left + i % across * side, 48 + i // across * 17, side - 4, 13, "forward" if i == across - 1 else "plain")
    width, rows = across * side - 4, -(-count // across)
    y = 48 + rows * 17 + 16
    drawing.box(left, y, width, 44, "gather", f"L2 cache, {L2_MB} MB", 20)
    drawing.arrow((left + 24, y + 92), (left + 24, y + 48))
    drawing.text(left + 44, y + 78, f"{lab.SHEET['memory']:,} GB/s", 20)
    drawing.box(left, y + 96, width, 44, "activations", f"device memory, {MEMORY_GB} GB", 20)
    inner = left + width + 50
    drawing.line((left + width, 50), (inner, 48), quiet=True, dashed=True)
    drawing.line((left + width, 60), (inner, y + 148), quiet=True, dashed=True)
    drawing.text(inner, 32, "one multiprocessor", bold=True)
    drawing.box(inner, 48, WIDTH - MARGIN - inner, y + 100, "plain")
    each, tall = (WIDTH - MARGIN - inner - 24) / 2, 106
    for i in range(QUARTERS):
        drawing.box(inner + 8 + i % 2 * (each + 8), 56 + i // 2 * (tall + 8), each, tall, "forward",
                    f"{on_card.CORES // QUARTERS} cores\ntensor core\nregisters\n{registers // QUARTERS} KiB", 20)
    at = 56 + 2 * (tall + 8)
    drawing.box(inner + 8, at, 2 * each + 8, 62, "gather", f"L1 and shared memory\n{L1_KIB} KiB, {shared} for shared", 20)
    drawing.text(inner + 8, at + 90, f"up to {has['threads'] // WARP} warps of {WARP} threads", 20)
    top = y + 190
    drawing.text(MARGIN, top, "Bytes that one multiprocessor gets in a cycle:", 20, bold=True)
    third = (WIDTH - 2 * MARGIN) / 3
    for i, (what, kind) in enumerate((("registers", "forward"), ("shared memory", "gather"), ("device memory", "activations"))):
        drawing.box(MARGIN + i * third, top + 14, 20, 20, kind)
        drawing.text(MARGIN + i * third + 28, top + 32, f"{what}:", 20)
        drawing.text(MARGIN + i * third + 28, top + 60, f"{fed[what]:,.0f}", 20, bold=True)
    return drawing.svg()


# Of the chain of ELU, kernel by kernel: what it reads and what it writes, in bytes an element.
CHAIN = (("x < 0", ("x",), "mask"), ("exp", ("x",), "e"), ("- 1", ("e",), "d"), ("· α", ("d",), "a"),
         ("where", ("mask", "a", "x"), "y"))
BYTES = {"mask": 1}  # all others are f32


def moved(operation):
    """(bytes that it reads of an element, that it writes)"""
    _, reads, writes = operation
    return sum(BYTES.get(name, WORD) for name in reads), BYTES.get(writes, WORD)


def round_trips():
    """A chain of operations one by one, each from memory and back; and as one kernel."""
    drawing = schematic.Drawing(462, "ELU, a kernel an operation and one for all", (
        "Above: five kernels, each of which reads its operands from memory and writes its result there. Below: one kernel "
        "reads x, keeps what lies between in registers, and writes y. Arrows have bytes an element."))
    chained, fused = sum(sum(moved(each)) for each in CHAIN), 2 * WORD

    def row(top, title, kernels, total):
        drawing.text(MARGIN, top, title, bold=True)
        drawing.text(WIDTH - MARGIN, top, f"{total} bytes an element", 20, "end")
        width = (WIDTH - 2 * MARGIN + 12) / len(CHAIN)
        drawing.box(MARGIN, top + 118, WIDTH - 2 * MARGIN, 40, "activations", "device memory", 20)
        for i, (name, reads, writes) in enumerate(kernels):
            span = width * len(CHAIN) / len(kernels) - 12
            x = MARGIN + i * (span + 12)
            drawing.box(x, top + 16, span, 44, "forward", name, 20)
            middle = x + span / 2
            drawing.arrow((middle - 34, top + 116), (middle - 34, top + 62))
            drawing.text(middle - 26, top + 96, str(reads), 20)
            drawing.arrow((middle + 16, top + 62), (middle + 16, top + 116))
            drawing.text(middle + 24, top + 96, str(writes), 20)

    row(32, "a kernel an operation", [(name, *moved((name, reads, writes))) for name, reads, writes in CHAIN], chained)
    row(246, "fused", [("x < 0 ? α · (exp(x) - 1) : x", WORD, WORD)], fused)
    drawing.text(MARGIN, 444, "Left arrow: read. Right arrow: written. A mask has one byte.", 20, ink="muted")
    return drawing.svg()


FIGURES = {"gpu.svg": gpu, "round_trips.svg": round_trips}
