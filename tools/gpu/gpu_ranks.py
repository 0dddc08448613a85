"""The parts of ./book gpu-check with ranks: several that share the GPU, or with a card each, and
NCCL's world of one."""
import json
import statistics
import tempfile
from pathlib import Path

from tools.gpu.gpu_part import (NO_TIME, QUIET, SMALL_MODEL, Fail, Skip, asked, billion, json_line,
                                largest_difference, middle, needs_cublas, read_metrics, words_of)
from tools.gpu.tolerances import TOLERANCES
from tools.run import gpu

RANKS = (2, 4, 8)
TOLERANCE = TOLERANCES["steps"]["f64"]  # PLAIN computes in f64
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 64, "seq_len": 32}
PLAIN = {"dtype": "f64", "micro_batch_size": 2, "warmup_steps": 0, "min_lr_ratio": 1}
STEPS = 3
TURNS = 3  # of the two that a step's cost is told from, as many as there is time for
SANITIZER, SANITIZER_ERROR = "compute-sanitizer", 9
BYTES, EMULATED_BYTES = 256 << 20, 1 << 16
# What is asked of a GPU.
MOST_ALONE, LEAST_STAGED = 0.01, 0.6


def layouts_of(root):
    """{chapter with ranks: {layout: its flags}}, the newest chapter last. A chapter's chapter.json
    has its own under "layouts"; those of its parent come before them."""
    found = {}
    for manifest in sorted(Path(root).glob("ch[0-9][0-9]_*/chapter.json")):
        fields = json.loads(manifest.read_text(encoding="utf-8"))
        layouts = {**found.get(fields.get("parent"), {}), **fields.get("layouts", {})}
        if layouts:
            found[manifest.parent.name] = layouts
    return found


def plan(layouts, numbers):
    """[(chapter, layout, ranks)]: of every chapter what it brings, on all these numbers of ranks; then
    on the first of them what the newest has of those before it."""
    own = [(chapter, list(names)[-1]) for chapter, names in layouts.items()]
    newest, names = list(layouts.items())[-1]
    return [*((*each, ranks) for ranks in numbers for each in own),
            *((newest, name, numbers[0]) for name in list(names)[:-1])]


def with_afab(layouts):
    """The same, and after the chapter's own layout with a pipeline the one that sends most at once."""
    found = {}
    for chapter, names in layouts.items():
        found[chapter] = {}
        for name, flags in names.items():
            if "pp_size" in flags:
                found[chapter]["afab"] = {**flags, "pp_schedule": "afab"}
            found[chapter][name] = flags
    return found


def _ranks(check, ranks, words):
    """What so many ranks of a program print."""
    if not check.place.mpiexec:
        raise Skip("there is no mpiexec")
    env = {**check.rank_environment(ranks), "USP_MATMUL_SECONDS": "0"}
    return check.output([*check.place.mpiexec, "-n", str(ranks), *words], env=env)


def _train(check, chapter, device, ranks, flags, before=()):
    """metrics.jsonl of a chapter's run. before: a tool under which each rank runs."""
    program = check.program(chapter, on_device=device == "cuda")
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        run_dir = Path(scratch) / "run"
        _ranks(check, ranks, [*before, program, *words_of({
            **QUIET, **flags, "device": device, "run_dir": run_dir, "data": check.place.corpus})])
        return read_metrics(run_dir)


def _chapters(check):
    if not check.place.layouts:
        raise Skip("no chapter with ranks is here")
    return check.place.layouts


def _beside_cpu(check, layouts, tries, comm):
    """Losses and gradient norms of [(chapter, layout, ranks)] beside those on the CPU, and where
    messages are ours the bytes sent; Fail where they differ."""
    rows, far = [], []
    figures = {"largest relative difference from as many ranks on the CPU, in f64": rows}
    for chapter, layout, ranks in tries:
        flags = {**TINY, **PLAIN, **layouts[chapter][layout], "steps": STEPS}
        try:
            here = _train(check, chapter, "cuda", ranks, {**flags, **comm})
            there = _train(check, chapter, "cpu", ranks, flags)
        except Fail as fail:
            raise Fail(f"{chapter}, {layout}, {ranks} ranks: {fail}", figures) from fail
        worst = {name: largest_difference(here, there, name) for name in ("loss", "grad_norm")}
        rows.append({"chapter": chapter, "layout": layout, "ranks": ranks, "steps": len(here),
                     **{name: f"{value:.1e}" for name, value in worst.items()}})
        alike = True
        if not comm:  # NCCL's messages have no headers
            alike = [record["comm_bytes"] for record in here] == [record["comm_bytes"]
                                                                  for record in there]
            rows[-1]["bytes sent"] = "the same" if alike else "others"
        if not (len(here) == len(there) == STEPS and max(worst.values()) <= TOLERANCE and alike):
            far.append(f"{chapter} with {layout} on {ranks} ranks")
    if far:
        raise Fail(f"too far from the CPU, of which {TOLERANCE:.0e} is asked: {'; '.join(far)}",
                   figures)
    return figures


