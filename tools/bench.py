"""`./book bench`: how fast a chapter trains, next to what limits it on the same machine.

Every round measures, besides each case, its bound: the time of the step's own matrix products
alone. For a chapter of one rank also: memory-bound operations next to memory, attention next to the
matmul library, where a step's time goes and what techniques gained, and with --peers PyTorch in
turns with the chapter. For a chapter of several ranks: one rank with all threads against as many
ranks of one thread each, at equal global batch; what operators reach on one such rank and on two;
the collectives, next to the MPI library's own; emulated links, next to what was asked of them; what
tracing costs; how much communication the ways of data parallelism hide; and the stages of ZeRO next
to plain data parallelism.
"""
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from tools import (bench_report, build, limits, machine, mpi, overlap, packages, peers, runs,
                   techniques, weave, zero)
from tools.base import ROOT, BookError, say, show_path
from tools.process import git_commit, wait_for
from tools.trace import RECORDED

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
TURNS_PER_ROUND = 3  # of the chapter and its peers
ENDLESS = 10**6  # steps of a run that is killed
TRACING_ROUNDS = 7  # at least: it costs less than one round differs from the next
# Ranks and flags of comm_bench: on more ranks than cores MPI_Allreduce spins, so it gets less to do.
COLLECTIVES = ((2, ()), (8, ("--rounds", "50", "--large", "65536")))
MEASURES = ("tokens_per_s", "step_ms", "model_gflops", "matmul_gflops", "fraction",
            "bound_tokens_per_s", "of_bound")
PROFILED_STEPS = 8
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
            "late_allocations": int(records[-1]["system_allocations"]
                                    - records[1]["system_allocations"]),
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


def _run_quietly(command, ranks, threads=None):
    """What a command prints; BookError with that output if it fails.

    threads: of each rank; None shares the cores out.
    """
    held = []
    env = machine.thread_environment(ranks=ranks)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    code, signals = wait_for(command, env, held.append)
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
        return {**measure(records, runs.read_run(run_dir), CONFIGS[name]),
                "peak_bytes": json.loads((run_dir / "memory.json").read_text())["peak_total_bytes"]}


def _cases(chapter):
    """[(config, dtype, ranks)] of a chapter: on one rank, and on as many as there are cores."""
    layouts = (1,) if chapter.ranks is None else (1, machine.usable_cores())
    return [(name, dtype, ranks) for name in CONFIGS for dtype in DTYPES
            for ranks in dict.fromkeys(layouts)
            if CONFIGS[name]["micro_batch_size"] % ranks == 0]


def _measure_rounds(chapter, seconds, rounds):
    """{(config, dtype, ranks): [measure() of each round]}.

    Within a round cases and their bounds take turns.
    """
    cases, steps = _cases(chapter), {}
    for case in cases:
        say(f"book: {_label(*case)}: how long is a step?")
        first = _run_once(chapter, *case, SKIPPED_STEPS + MIN_STEPS)
        steps[case] = steps_for(seconds, first["step_ms"])
    results = {case: [] for case in cases}
    for number in range(rounds):
        bounds = {}
        for case in cases:
            name, dtype, _ = case
            result = _run_once(chapter, *case, steps[case])
            if (name, dtype) not in bounds:
                bounds[name, dtype] = limits.op_bench("bound", **CONFIGS[name], dtype=dtype)
            result.update(bounds[name, dtype])
            result["of_bound"] = result["tokens_per_s"] / result["bound_tokens_per_s"]
            results[case].append(result)
            say(f"book: round {number + 1}/{rounds}  {_label(*case):<15}  "
                f"{result['tokens_per_s']:9.0f} tokens/s  {result['of_bound']:.2f} of the bound")
    return results


def _measure_peers(chapter, python, seconds, rounds):
    """How PyTorch (under this Python) and our trainer did in turns, case by case."""
    found = []
    for name, config in CONFIGS.items():
        tokens = config["micro_batch_size"] * config["seq_len"]
        for dtype in filter(peers.timed_in, DTYPES):
            say(f"book: {_label(name, dtype, 1)}: in turns with PyTorch")
            entry = peers.summarise(peers.measure(
                python, lambda run_dir: _command(chapter, config, dtype, 1, ENDLESS, run_dir),
                config, dtype, seconds, TURNS_PER_ROUND * rounds), tokens)
            found.append({"config": name, "dtype": dtype, **entry})
            say(f"book: {_label(name, dtype, 1)}: {_speeds(entry)} tokens/s")
    return found


