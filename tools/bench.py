"""`./book bench`: how fast a chapter trains, next to the matrix products of the same machine.

For a chapter of several ranks also: one rank with all threads against as many ranks of one thread
each, at equal global batch; the collectives, next to the MPI library's own; emulated links, next to
what was asked of them; what tracing costs; and how much communication the ways of data parallelism
hide.
"""
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from tools import build, machine, mpi, overlap, packages, runs
from tools.base import ROOT, BookError, say, show_path
from tools.process import git_commit, wait_for

# Shapes of the two models; flags that are not named keep the chapter's defaults.
CONFIGS = {
    "A": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4,
          "ffn_hidden_size": 688, "vocab_size": 256, "seq_len": 256, "micro_batch_size": 8},
    "B": {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8,
          "ffn_hidden_size": 1376, "vocab_size": 4096, "seq_len": 512, "micro_batch_size": 4},
}
DTYPES = ("f32", "bf16")
QUIET_FLAGS = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}
SKIPPED_STEPS = 3  # primitives are created, blocks allocated and pages touched in them
MIN_STEPS, MAX_STEPS = 3, 500
TRACING_ROUNDS = 7  # at least: it costs less than one round differs from the next
# Ranks and flags of comm_bench: on more ranks than cores MPI_Allreduce spins, so it gets less to do.
COLLECTIVES = ((2, ()), (8, ("--rounds", "50", "--large", "65536")))
MEASURES = ("tokens_per_s", "step_ms", "model_gflops", "matmul_gflops", "fraction")
# Of the fraction computed here and the `mfu` that the run itself reports.
MFU_TOLERANCE = 0.02


def flops_per_token(config):
    """Model FLOPs of forward and backward: 6 * matmul parameters (no lookup table) + 12 L h s."""
    hidden, layers = config["hidden_size"], config["num_layers"]
    kv_width = hidden // config["num_heads"] * config["num_kv_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    mlp = 3 * hidden * config["ffn_hidden_size"]
    parameters = layers * (attention + mlp) + config["vocab_size"] * hidden
    return 6 * parameters + 12 * layers * hidden * config["seq_len"]


def measure(records, run, config):
    """Medians of one run over the steps after the first SKIPPED_STEPS, as {measure: value}."""
    timed = [record for record in records if record["step"] >= SKIPPED_STEPS]
    if not timed:
        raise BookError(f"a run of {len(records)} steps has none left after the first "
                        f"{SKIPPED_STEPS}, which are not counted")
    matmul = float(run["matmul_gflops"])
    tokens_per_s = statistics.median(float(record["tokens_per_s"]) for record in timed)
    gflops = tokens_per_s * flops_per_token(config) / 1e9
    return {"tokens_per_s": tokens_per_s,
            "step_ms": statistics.median(float(record["step_ms"]) for record in timed),
            "model_gflops": gflops, "matmul_gflops": matmul, "fraction": gflops / matmul,
            "mfu_reported": statistics.median(float(record["mfu"]) for record in timed),
            "steps": len(timed)}


def summarise(rounds):
    """{measure: {median, min, max}} over the rounds of one configuration."""
    return {name: {"median": statistics.median(r[name] for r in rounds),
                   "min": min(r[name] for r in rounds), "max": max(r[name] for r in rounds)}
            for name in MEASURES}


def steps_for(seconds, step_ms):
    """Steps of a run that measures for about so many seconds."""
    return SKIPPED_STEPS + max(MIN_STEPS, min(MAX_STEPS, round(seconds * 1000 / step_ms)))


def _command(chapter, config, dtype, ranks, steps, run_dir, **more):
    """The command line of one run; the ranks share the samples of the configuration's batch."""
    flags = {**config, "dtype": dtype, "steps": steps, **QUIET_FLAGS, "run_dir": run_dir, **more}
    flags["micro_batch_size"] = config["micro_batch_size"] // ranks
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    program = [str(build.binary(build.RELEASE, chapter.name)), *words]
    return mpi.find().command(ranks, program) if ranks > 1 else program


def _run_quietly(command, ranks):
    """What a command prints; BookError with that output if it fails."""
    held = []
    code, signals = wait_for(command, machine.thread_environment(ranks=ranks), held.append)
    if signals:
        raise BookError("the benchmark was interrupted", 128 + signals[0])
    if code != 0:
        sys.stderr.write("".join(held))
        raise BookError(f"`{shlex.join(command)}` ended with exit code {code}")
    return "".join(held)


