"""When can the experts' work hide the way of their rows? The cheatsheet's overlap ratio, that of gated
experts, and the one of runs.

    python3 -m ch06_expert.figures.hiding TFLOPS GB_PER_S EP WIDTH [BYTES]

prints the ratio: a rank's speed, its link, ranks, the experts' width, and the bytes of a value.
"""
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links, train
from tools.book.short_runs import table

from . import memory, ways

GATED, PLAIN = 4.5, 3  # operations of an MLP for each value that is sent, over h_ff
H100, BYTES = 989e12, 2              # operations a second in bf16, without sparsity
NVLINK, NETWORK, GPUS = 450e9, 50e9, 8  # bytes a second of an H100, each way; of a node
SHAPE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2, "seq_len": 256,
         "ffn_hidden_size": 256, "micro_batch_size": 2, "dtype": "f32",
         "steps": 9, "trace_steps": 9}
# (ranks, E, k, h_ff) of the runs; with k = E every expert gets all tokens
CASES = ((2, 2, 2, 256), (2, 8, 2, 256), (2, 8, 2, 1024), (4, 8, 2, 256), (4, 8, 8, 256))
GB_PER_S = 0.5          # of the link that they are replayed on
VALUE_BYTES = 4


def ratio(ep, width, flops, bandwidth, of_a_value=BYTES, leaves=None):
    """t_comm / t_compute of gated experts: a row and its output and both gradients are 4 h values, of
    which a part leaves; the row's work is 18 h h_ff. Tokens, k and h cancel. bandwidth: bytes."""
    leaves = (ep - 1) / ep if leaves is None else leaves
    return leaves / (GATED * width) * flops / (bandwidth / of_a_value)


def of_book(ep, experts, hidden_size, flops, bandwidth, of_a_value=BYTES):
    """The cheatsheet's: (EP-1) peak_flops / (12 num_experts hidden_size peak_bw), in values a second."""
    return (ep - 1) / (12 * experts * hidden_size) * flops / (bandwidth / of_a_value)


# --- H100s ----------------------------------------------------------------------------------------


def large(nodes):
    """[(model, nodes of a rank's experts, ep, way, ratio, the book's)]; nodes: what
    counts.route() found for some numbers of nodes."""
    found = []
    for model, shape in (("Mixtral 8x7B", memory.MIXTRAL), ("DeepSeek-V3", memory.DEEPSEEK)):
        experts, k = shape["num_experts"], shape["num_experts_per_tok"]
        width = shape.get("moe_ffn_hidden_size", shape["ffn_hidden_size"])

        def add(count, ep, way, link, leaves=None, model=model, experts=experts, width=width,
                shape=shape):
            found.append((model, count, ep, way, ratio(ep, width, H100, link, leaves=leaves),
                          of_book(ep, experts, shape["hidden_size"], H100, link)))
        add(1, GPUS, "direct", NVLINK)
        if experts == 8:
            add(GPUS, GPUS, "direct", NETWORK)
            continue
        add(GPUS, GPUS * GPUS, "direct", NETWORK, 1 - 1 / GPUS)
        for allowed in (GPUS, 4):
            copies = next(own["once"] for own in nodes if own["allowed"] == allowed)
            add(GPUS, GPUS * GPUS, f"by_node, M = {allowed}", NETWORK, copies / k)
    return found


def large_table(nodes):
    rows = [[model, str(count), str(ep), f"`{way.split(',')[0]}`" + way[len(way.split(',')[0]):],
             f"{book:.3f}", f"{own:.2f}"] for model, count, ep, way, own, book in large(nodes)]
    return table(["model", "nodes", "`ep`", "`--dispatch`", "the book's ratio", "ratio of gated experts"],
                 rows, "t_comm / t_compute in bf16, on H100s. Up to 1, a micro-batch's rows can hide under the experts' work on "
                 "another one. "
                 f"Data sheets: {H100 / 1e12:.0f} TFLOP/s, {NVLINK / 1e9:.0f} GB/s each way in a node, "
                 f"{NETWORK / 1e9:.0f} GB/s for each GPU between nodes. On several nodes only rows that cross between nodes count.")