def _speeds(entry):
    """Of one of _measure_peers: ours 100, eager 80, compile 90"""
    return ", ".join(f"{name} {speed:.0f}" for name, speed in entry["tokens_per_s"].items())


def _profile(chapter, name, dtype, ranks=1, threads=None):
    """Where the time of rank 0's steps goes, every step of a short run being recorded."""
    say(f"book: {_label(name, dtype, ranks)}: where the time goes")
    steps = SKIPPED_STEPS + PROFILED_STEPS
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        run_dir = Path(scratch) / "run"
        _run_quietly(_command(chapter, CONFIGS[name], dtype, ranks, steps, run_dir,
                              trace_steps=steps), ranks, threads)
        peaks = json.loads((run_dir / "memory.json").read_text())["peak_bytes"]
        return {"config": name, "dtype": dtype, "activation_bytes": peaks["activations"],
                **limits.profile(run_dir / RECORDED, SKIPPED_STEPS)}


def _measure_rates(chapter):
    """What kinds of operators reach on a rank of one thread, alone and as one of two, which
    share A's batch: [{dtype, ranks, rates: {kind: GFLOP/s or GB/s}}]."""
    return [{"dtype": dtype, "ranks": ranks,
             "rates": {kind: of["rate"] for kind, of in limits.by_kind(
                 _profile(chapter, "A", dtype, ranks, threads=1)).items()}}
            for dtype in DTYPES for ranks in (1, 2)]


def _measure_operations(chapter, rounds):
    """{memory, attention} by dtype, the profiles of all configurations and what techniques gained."""
    say("book: memory-bound operations and attention, next to memory and matmul")
    found = {"memory": {dtype: limits.op_bench("memory", dtype=dtype, seconds=0.5)
                        for dtype in DTYPES},
             "attention": {dtype: limits.op_bench("attention", dtype=dtype) for dtype in DTYPES},
             "profiles": [_profile(chapter, name, dtype) for name in CONFIGS for dtype in DTYPES]}

    def naive_runs(name, dtype):
        say(f"book: {_label(name, dtype, 1)}: what techniques gained")
        return [tuple(_run_once(chapter, name, dtype, 1, SKIPPED_STEPS + MIN_STEPS,
                                attention=attention)["step_ms"]
                      for attention in ("blockwise", "naive")) for _ in range(rounds)]

    found["techniques"] = techniques.measure(found["profiles"], found["memory"], naive_runs, CONFIGS)
    return found


def run_bench(chapter, seconds, rounds, json_file=None, install=True, skip_packages=False,
              peer=None):
    """What `./book bench` does; returns the exit code."""
    out = Path(json_file) if json_file else ROOT / "build" / f"bench_{chapter.short}.json"
    if not out.parent.is_dir():  # found out before the minutes of measuring, not after
        raise BookError(f"cannot write {show_path(out)}: there is no such folder", 2)
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    build.prepare(build.RELEASE, limits.PROGRAM)
    if chapter.ranks is None:
        build.prepare(build.RELEASE, limits.PORTABLE_PROGRAM)
    if chapter.ranks is not None:
        build.prepare(build.RELEASE, "comm_bench")
    python = peers.prepare(peer) if peer else None
    record = _record(chapter, _measure_rounds(chapter, seconds, rounds))
    record["peers"] = _measure_peers(chapter, python, seconds, rounds) if python else []
    if chapter.ranks is None:
        record.update(_measure_operations(chapter, rounds))
    else:
        record["layouts"] = compare_layouts(record["results"])
        record["rates"] = _measure_rates(chapter)
        record["collectives"] = _measure_collectives()
        record["links"] = _measure_links()
        record["tracing"] = _measure_tracing(chapter, seconds, rounds)
        record["overlap"] = overlap.measure(chapter)
        record["replay"] = overlap.check_replay(chapter)
        if (chapter.folder / "zero.h").exists():
            record["zero"] = zero.compare(
                lambda dtype, **flags: _run_once(chapter, "B", dtype, overlap.RANKS,
                                                 SKIPPED_STEPS + zero.TIMED_STEPS, **flags),
                DTYPES, rounds)
    try:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot write {show_path(out)}: {error.strerror}")
    _print_table(record)
    print(f"\nJSON: {show_path(out)}")
    if out.resolve() == chapter.folder / "figures" / bench_report.RECORD:
        bench_report.write(out.parent)
        for readme in weave.weave(check=False):
            say(f"book: wove {show_path(readme)}")
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
          f"{'fraction':>19} {'of the bound':>19}")
    for result in record["results"]:
        s = result["summary"]
        label = f"{result['config']} {result['dtype']} x{result['ranks']}"
        print(f"{label:<10} {_cell(s['tokens_per_s'], 0, 22)} "
              f"{_cell(s['step_ms'], 1, 24)} {_cell(s['model_gflops'], 1, 22)} "
              f"{_cell(s['matmul_gflops'], 1, 22)} {_cell(s['fraction'], 3, 19)} "
              f"{_cell(s['of_bound'], 3, 19)}")
    _print_peers(record)
    _print_operations(record)
    _print_ranks(record)
    print("fraction = model FLOP/s / the matrix-product rate that the run measured at its start\n"
          "bound = the step's own matrix products alone, attention's causal half among them, at "
          "the rate of the matmul library on operands from memory")
    for result in record["results"]:
        worst = max(abs(r["mfu_reported"] / r["fraction"] - 1) for r in result["rounds"])
        if not worst <= MFU_TOLERANCE:
            print(f"note: {result['config']} {result['dtype']}: the run's own mfu differs from "
                  f"this fraction by up to {worst:.0%}")