def _run_once(chapter, name, dtype, ranks, steps, **more):
    """Trains for so many steps in a temporary directory; what measure() returns."""
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        run_dir = Path(scratch) / "run"
        _run_quietly(_command(chapter, CONFIGS[name], dtype, ranks, steps, run_dir, **more),
                     ranks)
        records, _ = runs.read_metrics(run_dir)
        return measure(records, runs.read_run(run_dir), CONFIGS[name])


def _measure_rounds(chapter, seconds, rounds):
    """{(config, dtype, ranks): [measure() of each round]}; cases take turns within a round."""
    layouts = (1,) if chapter.ranks is None else (1, machine.usable_cores())
    cases = [(name, dtype, ranks) for name in CONFIGS for dtype in DTYPES
             for ranks in dict.fromkeys(layouts)
             if CONFIGS[name]["micro_batch_size"] % ranks == 0]
    steps = {}
    for case in cases:
        say(f"book: {_label(*case)}: how long is a step?")
        first = _run_once(chapter, *case, SKIPPED_STEPS + MIN_STEPS)
        steps[case] = steps_for(seconds, first["step_ms"])
    results = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            result = _run_once(chapter, *case, steps[case])
            results[case].append(result)
            say(f"book: round {number + 1}/{rounds}  {_label(*case):<15}  "
                f"{result['tokens_per_s']:9.0f} tokens/s  ({result['steps']} steps)")
    return results


def run_bench(chapter, seconds, rounds, json_file=None, install=True, skip_packages=False):
    """What `./book bench` does; returns the exit code."""
    out = Path(json_file) if json_file else ROOT / "build" / f"bench_{chapter.short}.json"
    if not out.parent.is_dir():  # found out before the minutes of measuring, not after
        raise BookError(f"cannot write {show_path(out)}: there is no such folder", 2)
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    if chapter.ranks is not None:
        build.prepare(build.RELEASE, "comm_bench")
    results = _measure_rounds(chapter, seconds, rounds)
    record = _record(chapter, results)
    if chapter.ranks is not None:
        record["layouts"] = compare_layouts(record["results"])
        record["collectives"] = _measure_collectives()
        record["links"] = _measure_links()
        record["tracing"] = _measure_tracing(chapter, seconds, rounds)
        record["overlap"] = overlap.measure(chapter)
        record["replay"] = overlap.check_replay(chapter)
    try:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot write {show_path(out)}: {error.strerror}")
    _print_table(record)
    print(f"\nJSON: {show_path(out)}")
    return 0


def _label(name, dtype, ranks):
    """A f32 2 ranks"""
    return f"{name} {dtype} {ranks} rank{'s' if ranks > 1 else ''}"


def compare_layouts(results):
    """[{config, dtype, ranks, ratio}]: tokens/s of several ranks over those of one, medians."""
    speed = {(r["config"], r["dtype"], r["ranks"]): r["summary"]["tokens_per_s"]["median"]
             for r in results}
    return [{"config": name, "dtype": dtype, "ranks": ranks,
             "ratio": tokens / speed[name, dtype, 1]}
            for (name, dtype, ranks), tokens in speed.items() if ranks > 1]


def _measure_collectives():
    """What comm_bench prints for each number of ranks."""
    program = str(build.binary(build.RELEASE, "comm_bench"))
    measured = []
    for ranks, flags in COLLECTIVES:
        say(f"book: collectives on {ranks} ranks")
        command = mpi.find().command(ranks, [program, *flags])
        measured.append(json.loads(_run_quietly(command, ranks).splitlines()[-1]))
    return measured


def _measure_links():
    """What comm_bench says of emulated links: asked and measured microseconds of messages."""
    say("book: emulated links")
    program = str(build.binary(build.RELEASE, "comm_bench"))
    return json.loads(_run_quietly(mpi.find().command(2, [program, "--links"]), 2).splitlines()[-1])


def _measure_tracing(chapter, seconds, rounds):
    """{untraced, traced}: medians of tokens/s in configuration A, every step traced or none."""
    ranks = machine.usable_cores()
    steps = steps_for(seconds, _run_once(chapter, "A", "f32", ranks, 8)["step_ms"])
    speeds = {"untraced": [], "traced": []}
    rounds = max(rounds, TRACING_ROUNDS)
    for number in range(rounds):
        for name, traced_steps in (("untraced", 0), ("traced", steps)):
            result = _run_once(chapter, "A", "f32", ranks, steps, trace_steps=traced_steps)
            speeds[name].append(result["tokens_per_s"])
            say(f"book: round {number + 1}/{rounds}  {name:<8}  {result['tokens_per_s']:9.0f} "
                "tokens/s")
    return {"ranks": ranks, "steps": steps,
            **{name: statistics.median(values) for name, values in speeds.items()}}


