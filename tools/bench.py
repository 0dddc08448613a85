"""`./book bench`: how fast a chapter trains, next to the matrix products of the same machine."""
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from tools import build, machine, packages, runs
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


def _command(chapter, config, dtype, steps, run_dir):
    """The command line of one run."""
    flags = {**config, "dtype": dtype, "steps": steps, **QUIET_FLAGS, "run_dir": run_dir}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(build.binary(build.RELEASE, chapter.name)), *words]


def _run_once(chapter, name, dtype, steps):
    """Trains for so many steps in a temporary directory; what measure() returns."""
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        run_dir = Path(scratch) / "run"
        command = _command(chapter, CONFIGS[name], dtype, steps, run_dir)
        held = []
        code, signals = wait_for(command, machine.thread_environment(), held.append)
        if signals:
            raise BookError("the benchmark was interrupted", 128 + signals[0])
        if code != 0:
            sys.stderr.write("".join(held))
            raise BookError(f"`{shlex.join(command)}` ended with exit code {code}")
        records, _ = runs.read_metrics(run_dir)
        return measure(records, runs.read_run(run_dir), CONFIGS[name])


def _measure_rounds(chapter, seconds, rounds):
    """{(config, dtype): [measure() of each round]}; configurations take turns within a round."""
    cases = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
    steps = {}
    for case in cases:
        say(f"book: {case[0]} {case[1]}: how long is a step?")
        first = _run_once(chapter, *case, SKIPPED_STEPS + MIN_STEPS)
        steps[case] = steps_for(seconds, first["step_ms"])
    results = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            result = _run_once(chapter, *case, steps[case])
            results[case].append(result)
            say(f"book: round {number + 1}/{rounds}  {case[0]} {case[1]:<4}  "
                f"{result['tokens_per_s']:9.0f} tokens/s  ({result['steps']} steps)")
    return results


def run_bench(chapter, seconds, rounds, json_file=None, install=True, skip_packages=False):
    """What `./book bench` does; returns the exit code."""
    out = Path(json_file) if json_file else ROOT / "build" / f"bench_{chapter.short}.json"
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    results = _measure_rounds(chapter, seconds, rounds)
    record = _record(chapter, results)
    try:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BookError(f"cannot write {show_path(out)}: {error.strerror}")
    _print_table(record)
    print(f"\nJSON: {show_path(out)}")
    return 0


def _record(chapter, results):
    """Everything that is needed to read the numbers later."""
    threads = int(machine.thread_environment()["OMP_NUM_THREADS"])
    measured = [{"config": name, "dtype": dtype, "flags": CONFIGS[name],
                 "flops_per_token": flops_per_token(CONFIGS[name]),
                 "summary": summarise(rounds), "rounds": rounds}
                for (name, dtype), rounds in results.items()]
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
        print(f"{result['config']} {result['dtype']:<6} {_cell(s['tokens_per_s'], 0, 24)} "
              f"{_cell(s['step_ms'], 1, 24)} {_cell(s['model_gflops'], 1, 22)} "
              f"{_cell(s['matmul_gflops'], 1, 22)} {_cell(s['fraction'], 3, 19)}")
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
