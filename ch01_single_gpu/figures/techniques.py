"""What the techniques that make a step fast gained: what a step takes, and would take without each.

Where a chapter has a flag for it, whole runs tell; the operations that a technique replaces are
timed by op_bench, and row operations in kernels that are compiled for any CPU. Of all rounds the
quickest counts: what two ways differ by may be less than what disturbs either.
"""
from tools.bench import limits

# What the tables call a technique.
NAMES = {
    "memory_is_kept": "memory kept from step to step",
    "attention_in_blocks": "attention in blocks, nothing stored",
    "rows_in_registers": "row operations in this CPU's registers",
    "one_product_for_gate_and_up": "one product for gate and up",
    "one_product_for_qkv": "one product for q, k and v",
    "first_gradients_overwrite": "first gradients overwrite",
}


def measure(cases, memory, naive_runs, flags):
    """[{config, dtype, step_ms, techniques: [{technique, with_ms, without_ms}]}] of the profiled
    cases; `*_ms` are what the technique takes of a step, and what takes its place.

    cases: profiles (limits.profile()) with the keys config, dtype and activation_bytes.
    memory: {dtype: op_bench's memory-bound operations}. flags: {config: {flag: value}}.
    naive_runs: (config, dtype) to [(step_ms, step_ms with naive attention)].
    """
    portable = {dtype: {entry["op"]: entry["gb_per_s"] for entry in limits.op_bench(
        "memory", limits.PORTABLE_PROGRAM, dtype=dtype, seconds=0.5)} for dtype in memory}
    found = []
    for case in cases:
        config, dtype = case["config"], case["dtype"]
        timed = limits.op_bench("techniques", **flags[config], dtype=dtype,
                                activation_bytes=case["activation_bytes"])
        runs = naive_runs(config, dtype)
        timed.append({"technique": "attention_in_blocks",
                      "with_ms": min(blocks for blocks, _ in runs),
                      "without_ms": min(naive for _, naive in runs)})
        timed.append({"technique": "rows_in_registers",
                      **rows_in_registers(case["ops"], memory[dtype], portable[dtype])})
        found.append({"config": config, "dtype": dtype, "step_ms": case["step_ms"],
                      "techniques": sorted(timed, key=lambda e: list(NAMES).index(e["technique"]))})
    return found


def rows_in_registers(ops, native, portable):
    """{with_ms, without_ms} of a step's row operations: they move the same bytes at other rates."""
    faster = {entry["op"]: entry["gb_per_s"] / portable[entry["op"]] for entry in native}
    rows = [op for op in ops if op["op"] in faster]
    return {"with_ms": sum(op["ms"] for op in rows),
            "without_ms": sum(op["ms"] * faster[op["op"]] for op in rows)}


def longer_without(entry, step_ms):
    """How many times as long a step would take without the technique."""
    return 1 + (entry["without_ms"] - entry["with_ms"]) / step_ms


def lines(found):
    """What measure() found, as Markdown."""
    table = ["| a step takes, without | " + " | ".join(
        f"{case['config']} {case['dtype']}" for case in found) + " |",
        "|---|" + "---:|" * len(found)]
    for index, entry in enumerate(found[0]["techniques"]):
        table.append(f"| {NAMES[entry['technique']]} | " + " | ".join(
            _cell(case["techniques"][index], case["step_ms"]) for case in found) + " |")
    table.append("| a step with all of them, ms | "
                 + " | ".join(f"{case['step_ms']:.1f}" for case in found) + " |")
    return table


def _cell(entry, step_ms):
    """Milliseconds, and how many times as long the step would take by them."""
    return f"{entry['without_ms'] - entry['with_ms']:+.1f} ms, × {longer_without(entry, step_ms):.2f}"
