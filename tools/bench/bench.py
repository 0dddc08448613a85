"""`./book bench`: how fast a chapter trains, next to what limits it on the same machine.

Every round measures, besides each case, its bound: the time of the step's own matrix products
alone; with --peers PyTorch in turns with the chapter. What else a chapter measures, its
figures/make.py says: BENCH_PROGRAMS to build, BENCH_CONFIGS to train beside CONFIGS, BENCH_ALONE if
on one rank only, BENCH_TRAINS = False if no model is to be trained, bench(chapter, record, seconds,
rounds) for what goes into the record, bench_lines(record) of it for bench.md, bench_text(record)
for the terminal.
"""
import datetime
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from tools import machine
from tools.base import ROOT, BookError, say, show_path, write_whole
from tools.bench import limits, peers
from tools.book import bench_report, showcase, weave
from tools.book.rounds import DISTURBED, measure_again, with_range
from tools.look import runs
from tools.look.trace import RECORDED
from tools.process import git_commit, wait_for
from tools.run import build, mpi, packages

# Shapes of the two models; flags that are not named keep the chapter's defaults.
CONFIGS = {
    "A": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4,
          "ffn_hidden_size": 688, "vocab_size": 256, "seq_len": 256, "micro_batch_size": 8},
    "B": {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8,
          "ffn_hidden_size": 1376, "vocab_size": 4096, "seq_len": 512, "micro_batch_size": 4},
}
# A step of a few milliseconds in f64.
SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
         "ffn_hidden_size": 176, "seq_len": 64, "dtype": "f64"}
DTYPES = ("f32", "bf16")
QUIET_FLAGS = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}
SKIPPED_STEPS = 2  # primitives are created, blocks allocated and pages touched in them
MIN_STEPS, MAX_STEPS = 2, 500
PROBED_STEPS = 2  # of a run that only tells how long a step is: the last one
TURNS_PER_ROUND = 3  # of the chapter and its peers
ENDLESS = 10**6  # steps of a run that is killed
MEASURES = ("tokens_per_s", "step_ms", "model_gflops", "matmul_gflops", "fraction",
            "bound_tokens_per_s", "of_bound")
PROFILED_STEPS = 8
# Of the fraction computed here and the `book_mfu` that the run itself reports.
MFU_TOLERANCE = 0.02


def configs(chapter):
    """{name: flags} of the models that a chapter trains."""
    return {**CONFIGS, **showcase.maker(chapter).BENCH_CONFIGS}


def active_width(config):
    """Of the MLP, or of all experts together, through which a token goes."""
    if "num_experts" in config:
        return config["num_experts_per_tok"] * config["moe_ffn_hidden_size"]
    return config["ffn_hidden_size"]


def flops_per_token(config):
    """Model FLOPs of forward and backward: 6 * active matmul parameters (no lookup table)
    + 12 L h s."""
    hidden, layers = config["hidden_size"], config["num_layers"]
    kv_width = hidden // config["num_heads"] * config["num_kv_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    mlp = hidden * (3 * active_width(config) + config.get("num_experts", 0))
    parameters = layers * (attention + mlp) + config["vocab_size"] * hidden
    return 6 * parameters + 12 * layers * hidden * config["seq_len"]


