"""What `./book bench` compares a step with, PyTorch apart (peers.py): its matrix products alone, the
rates of memory and matmul; and where the time of a recorded run went.
"""
import json
import shlex
from collections import defaultdict

from tools.base import BookError
from tools.look import trace as traces
from tools.run import build
from tools.run.estimates import output_of, words_of

PROGRAM = "op_bench"
PORTABLE_PROGRAM = "op_bench_portable"  # with kernels for any CPU
MATMUL, ATTENTION, MEMORY = "matmul", "attention", "memory-bound"
UNITS = {MATMUL: "GFLOP/s", ATTENTION: "GFLOP/s", MEMORY: "GB/s"}


def op_bench(measure, program=PROGRAM, **flags):
    """What op_bench prints of one measurement: bound, memory, attention or techniques."""
    command = [str(build.binary(build.RELEASE, program)),
               *words_of({"measure": measure, **flags})]
    printed = output_of(command)
    try:
        return json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError):
        raise BookError(f"`{shlex.join(command)}` printed no result:\n{printed}")


def kind_of(name):
    """What bounds an operator."""
    if name.startswith("linear_") or name == "matmul":
        return MATMUL
    return ATTENTION if name in ("attention_forward", "attention_backward") else MEMORY


def profile(path, first_step):
    """Where the time of rank 0's recorded steps from `first_step` on went, per step.

    {step_ms, outside_ms, ops: [{op, kind, calls, ms, gflops, gb_per_s}]}, the slowest first;
    outside: in no operator, which is what calling them costs.
    """
    trace = traces.load(path)
    steps = [step for step in traces.steps(trace) if step >= first_step]
    if not steps:
        raise BookError(f"{path}: no step from {first_step} on was recorded")
    sums = defaultdict(lambda: [0, 0.0, 0, 0])
    step_us = 0.0
    for span in trace.ranks[0].work:
        if span.step not in steps:
            continue
        if span.name == traces.STEP:
            step_us += span.duration
        elif span.category == "op":
            sums[span.name] = [total + value for total, value in zip(
                sums[span.name], (1, span.duration, span.flops, span.bytes))]
    waited = sum(wait.duration for wait in trace.ranks[0].stalls if wait.step in steps)
    return _per_step(sums, step_us, waited, len(steps))


def _per_step(sums, step_us, waited_us, steps):
    """The profile of `steps` steps from {op: [calls, us, flops, bytes]}."""
    ops = [{"op": name, "kind": kind_of(name), "calls": calls // steps, "ms": 1e-3 * us / steps,
            "gflops": 1e-3 * flops / us, "gb_per_s": 1e-3 * moved / us}
           for name, (calls, us, flops, moved) in sorted(sums.items(), key=lambda i: -i[1][1])]
    inside = sum(us for _, us, _, _ in sums.values())
    return {"step_ms": 1e-3 * step_us / steps, "waited_ms": 1e-3 * waited_us / steps,
            "outside_ms": 1e-3 * max(0.0, step_us - inside - waited_us) / steps, "ops": ops}


def by_kind(profile_):
    """{kind: {ms, rate}} of a profile: rate in GFLOP/s, of what is memory-bound in GB/s."""
    found = {}
    for kind in UNITS:
        unit = "gb_per_s" if kind == MEMORY else "gflops"
        ops = [op for op in profile_["ops"] if op["kind"] == kind]
        ms = sum(op["ms"] for op in ops)
        if ms > 0:
            found[kind] = {"ms": ms, "rate": sum(op["ms"] * op[unit] for op in ops) / ms}
    return found
