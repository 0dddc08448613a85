"""What ./book lab adds on a card: times by tools/bench/ladder_bench.cpp, in turns with cuBLAS; and the command that
puts a profiler's counts beside the emulator's."""
import re
import threading

from tools.base import show_path
from tools.process import output_of
from tools.run import build, gpu

PROGRAM = "ladder_bench"
KERNELS = "^kernel$"  # what all rungs of the product call theirs, and no library does
ACCESSES = {  # what the lab counts; and last, the bytes that caches leave for the memory
    "loads": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "stores": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "cp.async": "sm__sass_l1tex_m_xbar2l1tex_read_bytes_mem_global_op_ldgsts_cache_bypass.sum",
    "boxes in": "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "boxes out": "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum",
    "sectors/load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "memory, read": "dram__bytes_read.sum",
    "memory, written": "dram__bytes_write.sum"}
METRICS = {
    "accesses": tuple(ACCESSES.values()),
    # Warps that wait for this, at each instruction that is issued.
    "stalls": tuple(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio"
                    for why in ("mio_throttle", "long_scoreboard", "barrier"))}
UNIT = 8  # of lengths that every rung takes there: its rows follow each other without gaps
MIB, KIB = 1 << 20, 1 << 10
CORES = 128  # for f32 of a multiprocessor, from compute capability 8.6 on; those of 7.5 and 8.0 have half
EVERY_S = 0.1  # between two looks at the clock and the power


def find_capability():
    """Of the first GPU here, such as 90; None without one."""
    said = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    version = re.match(r"(\d+)\.(\d)\s", said or "")
    return int(version[1]) * 10 + int(version[2]) if version else None


def can_measure():
    """Is there a card, and what compiles for it?"""
    return find_capability() is not None and gpu.find_tool("nvcc") is not None


def ask_clock_and_power():
    """(MHz, W) of the first GPU at this moment; None where the driver does not say both."""
    said = output_of(["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"])
    found = re.match(r"([\d.]+), ([\d.]+)\s", said or "")
    return (float(found[1]), float(found[2])) if found else None


def watch(work, *arguments):
    """The records that work returns, and one of the lowest and highest clock and power meanwhile: rates depend on them."""
    seen, over = [], threading.Event()

    def look():
        while not over.wait(EVERY_S):
            seen.append(ask_clock_and_power())
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        records = work(*arguments)
    finally:
        over.set()
        thread.join()
    clocks, powers = zip(*filter(None, seen)) if any(seen) else ((), ())
    return [*records, *([{"sm_mhz": [min(clocks), max(clocks)], "watts": [min(powers), max(powers)],
                          "looks": len(clocks)}] if clocks else [])]


def profile_command(size, what="accesses"):
    """The line that runs each rung of the product once, at these sizes, under Nsight Compute."""
    program = show_path(build.binary(build.RELEASE, PROGRAM))
    sizes = " ".join(f"--{name.lower()} {value}" for name, value in size.items())
    return f"ncu --kernel-name regex:{KERNELS} --metrics {','.join(METRICS[what])} {program} {sizes} --seconds 0"


def rows_of_ladder(records):
    """Rows of a table, the head first: each rung in its turn, beside the first of its kind, and the rung before."""
    timed = [record for record in records if "ms" in record]
    first = timed[0]["name"] if timed else "the first"
    rate, head = ("gb_per_s", "GB/s") if timed and "gb_per_s" in timed[0] else ("tflops", "TFLOP/s")
    rows, before = [["rung", "type", "ms", "spread, %", head, f"of {first}", "gain"]], None
    for record in timed:
        is_first = record["name"] == first
        gain = "-" if is_first or before is None else f"{record[rate] / before:.2f}"
        rows.append([record["name"], record["type"], f"{record['ms']:.3f}", f"{100 * record['spread']:.1f}",
                     f"{record[rate]:.1f}", f"{record['of_first']:.3f}", gain])
        before = before if is_first and rate == "tflops" else record[rate]  # a library is no rung
    return rows


def rows_of_card(card):
    """The same of what a card is, by query, by data sheet and by measurement."""
    sheet = gpu.data_sheet(card["card"])

    def row(what, asked="-", listed="-", measured="-"):
        return [what, *("-" if x is None else x if isinstance(x, str) else f"{x:,.4g}" if isinstance(x, float) else
                        f"{x:,}" for x in (asked, listed, measured))]
    return [[card["card"], "by query", "by data sheet", "measured"],
            row("compute capability", card["capability"]),
            row("multiprocessors", card["multiprocessors"]),
            row("cores for f32", None, card["multiprocessors"] * (CORES if float(card["capability"]) > 8.0 else CORES // 2)),
            row("warps of one", card["warps"]),
            row("registers of one", card["registers"]),
            row("shared memory of one, KiB", card["shared_bytes"] // KIB),
            row("shared memory of a block, KiB", card["shared_bytes_of_a_block"] // KIB),
            row("L2 cache, MiB", card["l2_bytes"] / MIB),
            row("clock, MHz", card["clock_mhz"]),
            row("memory, GB/s", card["gb_per_s_by_clock"], sheet.get("memory"), card["copy_gb_per_s"]),
            row("f64, TFLOP/s", None, sheet.get("f64"), card["f64_tflops"]),
            row("f32, TFLOP/s", None, sheet.get("f32"), card["fma_tflops"]),
            row("bf16, TFLOP/s", None, sheet.get("bf16"), card["bf16_tflops"])]


def rows(records):
    """The table of one run."""
    return rows_of_card(records[0]) if "card" in records[0] else rows_of_ladder(records)


def remarks(records):
    """A line each: why rungs are not in it, and at which clock and power the others ran."""
    return [record["why"] if "why" in record else
            "meanwhile {:,.0f} to {:,.0f} MHz and {:,.0f} to {:,.0f} W".format(*record["sm_mhz"], *record["watts"])
            for record in records if "why" in record or "watts" in record]