def measure(records, run, config, skipped=SKIPPED_STEPS):
    """Medians of one run over the steps after the first few, as {measure: value}."""
    timed = [record for record in records if record["step"] > skipped]
    if not timed:
        raise BookError(f"a run of {len(records)} steps has none left after the first {skipped}, "
                        "which are not counted")
    matmul = float(run["matmul_gflops"])
    tokens_per_s = statistics.median(float(record["tokens_per_s"]) for record in timed)
    gflops = tokens_per_s * flops_per_token(config) / 1e9
    return {"tokens_per_s": tokens_per_s,
            "step_ms": statistics.median(float(record["step_ms"]) for record in timed),
            "model_gflops": gflops, "matmul_gflops": matmul, "fraction": gflops / matmul,
            "mfu_reported": statistics.median(float(record["book_mfu"]) for record in timed),
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
    """The command line of one run; the ranks share the samples of the configuration's batch, or
    what the chapter's flag says that they share."""
    flags = {**config, "dtype": dtype, "steps": steps, **QUIET_FLAGS, "run_dir": run_dir, **more}
    shared = showcase.maker(chapter).BENCH_SHARED
    if shared and ranks > 1:
        flags[shared] = ranks
    else:
        flags["micro_batch_size"] = config["micro_batch_size"] // ranks
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    program = [str(build.binary(build.RELEASE, chapter.name)), *words]
    return mpi.find().command(ranks, program) if ranks > 1 else program


def run_quietly(command, ranks, threads=None):
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


def run_once(chapter, name, dtype, ranks, steps, skipped=SKIPPED_STEPS, **more):
    """Trains for so many steps in a temporary directory; what measure() returns."""
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        run_dir = Path(scratch) / "run"
        config = configs(chapter)[name]
        run_quietly(_command(chapter, config, dtype, ranks, steps, run_dir, **more), ranks)
        records, _ = runs.read_metrics(run_dir)
        return {**measure(records, runs.read_run(run_dir), config, skipped),
                "peak_bytes": json.loads((run_dir / "memory.json").read_text())["peak_total_bytes"]}


def _cases(chapter):
    """[(config, dtype, ranks)] of a chapter: on one rank, and on as many as there are cores, where
    the chapter measures no others itself."""
    maker = showcase.maker(chapter)
    alone = chapter.ranks is None or maker.BENCH_ALONE
    layouts, shared = (1,) if alone else (1, machine.usable_cores()), maker.BENCH_SHARED
    return [(name, dtype, ranks) for name, config in configs(chapter).items() for dtype in DTYPES
            for ranks in dict.fromkeys(layouts)
            if shared or config["micro_batch_size"] % ranks == 0]


def _measure_rounds(chapter, seconds, rounds):
    """{(config, dtype, ranks): [measure() of each round]}.

    Within a round cases and their bounds take turns.
    """
    cases, steps = _cases(chapter), {}
    for case in cases:
        if case[:2] in steps:  # several ranks share the same cores
            continue
        say(f"book: {label(*case)}: how long is a step?")
        first = run_once(chapter, *case, PROBED_STEPS, skipped=PROBED_STEPS - 1)
        steps[case[:2]] = steps_for(seconds, first["step_ms"])
    def measured(case, bounds):
        name, dtype, _ = case
        result = run_once(chapter, *case, steps[name, dtype])
        if (name, dtype) not in bounds:
            bounds[name, dtype] = _bound(configs(chapter)[name], dtype)
        result.update(bounds[name, dtype])
        result["of_bound"] = result["tokens_per_s"] / result["bound_tokens_per_s"]
        return result

    results = {case: [] for case in cases}
    for number in range(rounds):
        bounds = {}
        for case in cases:
            result = measured(case, bounds)
            results[case].append(result)
            say(f"book: round {number + 1}/{rounds}  {label(*case):<15}  "
                f"{result['tokens_per_s']:9.0f} tokens/s  {result['of_bound']:.2f} of the bound")
    for case, of_case in results.items():
        measure_again(of_case, label(*case), lambda each: {name: each[name] for name in MEASURES},
                      lambda case=case: measured(case, {}))
    return results


def _bound(config, dtype):
    """What op_bench says of a micro-batch's products, and their time in a step of several."""
    # Of experts, those of a dense MLP with as much work for a token.
    flags = {name: config[name] for name in CONFIGS["A"]}
    flags["ffn_hidden_size"] = active_width(config)
    micro_batches = config.get("grad_acc_steps", 1)
    found = limits.op_bench("bound", **flags, dtype=dtype)
    return {**found, "bound_ms": micro_batches * found["bound_ms"]}


def _measure_peers(chapter, python, seconds, rounds):
    """How PyTorch (under this Python) and our trainer did in turns, case by case."""
    found = []
    for name, config in CONFIGS.items():
        tokens = config["micro_batch_size"] * config["seq_len"]
        for dtype in filter(peers.timed_in, DTYPES):
            say(f"book: {label(name, dtype, 1)}: in turns with PyTorch")
            entry = peers.summarise(peers.measure(
                python, lambda run_dir: _command(chapter, config, dtype, 1, ENDLESS, run_dir),
                config, dtype, seconds, TURNS_PER_ROUND * rounds), tokens)
            say(f"book: {label(name, dtype, 1)}: {_speeds(entry)} tokens/s")
            found.append({"config": name, "dtype": dtype, **entry,
                          "kinds": _kinds(chapter, python, name, dtype, entry["best"])})
    return found


def _kinds(chapter, python, name, dtype, mode):
    """Where the steps' time goes: {ours, theirs: {kind: ms}} and the products' operations, GFLOP."""
    own = profile(chapter, name, dtype)
    kinds = {kind: of["ms"] for kind, of in limits.by_kind(own).items()}
    ours = {kind: kinds[kind] for kind in (limits.MATMUL, limits.ATTENTION)}
    theirs = peers.profile(python, CONFIGS[name], dtype, mode)
    return {"ours": {**ours, "other": own["step_ms"] - sum(ours.values())}, "theirs": theirs,
            "gflop": sum(1e-3 * op["ms"] * op["gflops"] for op in own["ops"]
                         if op["kind"] == limits.MATMUL)}


def _speeds(entry):
    """Of one of _measure_peers: ours 100, eager 80, compile 90"""
    return ", ".join(f"{name} {speed:.0f}" for name, speed in entry["tokens_per_s"].items())


def profile(chapter, name, dtype, ranks=1, threads=None):
    """Where the time of rank 0's steps goes, every step of a short run being recorded."""
    say(f"book: {label(name, dtype, ranks)}: where the time goes")
    steps = SKIPPED_STEPS + PROFILED_STEPS
    with tempfile.TemporaryDirectory(prefix="book_bench_") as scratch:
        run_dir = Path(scratch) / "run"
        run_quietly(_command(chapter, configs(chapter)[name], dtype, ranks, steps, run_dir,
                              trace_steps=steps), ranks, threads)
        peaks = json.loads((run_dir / "memory.json").read_text())["peak_bytes"]
        return {"config": name, "dtype": dtype, "activation_bytes": peaks["activations"],
                **limits.profile(run_dir / RECORDED, SKIPPED_STEPS + 1)}


def run_bench(chapter, seconds, rounds, json_file=None, install=True, skip_packages=False,
              peer=None, only_peers=False):
    """What `./book bench` does; returns the exit code."""
    if only_peers and not peer:
        raise BookError("--only-peers needs --peers; try --peers setup", 2)
    out = Path(json_file) if json_file else ROOT / "build" / f"bench_{chapter.short}.json"
    if not out.parent.is_dir():  # found out before the minutes of measuring, not after
        raise BookError(f"cannot write {show_path(out)}: there is no such folder", 2)
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    maker = showcase.maker(chapter)
    trained = (chapter.name, limits.PROGRAM) if maker.BENCH_TRAINS or peer else ()
    for program in (*trained, *maker.BENCH_PROGRAMS):
        build.prepare(build.RELEASE, program)
    python = peers.prepare(peer) if peer else None
    trains = maker.BENCH_TRAINS and not only_peers
    record = _record(chapter, _measure_rounds(chapter, seconds, rounds) if trains else {})
    record["peers"] = _measure_peers(chapter, python, seconds, rounds) if python else []
    if not only_peers:
        record.update(maker.bench(chapter, record, seconds, rounds))
    try:
        write_whole(out, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise BookError(f"cannot write {show_path(out)}: {error.strerror}")
    if only_peers:
        _print_peers(record)
    else:
        print_table(record, maker.bench_text(record))
    print(f"\nJSON: {show_path(out)}")
    if out.resolve() == chapter.folder / "figures" / bench_report.RECORD:
        showcase.render(chapter)
        for readme in weave.weave(check=False):
            say(f"book: wove {show_path(readme)}")
    table = bench_report.bench_table(record, maker.bench_lines(record))
    left = [] if only_peers else disturbed_rows(table)
    if left:
        raise BookError(f"rounds of {', '.join(left)} were disturbed in every try; stop what else runs on this "
                        "machine, and run the bench again")
    return 0


def disturbed_rows(table):
    """Names of the rows of Markdown tables that have no number for disturbed rounds: their cells up to the first
    number."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if DISTURBED in cells[1:]:
            names = itertools.takewhile(lambda cell: cell != DISTURBED and not cell[:1].isdigit(), cells)
            found.append(" ".join(filter(None, names)))
    return found


def label(name, dtype, ranks):
    """A f32 2 ranks"""
    return f"{name} {dtype} {ranks} rank{'s' if ranks > 1 else ''}"


def _record(chapter, results):
    """Everything that is needed to read the numbers later."""
    threads = int(machine.thread_environment()["OMP_NUM_THREADS"])
    models = configs(chapter)
    measured = [{"config": name, "dtype": dtype, "ranks": ranks, "flags": models[name],
                 "flops_per_token": flops_per_token(models[name]),
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


def print_table(record, more):
    """The medians with their spread, `more` lines of the chapter's own, and a word on any
    disagreement about the fraction."""
    host = record["machine"]
    print(f"{record['chapter']}  commit {record['commit'][:12]}  {record['date']}")
    print(f"{host['cpu']}, {host['threads']} threads, {' '.join(host['isa'])}")
    for name, config in {r["config"]: r["flags"] for r in record["results"]}.items():
        print(f"{name} = " + " ".join(f"--{flag} {value}" for flag, value in config.items()))
    if not record["results"]:
        print("\n" + "\n".join(more))
        return
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
    print("\n".join(more), end="\n" if more else "")
    late = max(r["late_allocations"] for result in record["results"] for r in result["rounds"])
    print(f"requests to the system for memory after step 2: {late}")
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


def _cell(values, digits, width):
    """median (min-max), right-aligned."""
    text = with_range(values["median"], values["min"], values["max"], "-", f".{digits}f")
    return f"{text:>{width}}"