# --- runs -----------------------------------------------------------------------------------------


def measure(chapter):
    """{gb_per_s, cases: [{ranks, experts, k, width, matmul_gflops, products_gflops, comm_ms, compute_ms}]}"""
    say("book: rows of experts beside their products")
    with tempfile.TemporaryDirectory(prefix="book_ratio_") as scratch:
        return {"gb_per_s": GB_PER_S, "cases": [
            _measure(chapter, Path(scratch) / str(number), *case)
            for number, case in enumerate(CASES)]}


def _measure(chapter, run_dir, ranks, experts, k, width):
    recorded = train(chapter, run_dir, ranks, ep_size=ranks, num_experts=experts,
                     num_experts_per_tok=k, moe_ffn_hidden_size=width, **SHAPE)
    facts = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    products = [_products(rank) for rank in recorded.ranks]
    flops, seconds = (statistics.fmean(values) for values in zip(*products))
    rows = ways.of_rows(on_links(recorded, f"node=0,{GB_PER_S:g}"))[0]
    return {"ranks": ranks, "experts": experts, "k": k, "width": width,
            "matmul_gflops": round(facts["matmul_gflops"] / ranks, 3),
            "products_gflops": round(flops / seconds / 1e9, 3), "comm_ms": round(rows, 3),
            "compute_ms": round(1000 * seconds, 3)}


def _products(rank):
    """(operations, CPU seconds) of the experts' products in a later step of a rank; medians."""
    steps = {}
    for span in rank.spans:
        if span.category == "op" and span.name.startswith("grouped_linear"):
            own = steps.setdefault(span.step, [0, 0.0])
            own[0] += span.flops
            own[1] += span.cpu_duration / 1e6
    return tuple(map(statistics.median, zip(*list(steps.values())[SKIPPED_STEPS:])))


def of_case(own, gb_per_s):
    """(the book's, of gated experts, measured, of gated experts at the products' own rate)"""
    bandwidth = 1e9 * gb_per_s
    return (of_book(own["ranks"], own["experts"], SHAPE["hidden_size"], 1e9 * own["matmul_gflops"],
                    bandwidth, VALUE_BYTES),
            *(found for rate in ("matmul_gflops", "products_gflops") for found in [
                ratio(own["ranks"], own["width"], 1e9 * own[rate], bandwidth, VALUE_BYTES)]),
            own["comm_ms"] / own["compute_ms"])


def ratios_table(measured):
    """Ratios of runs beside both formulas."""
    rows = []
    for own in measured["cases"]:
        book, peak, reached, found = of_case(own, measured["gb_per_s"])
        rows.append([str(own["ranks"]), str(own["experts"]), str(own["k"]), f"{own['width']:,}", f"{book:.3f}",
                     f"{peak:.3f}", f"{own['matmul_gflops']:.1f}", f"{own['products_gflops']:.1f}",
                     f"{reached:.3f}", f"{found:.3f}"])
    return table(["`ep`", "E", "k", "h_ff", "the book's", "4.5 h_ff", "matmul, GFLOP/s",
                  "experts' products, GFLOP/s", "4.5 h_ff at the products' rate", "measured"], rows,
                 f"t_comm / t_compute of a step in f32, h = {SHAPE['hidden_size']}. Rows replayed at "
                 f"{measured['gb_per_s']:g} GB/s without latency; products by their CPU time. GFLOP/s of a "
                 "rank: the first by `run.json`, measured before the run.")


def main(arguments):
    """Prints it for the reader's own machine; the exit code."""
    try:
        tera, giga, ep, width, size = map(float, [*arguments, str(BYTES)][:5])
        if min(tera, giga, width, size) <= 0 or ep < 2:
            raise ValueError
    except ValueError:
        print("usage: TFLOPS GB_PER_S EP WIDTH [BYTES], all above 0 and at least 2 ranks; "
              "try 989 450 8 2048", file=sys.stderr)
        return 2
    print(f"t_comm / t_compute: {ratio(ep, width, 1e12 * tera, 1e9 * giga, size):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
