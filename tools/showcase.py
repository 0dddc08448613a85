"""`./book figures`: makes what a chapter's README shows, from a run on this machine.

Everything lands in chNN_*/figures/: the demo's output, its loss plot, the data that both were drawn
from, and the tables. The READMEs are woven anew afterwards.
"""
import json
import shlex
import shutil
import tempfile
from pathlib import Path

from tools import build, figures, machine, packages, runs, weave
from tools.base import BookError, say, show_path
from tools.process import wait_for

HEAD_LINES, TAIL_LINES = 4, 2  # of the progress lines that the excerpt keeps
BYTES = {"f32": (4, 4, 8), "bf16": (2, 4, 12), "f64": (8, 8, 16)}  # weights, gradients, optimizer


def make_figures(chapter, install=True, skip_packages=False):
    """Runs the chapter's demo and rewrites its figures/; returns the exit code."""
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    folder = chapter.folder / "figures"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / chapter.short
        output = _run_demo(chapter, run_dir)
        figures.draw("loss", [run_dir])
        for name in ("loss.png", "loss.svg"):
            shutil.copy(run_dir / name, folder / name)
        records, _ = runs.read_metrics(run_dir)
        run = runs.read_run(run_dir)
    # The run directory of the excerpt is the one that a reader's first run gets.
    output = output.replace(str(run_dir), f"runs/{chapter.short}/001")
    (folder / "demo.txt").write_text(excerpt(output), encoding="utf-8")
    (folder / "demo.json").write_text(_demo_json(run, records), encoding="utf-8")
    (folder / "costs.md").write_text(costs_table(run, records), encoding="utf-8")
    bench = folder / "bench.json"
    if bench.exists():
        (folder / "bench.md").write_text(bench_table(json.loads(bench.read_text())), encoding="utf-8")
    for readme in weave.weave(check=False):
        say(f"book: wove {show_path(readme)}")
    return 0


def _run_demo(chapter, run_dir):
    """The demo's output, progress shown meanwhile."""
    held = []
    command = [str(build.binary(build.RELEASE, chapter.name)), "--run_dir", str(run_dir)]
    say(f"book: running the demo: {shlex.join(command)}")
    code, _ = wait_for(command, machine.thread_environment(), held.append)
    output = "".join(held)
    if code != 0:
        raise BookError(f"the demo ended with exit code {code}:\n{output}")
    return output


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


def bench_table(record):
    """The medians of a `./book bench` record as Markdown."""
    host = record["machine"]
    lines = ["| | tokens/s | step, ms | model GFLOP/s | matmul GFLOP/s | MFU |", "|---|---|---|---|---|---|"]
    for result in record["results"]:
        s = {name: value["median"] for name, value in result["summary"].items()}
        lines.append(f"| {result['config']} {result['dtype']} | {s['tokens_per_s']:,.0f} | "
                     f"{s['step_ms']:.0f} | {s['model_gflops']:.0f} | {s['matmul_gflops']:.0f} | "
                     f"{100 * s['fraction']:.0f} % |")
    rounds = len(record["results"][0]["rounds"])
    lines.append("")
    lines.append(f"Medians of {rounds} interleaved rounds; {host['cpu']}, {host['threads']} threads, "
                 f"{' '.join(host['isa'])}; commit {record['commit'][:12]}, {record['date'][:10]}.")
    return "\n".join(lines) + "\n"
