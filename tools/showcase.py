"""`./book figures`: makes what a chapter's README shows, from a run on this machine.

Everything lands in chNN_*/figures/: the demo's output, its loss plot, the data that both were drawn
from, and the tables. The READMEs are woven anew afterwards.
"""
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tools import (bench_report, build, claims, estimates, figures, machine, mpi, overlap,
                   packages, recomputation, runs, trace, weave, why, zero, zero_claims)
from tools.base import BookError, say, show_path
from tools.process import git_commit, wait_for

DEMO_BATCH = 8  # samples, of the first chapter's demo
EXAMPLE_RANKS = 3  # the book's
KILL_RANKS, KILL_STEP, KILL_DEADLINE_S = 4, 5, 120
HEAD_LINES, TAIL_LINES = 4, 2  # of the progress lines that the excerpt keeps
BYTES = {"f32": (4, 4, 8), "bf16": (2, 4, 12), "f64": (8, 8, 16)}  # weights, gradients, optimizer


def make_figures(chapter, install=True, skip_packages=False):
    """Runs the chapter's demo and rewrites its figures/; returns the exit code."""
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    commit = git_commit()  # before the first figure changes a file
    folder = chapter.folder / "figures"
    folder.mkdir(exist_ok=True)
    if chapter.ranks is not None:
        _show_ranks(chapter, folder)
        overlapped = _show_overlap(chapter, folder, commit)
        if (chapter.folder / "zero.h").exists():
            _show_zero(chapter, folder, commit, overlapped)
        if (chapter.folder / "plan.h").exists():
            _show_plans(chapter, folder)
    elif estimates.is_offered(build.binary(build.RELEASE, chapter.name)):
        _show_memory(chapter, folder, commit)
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / chapter.short
        output = _run_demo(chapter, run_dir)
        figures.draw("loss", [run_dir])
        for name in ("loss.png", "loss.svg"):
            shutil.copy(run_dir / name, folder / name)
        if chapter.ranks is None:
            _show_operators(run_dir, folder)
        records, _ = runs.read_metrics(run_dir)
        run = runs.read_run(run_dir)
        ledger = None if chapter.ranks is None else json.loads((run_dir / "ledger.json").read_text())
    # The run directory of the excerpt is the one that a reader's first run gets.
    output = output.replace(str(run_dir), f"runs/{chapter.short}/001")
    (folder / "demo.txt").write_text(excerpt(output), encoding="utf-8")
    (folder / "demo.json").write_text(_demo_json(run, records), encoding="utf-8")
    (folder / "costs.md").write_text(costs_table(run, records), encoding="utf-8")
    if ledger is not None:
        (folder / "traffic.md").write_text(traffic_table(run, records, ledger), encoding="utf-8")
    if (folder / bench_report.RECORD).exists():
        bench_report.write(folder)
    for readme in weave.weave(check=False):
        say(f"book: wove {show_path(readme)}")
    return 0