def _record(chapter, results):
    """Everything that is needed to read the numbers later."""
    threads = int(machine.thread_environment()["OMP_NUM_THREADS"])
    measured = [{"config": name, "dtype": dtype, "ranks": ranks, "flags": CONFIGS[name],
                 "flops_per_token": flops_per_token(CONFIGS[name]),
                 "summary": summarise(rounds), "rounds": rounds}
                for (name, dtype, ranks), rounds in results.items()]
    return {
        "chapter": chapter.name,
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["./book", *sys.argv[1:]]),
        "machine": {"cpu": machine.cpu_name(), "cores": machine.usable_cores(), "threads": threads,
                    "isa": [name for name, here in machine.instruction_sets().items() if here]},
        "results": measured,
    }


def _print_table(record):
    """The medians with their spread, and a word on any disagreement about the fraction."""
    host = record["machine"]
    print(f"{record['chapter']}  commit {record['commit'][:12]}  {record['date']}")
    print(f"{host['cpu']}, {host['threads']} threads, {' '.join(host['isa'])}")
    for name, config in CONFIGS.items():
        print(f"{name} = " + " ".join(f"--{flag} {value}" for flag, value in config.items()))
    print("\nMedian of rounds (lowest to highest)")
    print(f"{'':8} {'tokens/s':>24} {'step ms':>24} {'model GFLOP/s':>22} {'matmul GFLOP/s':>22} "
          f"{'fraction':>19}")
    for result in record["results"]:
        s = result["summary"]
        label = f"{result['config']} {result['dtype']} x{result['ranks']}"
        print(f"{label:<10} {_cell(s['tokens_per_s'], 0, 22)} "
              f"{_cell(s['step_ms'], 1, 24)} {_cell(s['model_gflops'], 1, 22)} "
              f"{_cell(s['matmul_gflops'], 1, 22)} {_cell(s['fraction'], 3, 19)}")
    for layout in record.get("layouts", []):
        print(f"{layout['config']} {layout['dtype']}: {layout['ranks']} ranks of one thread reach "
              f"{layout['ratio']:.3f} of the tokens/s of one rank with all threads")
    for entry in record.get("collectives", []):
        print(f"{entry['ranks']} ranks: all-reduce of {entry['small_bytes']} bytes in "
              f"{entry['small_us']:.0f} us; of {entry['large_bytes']} bytes in "
              f"{entry['large_ms']:.2f} ms, MPI_Allreduce {entry['mpi_ms']:.2f} ms: "
              f"{entry['ratio']:.2f} of its speed")
    for entry in record.get("links", []):
        print(f"link of {entry['latency_us']:g} us and {entry['gb_per_s']:g} GB/s: "
              f"{entry['bytes']:>8} bytes in {entry['measured_us']:.0f} us, "
              f"{entry['ratio']:.3f} of what was asked")
    if "tracing" in record:
        tracing = record["tracing"]
        print(f"tracing every step: {tracing['traced'] / tracing['untraced']:.3f} of the tokens/s")
    for entry in record.get("overlap", {}).get("ways", []):
        print(f"{entry['grad_sync']:<10} on a link {record['overlap']['link']}: step "
              f"{entry['step_ms']:.0f} ms, replayed {entry['replayed_step_ms']:.0f} ms; "
              f"{entry['exposed_ms']:.0f} ms of communication exposed, {entry['messages']} messages")
    for entry in record.get("replay", []):
        print(f"replay of {entry['ranks']} rank{'s' * (entry['ranks'] > 1)} on the links and cores "
              f"that they had: step {entry['replayed_step_ms']:.1f} ms, measured "
              f"{entry['step_ms']:.1f} ms")
    print("fraction = model FLOP/s / the matrix-product rate that the run measured at its start")
    for result in record["results"]:
        worst = max(abs(r["mfu_reported"] / r["fraction"] - 1) for r in result["rounds"])
        if not worst <= MFU_TOLERANCE:
            print(f"note: {result['config']} {result['dtype']}: the run's own mfu differs from "
                  f"this fraction by up to {worst:.0%}")


def _cell(values, digits, width):
    """median (min-max), right-aligned."""
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    text = f"{median} ({low}-{high})"
    return f"{text:>{width}}"