def _print_peers(record):
    """How PyTorch did in turns with us."""
    for entry in record["peers"]:
        print(f"{entry['config']} {entry['dtype']}: {entry['ratio']:.2f} ({entry['ratio_low']:.2f}-"
              f"{entry['ratio_high']:.2f}) of the tokens/s of PyTorch {entry['torch']}, best mode "
              f"{entry['best']} ({_speeds(entry)} tokens/s)")


def _print_operations(record):
    """Operations next to their limits, what calling them costs, and late allocations."""
    for dtype, entries in record.get("memory", {}).items():
        for entry in entries:
            print(f"{dtype:<5} {entry['op']:<24} {entry['gb_per_s']:7.1f} GB/s, "
                  f"{entry['fraction']:.2f} of triad's {entry['triad_gb_per_s']:.1f}")
    for dtype, entry in record.get("attention", {}).items():
        print(f"{dtype:<5} attention, causal half, {entry['gflops']:.0f} GFLOP/s (forward "
              f"{entry['forward_gflops']:.0f}, backward {entry['backward_gflops']:.0f}), "
              f"{entry['fraction']:.2f} of the {entry['f32_matmul_gflops']:.0f} of an f32 matmul")
    for profile in record.get("profiles", []):
        kinds = ", ".join(f"{kind} {100 * of['ms'] / profile['step_ms']:.0f} %"
                          for kind, of in limits.by_kind(profile).items())
        print(f"{profile['config']} {profile['dtype']}: {kinds}, outside of operators "
              f"{100 * profile['outside_ms'] / profile['step_ms']:.2f} % of a step")
    for case in record.get("techniques", []):
        print(f"{case['config']} {case['dtype']}: a step takes, without " + ", ".join(
            f"{techniques.NAMES[entry['technique']]} "
            f"x{techniques.longer_without(entry, case['step_ms']):.2f}"
            for entry in case["techniques"]))
    late = max(r["late_allocations"] for result in record["results"] for r in result["rounds"])
    print(f"requests to the system for memory after step 2: {late}")


def _print_ranks(record):
    """What only a chapter of several ranks measures."""
    for layout in record.get("layouts", []):
        print(f"{layout['config']} {layout['dtype']}: {layout['ranks']} ranks of one thread reach "
              f"{layout['ratio']:.3f} of the tokens/s of one rank with all threads")
    for entry in record.get("rates", []):
        print(f"{entry['dtype']} on {entry['ranks']} rank{'s' * (entry['ranks'] > 1)} of one thread: "
              + ", ".join(f"{kind} {rate:.1f} {limits.UNITS[kind]}"
                          for kind, rate in entry["rates"].items()))
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
    print("\n".join(zero.compared_lines(record["zero"]) if "zero" in record else []))


def _cell(values, digits, width):
    """median (min-max), right-aligned."""
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    text = f"{median} ({low}-{high})"
    return f"{text:>{width}}"