def _run_demo(chapter, run_dir):
    """The demo's output, progress shown meanwhile."""
    ranks = chapter.ranks or 1
    flags = ["--run_dir", str(run_dir)]
    if ranks > 1:  # the parent's batch, shared out
        flags += ["--micro_batch_size", str(DEMO_BATCH // ranks)]
    say("book: running the demo")
    return _output_of(build.binary(build.RELEASE, chapter.name), flags, ranks)


def _output_of(program, flags, ranks):
    """What a program prints on so many ranks; BookError if it fails."""
    held = []
    command = [str(program), *flags]
    if ranks > 1:
        command = mpi.find().command(ranks, command)
    code, _ = wait_for(command, machine.thread_environment(ranks=ranks), held.append)
    if code != 0:
        raise BookError(f"`{shlex.join(command)}` ended with exit code {code}:\n{''.join(held)}")
    return "".join(held)


def _show_operators(run_dir, folder):
    """The operators of the last step that the demo recorded, drawn, and as a trace to open."""
    figures.draw_timeline(run_dir, script="ops")
    for ending in ("png", "svg"):
        shutil.copy(run_dir / f"ops.{ending}", folder / f"trace.{ending}")
    (folder / trace.RECORDED).write_text(trace.last_step(run_dir / trace.RECORDED),
                                         encoding="utf-8")


def _show_ranks(chapter, folder):
    """What the examples of a chapter print, and what ./book why says of a rank that was killed."""
    for example in chapter.examples():
        name = f"{chapter.name}_{example}"
        build.prepare(build.RELEASE, name)
        output = _output_of(build.binary(build.RELEASE, name), [], EXAMPLE_RANKS)
        (folder / f"{example}.txt").write_text(output, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / "run"
        _kill_a_rank(chapter, run_dir)
        report = why.report(why.examine(why.read_records(run_dir),
                                        witnessed=why.read_witnessed(run_dir)))
    (folder / "why.txt").write_text(report + "\n", encoding="utf-8")


def _is_the_moment(records):
    """Is rank 2 in the middle of a step in which the others are ahead of it?"""
    return len(records) == KILL_RANKS and records[2].step >= KILL_STEP and \
        records[2].main == "computes" and records[0].main == records[3].main == "waits"


def _kill_a_rank(chapter, run_dir):
    """Trains on four ranks and kills rank 2 while it computes and another one waits."""
    command = mpi.find().command(KILL_RANKS, [str(build.binary(build.RELEASE, chapter.name)),
                                              "--run_dir", str(run_dir)])
    training = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL,
                                env=machine.thread_environment(ranks=KILL_RANKS))
    deadline = time.monotonic() + KILL_DEADLINE_S
    while not _is_the_moment(why.read_records(run_dir)):
        if training.poll() is not None or time.monotonic() > deadline:
            training.kill()
            raise BookError("the run whose rank was to be killed did not get far enough")
        time.sleep(0.002)
    os.kill(why.read_records(run_dir)[2].pid, signal.SIGKILL)
    training.wait()


def _show_overlap(chapter, folder, commit):
    """Timelines of the ways of data parallelism on an emulated link, and how far it scales."""
    def keep(way, run_dir):
        _keep_timeline(run_dir, folder, way)

    record = {**_origin(chapter, commit), "overlap": overlap.measure(chapter, keep),
              "scaling": overlap.scaling(chapter)}
    _write_json(folder / "overlap.json", record)
    (folder / "overlap.md").write_text(overlap_table(record), encoding="utf-8")
    figures.draw("scaling", [folder / "overlap.json", folder / "scaling"])
    return record


def _show_zero(chapter, folder, commit, overlapped):
    """What the stages of ZeRO hold, send and cost, and the claims about them."""
    def keep(way, run_dir):
        if way in zero.DRAWN:
            _keep_timeline(run_dir, folder, way)

    program = build.binary(build.RELEASE, chapter.name)
    record = {**_origin(chapter, commit),
              "zero": {"held": zero.measure_held(chapter, program),
                       "large": zero.estimate_large(program),
                       "ways": zero.measure_ways(chapter, keep)},
              "claims": zero_claims.measure(chapter)}
    _write_json(folder / "zero.json", record)
    figures.draw("zero", [folder / "zero.json", folder])
    bench = folder / "bench.json"
    compared = json.loads(bench.read_text()).get("zero") if bench.exists() else None
    for name, text in (("zero.md", zero.ways_table(record)),
                       ("zero_8b.md", zero.large_table(record["zero"]["large"])),
                       ("claims.md", zero_claims.table(record, overlapped, compared))):
        (folder / name).write_text(text, encoding="utf-8")


def _keep_timeline(run_dir, folder, way):
    """Draws a typical step of a run into a chapter's figures."""
    recorded = trace.load(run_dir / trace.RECORDED)
    figures.draw_timeline(run_dir, step=overlap.typical_step(recorded))
    for ending in ("png", "svg"):
        shutil.copy(run_dir / f"timeline.{ending}", folder / f"timeline_{way}.{ending}")


def _origin(chapter, commit):
    """Where the data of a figure comes from."""
    return {"chapter": chapter.name, "commit": commit,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": f"./book figures {chapter.short}",
            "machine": {"cpu": machine.cpu_name(), "cores": machine.usable_cores(),
                        "threads": int(machine.thread_environment()["OMP_NUM_THREADS"]),
                        "isa": [name for name, here in machine.instruction_sets().items() if here]}}


def _write_json(path, record):
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _show_memory(chapter, folder, commit):
    """What memory is spent on, by the formulas, on shapes and in runs; what recomputation changes."""
    def keep_profile(run_dir):
        figures.draw("memory", [run_dir])
        for name in ("memory.json", "memory.png", "memory.svg"):
            shutil.copy(run_dir / name, folder / name)

    program = build.binary(build.RELEASE, chapter.name)
    cases = estimates.collect(program)
    _write_json(folder / "estimates.json", {**_origin(chapter, commit), "cases": cases})
    figures.draw("activations", [folder / "estimates.json", folder])
    record = {**_origin(chapter, commit), "claims": claims.measure(program, keep_profile),
              "recomputation": recomputation.measure(program)}
    _write_json(folder / "recomputation.json", record)
    (folder / "recomputation.md").write_text(recomputation.table(record), encoding="utf-8")
    (folder / "claims.md").write_text(claims.table(cases, record), encoding="utf-8")


def _show_plans(chapter, folder):
    """The book's example of a global batch, on 128 and 512 ranks, and a model that does not fit."""
    example = ["--plan", "4194304", "--seq_len", "4096", "--dtype", "bf16"]
    text = ""
    for flags in (["--model", "1B", "--dp_size", "128", "--micro_batch_size", "2"],
                  ["--model", "1B", "--dp_size", "512", "--micro_batch_size", "2"],
                  ["--model", "8B", "--dp_size", "128"]):
        output = _output_of(build.binary(build.RELEASE, chapter.name), [*example, *flags], 1)
        text += f"$ ./book run {chapter.short} -- {' '.join(example + flags)}\n{output}\n"
    (folder / "plan.txt").write_text(text.rstrip() + "\n", encoding="utf-8")


def overlap_table(record):
    """What the ways of data parallelism leave of their communication, measured and replayed."""
    measured = record["overlap"]
    ways = measured["ways"]
    whole = ways[0]["exposed_ms"]  # the naive way hides nothing
    rows = [f"| {way['grad_sync']} | {way['messages']} | {way['step_ms']:.0f} ms | "
            f"{way['exposed_ms']:.0f} ms | {100 * way['exposed_ms'] / whole:.0f} % | "
            f"{way['replayed_step_ms']:.0f} ms | {way['step_ms'] / way['replayed_step_ms']:.2f} |"
            for way in ways]
    return ("| gradients | messages a step | step | exposed | of the naive way's | step, replayed | ratio |\n"
            "|---|---|---|---|---|---|---|\n" + "\n".join(rows)
            + f"\n\nMedians of the later of {overlap.STEPS} steps on {measured['ranks']} ranks of one thread, on an "
            f"emulated link of `{measured['link']}` (us, GB/s); {record['machine']['cpu']}, "
            f"{record['machine']['cores']} cores; {record['date'][:10]}. Exposed: on the slower rank, "
            "which is what it adds to the step. Replayed: every thread owns a core.\n")


def excerpt(output):
    """The output with the middle of its progress lines left out."""
    lines = output.rstrip().splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    if len(steps) > HEAD_LINES + TAIL_LINES + 1:
        lines[steps[HEAD_LINES]:steps[-TAIL_LINES]] = ["..."]
    return "\n".join(lines) + "\n"


def _demo_json(run, records):
    """The numbers behind the figures, and where they come from."""
    keep = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "mfu")
    steps = [{key: record[key] for key in keep if key in record} for record in records]
    facts = {key: run[key] for key in ("chapter", "config", "data", "machine", "build", "parameters",
                                       "matmul_gflops", "started")}
    facts["command"] = f"./book figures {run['chapter'][:4]}"
    facts["config"] = {key: value for key, value in facts["config"].items() if key != "run_dir"}
    facts["data"] = {**facts["data"], "path": "data/corpus.txt"}
    facts["peak_bytes"] = records[-1]["peak_bytes"]
    lines = ",\n  ".join(json.dumps(step) for step in steps)
    head = json.dumps(facts, indent=1).rstrip().rstrip("}").rstrip()
    return f'{head},\n "steps": [\n  {lines}\n ]\n}}\n'


def traffic_table(run, records, ledger):
    """Gradient bytes per step: the formula, and what was counted where it was sent."""
    ranks, parameters = int(run["config"]["dp_size"]), int(run["parameters"])
    gradients = parameters * BYTES[run["config"]["dtype"]][1]
    entry, steps = ledger["dp.all_reduce"], len(records)
    rows = [("payload", "4 N", gradients, entry["payload_bytes"] / steps),
            ("sent by rank 0", "2 (dp-1)/dp 4 N", 2 * (ranks - 1) / ranks * gradients,
             entry["wire_bytes"] / steps)]
    lines = [f"| {name} | {formula} | {predicted:,.0f} | {measured:,.0f} | "
             f"{measured / predicted:.4f} |" for name, formula, predicted, measured in rows]
    headers = entry["header_bytes"] / steps
    return (f"N = {parameters:,} parameters, dp = {ranks}; bytes per step.\n\n"
            "| | formula | predicted | measured | ratio |\n|---|---|---|---|---|\n"
            + "\n".join(lines)
            + f"\n| headers of these messages | | | {headers:,.0f} | |\n"
            f"| scratch space of the all-reduce (peak) | | | "
            f"{int(records[-1]['peak_bytes']['communication']):,} | |\n")


def costs_table(run, records):
    """Memory by category, predicted from the number of parameters and measured by the allocator."""
    parameters = int(run["parameters"])
    dtype = run["config"]["dtype"]
    peaks = records[-1]["peak_bytes"]
    rows = []
    for name, each in zip(("weights", "gradients", "optimizer"), BYTES[dtype]):
        predicted, measured = each * parameters, int(peaks[name])
        rows.append(f"| {name} | {each} N | {predicted:,} | {measured:,} | {measured / predicted:.4f} |")
    total, measured = sum(BYTES[dtype]) * parameters, sum(int(peaks[n]) for n in
                                                          ("weights", "gradients", "optimizer"))
    rows.append(f"| together | {sum(BYTES[dtype])} N | {total:,} | {measured:,} | "
                f"{measured / total:.4f} |")
    rows.append(f"| activations (peak) | | | {int(peaks['activations']):,} | |")
    return (f"N = {parameters:,} parameters in {dtype}; bytes.\n\n"
            "| | formula | predicted | measured | ratio |\n|---|---|---|---|---|\n"
            + "\n".join(rows) + "\n")