def run_ranks(check):
    """Every chapter's layouts, of ranks that share the device."""
    needs_cublas(check)
    layouts = _chapters(check)
    return _beside_cpu(check, layouts, plan(layouts, RANKS), {})


def run_cards(check):
    """The same by NCCL, of ranks with a card each: collectives by ZeRO and tensor parallelism, pairs by
    the ring and the pipeline, which with AFAB has most messages on their way."""
    needs_cublas(check)
    if not check.libraries["NCCL"]:
        raise Skip("there is no NCCL")
    layouts = with_afab(_chapters(check))
    return _beside_cpu(check, layouts, plan(layouts, (check.cards,)), {"comm": "nccl"})


def run_sanitized(check):
    """A step of two ranks under compute-sanitizer: what they exchange lies within its bounds."""
    needs_cublas(check)
    sanitizer = gpu.find_tool(SANITIZER)
    if sanitizer is None:
        raise Skip(f"{SANITIZER} is not here")
    chapter, layouts = next(iter(_chapters(check).items()))
    own = list(layouts.values())[-1]
    _train(check, chapter, "cuda", 2, {**TINY, **PLAIN, **own, "steps": 1},
           [sanitizer, "--tool", "memcheck", "--error-exitcode", str(SANITIZER_ERROR)])
    return {}


def run_alone(check):
    """What a step takes longer where NCCL has a world of one rank, in turns with a step without."""
    needs_cublas(check)
    if not check.emulated and not check.libraries["NCCL"]:
        raise Skip("there is no NCCL")
    chapter = next(iter(_chapters(check)))
    flags = {**SMALL_MODEL, "dtype": "f32"} if check.emulated else billion(check)
    losses, times = {}, {"nccl": [], "mpi": []}
    for _ in check.turns(1 if check.emulated else TURNS):
        for comm, found in times.items():
            records = _train(check, chapter, "cuda", 1, {**flags, "comm": comm})
            losses[comm] = [record["loss"] for record in records]
            found.append(float(middle(records)["step_ms"]))
    cost = None if check.emulated else statistics.median(
        ours / without for ours, without in zip(times["nccl"], times["mpi"])) - 1
    figures = {"what is asked": [asked("what NCCL's world of one adds to a step", cost,
                                       most=MOST_ALONE)]}
    if losses["nccl"] != losses["mpi"]:
        raise Fail("with NCCL one rank learns otherwise than without", figures)
    return figures


def run_staged(check):
    """An all-reduce of two ranks by way of the host, in turns with what host and GPU allow."""
    needs_cublas(check)
    words = [check.program("gpu_comm_bench"), "--bytes",
             str(EMULATED_BYTES if check.emulated else BYTES),
             "--rounds", "1" if check.emulated else "7"]
    found = json_line(_ranks(check, 2, words))
    stages = {name: float(found[f"{name}_ms"]) for name in ("download", "host", "upload")}
    row = {"ranks": found["ranks"], "MB": found["bytes"] / 1e6}
    # The stages of pieces can go on side by side; then the slowest of them is all that one sees.
    best = None if check.emulated else max(stages.values()) / float(found["all_reduce_ms"])
    row.update({f"{name}, ms": NO_TIME if check.emulated else f"{ms:.2f}" for name, ms in
                {"all-reduce": float(found["all_reduce_ms"]), **stages}.items()})
    row["stages one after another, of it"] = NO_TIME if check.emulated else \
        f"{sum(stages.values()) / float(found['all_reduce_ms']):.2f}"
    return {"": [row], "what is asked": [asked(
        "the slowest of the stages, of the all-reduce", best, least=LEAST_STAGED)]}
