"""`./book figures`: makes what a chapter's README shows; and what every chapter's figures share.

What is a chapter's own lies with it, in chNN_*/figures/make.py. It may define

    measure(chapter, program, commit)  runs that take time: .json files, and what is drawn of the runs
    demo(chapter, run_dir)             of the demo's run: keeps files, returns facts for demo.json
    DEMO                               {flag: value} with which ranks share the parent's batch;
                                       without it each takes its part of the samples
    rerun(chapter, program)            {file: text} of what no machine changes, in seconds
    count(chapter, program)            the same, of runs of a few steps on several ranks
    texts(folder)                      {file: text} of every table, from the .json files
    SCHEMATICS                         {file: function} of drawings that no data need, as text
    DRAWINGS                           [(script, .json, what it writes)] of figures from .json files

and, for `./book bench`, BENCH_PROGRAMS, BENCH_CONFIGS ({name: flags} of models beside those of every
chapter), BENCH_SHARED (a flag that gets the number of ranks, which then share no samples),
BENCH_ALONE (all on one rank), BENCH_TRAINS (False: what bench() measures alone, and no training),
bench(chapter, record, seconds, rounds), bench_lines(record) and bench_text(record) (tools/bench/bench.py).
`./book figures --render` does all but measure() and the
demo. The READMEs are woven anew afterwards.
"""
import datetime
import importlib
import json
import re
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tools import machine
from tools.base import ROOT, BookError, say, show_path, write_whole
from tools.book import bench_report, weave
from tools.look import figures, runs, trace
from tools.process import git_commit, wait_for
from tools.run import build, estimates, mpi, packages

DEMO_BATCH = 8  # samples, of the first chapter's demo
LOSS = "loss"     # the demo's figure
HEAD_LINES, TAIL_LINES = 4, 2  # of the progress lines that the excerpt keeps
BYTES = {"f32": (4, 4, 8), "bf16": (2, 4, 12), "f64": (8, 8, 16)}  # weights, gradients, optimizer


def maker(chapter):
    """What the chapter's figures/make.py defines, and for what it does not something that does
    nothing."""
    found = {"measure": lambda *_: None, "demo": lambda *_: {}, "rerun": lambda *_: {},
             "count": lambda *_: {}, "texts": lambda _: {}, "DRAWINGS": (), "SCHEMATICS": {},
             "DEMO": {}, "BENCH_PROGRAMS": (), "BENCH_CONFIGS": {}, "BENCH_SHARED": None,
             "BENCH_ALONE": False, "BENCH_TRAINS": True, "bench": lambda *_: {}, "bench_lines": lambda _: [],
             "bench_text": lambda _: []}
    if (ROOT / chapter.name / "figures" / "make.py").exists():
        found.update(vars(importlib.import_module(f"{chapter.name}.figures.make")))
    return SimpleNamespace(**found)


def make_figures(chapter, install=True, skip_packages=False, only_render=False):
    """Rewrites a chapter's figures/ and the pages that show them."""
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    for example in chapter.examples():
        build.prepare(build.RELEASE, f"{chapter.name}_{example}")
    commit = git_commit()  # before the first figure changes a file
    program = build.binary(build.RELEASE, chapter.name)
    (chapter.folder / "figures").mkdir(exist_ok=True)
    if not only_render:
        maker(chapter).measure(chapter, program, commit)
        _demo(chapter)
    for files in (maker(chapter).rerun, maker(chapter).count):
        _write(chapter.folder / "figures", files(chapter, program))
    render(chapter)
    for page in weave.weave(check=False):
        say(f"book: wove {show_path(page)}")


def texts(chapter, folder):
    """{file: text} of every schematic of a chapter's figures, and of every table that is made from
    the .json files in `folder`."""
    found = {name: draw_one() for name, draw_one in maker(chapter).SCHEMATICS.items()}
    if (folder / bench_report.RECORD).exists():
        record = read_json(folder / bench_report.RECORD)
        found["bench.md"] = bench_report.bench_table(record, maker(chapter).bench_lines(record))
    return {**found, **maker(chapter).texts(folder)}


def render(chapter):
    """Makes all tables and figures that come from .json files."""
    folder = chapter.folder / "figures"
    _write(folder, texts(chapter, folder))
    draw(chapter, folder, folder)


def draw(chapter, source, folder):
    """The figures that come from .json files in `source`, into `folder`."""
    drawings = maker(chapter).DRAWINGS
    if (source / "demo.json").exists() and LOSS not in [target for _, _, target in drawings]:
        figures.draw("loss", [source / "demo.json", folder / LOSS])
    for script, data, target in drawings:
        if (source / data).exists():
            figures.draw(f"{chapter.name}.figures.{script}", [source / data, folder / target])


def _write(folder, files):
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)
            say(f"book: {show_path(path)} is new")


# --- for the chapters' make.py --------------------------------------------------------------------


def output_of(program, flags, ranks=1):
    """What a program prints on so many ranks; BookError if it fails."""
    held = []
    command = [str(program), *flags]
    if ranks > 1:
        command = mpi.find().command(ranks, command)
    code, _ = wait_for(command, machine.thread_environment(ranks=ranks), held.append)
    if code != 0:
        raise BookError(f"`{shlex.join(command)}` ended with exit code {code}:\n{''.join(held)}")
    return "".join(held)


def rows_of(text, beginnings):
    """The lines of a program's output that begin so."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(beginnings))


def short_demo(text, beginnings):
    """The demo in a few lines that a page has room for: what is trained, the first and last steps
    without a remark in brackets, rows of the report."""
    steps = [re.sub(r" \([^)]*\)", "", step) for step in re.findall(r"^step .*\n", text, re.M)]
    return text[:text.index("\n") + 1] + steps[0] + steps[-1] + rows_of(text, beginnings)


def origin(chapter, commit):
    """Where the data of a figure comes from."""
    return {"chapter": chapter.name, "commit": commit,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": f"./book figures {chapter.short}",
            "machine": {"cpu": machine.cpu_name(), "cores": machine.usable_cores(),
                        "threads": int(machine.thread_environment()["OMP_NUM_THREADS"]),
                        "isa": [name for name, here in machine.instruction_sets().items() if here]}}


def json_text(record):
    return json.dumps(record, indent=1) + "\n"


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json(path, record):
    write_whole(path, json_text(record))


# --- the demo -------------------------------------------------------------------------------------


def _demo(chapter):
    """Runs the demo: demo.txt, demo.json."""
    folder = chapter.folder / "figures"
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / chapter.short
        output = _run_demo(chapter, run_dir)
        facts = maker(chapter).demo(chapter, run_dir)
        records, _ = runs.read_metrics(run_dir)
        run = runs.read_run(run_dir)
    # The run directory of the excerpt is the one that a reader's first run gets.
    output = output.replace(str(run_dir), f"runs/{chapter.short}/001")
    write_whole(folder / "demo.txt", excerpt(output))
    write_whole(folder / "demo.json", _demo_json(run, records, facts))


def _run_demo(chapter, run_dir, ranks=None):
    """The demo's output, progress shown meanwhile."""
    ranks = ranks or chapter.ranks or 1
    flags = ["--run_dir", str(run_dir)]
    if ranks > 1 and maker(chapter).DEMO:
        flags += estimates.words_of(maker(chapter).DEMO)
    elif chapter.ranks:  # the parent's batch, divided among them
        flags += ["--micro_batch_size", str(DEMO_BATCH // ranks)]
    say("book: running the demo" + (f" on {trace.counted(ranks, 'rank')}" if chapter.ranks else ""))
    return output_of(build.binary(build.RELEASE, chapter.name), flags, ranks)


def losses_alone(chapter):
    """[loss of every step] of the demo on one rank: the same batch, and no message."""
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / chapter.short
        _run_demo(chapter, run_dir, ranks=1)
        return [float(record["loss"]) for record in runs.read_metrics(run_dir)[0]]


def excerpt(output):
    """The output with the middle of its progress lines left out."""
    lines = output.rstrip().splitlines()
    steps = [i for i, line in enumerate(lines) if line.startswith("step ")]
    if len(steps) > HEAD_LINES + TAIL_LINES + 1:
        lines[steps[HEAD_LINES]:steps[-TAIL_LINES]] = ["..."]
    return "\n".join(lines) + "\n"


def _demo_json(run, records, more):
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
    head = json.dumps({**facts, **more}, indent=1).rstrip().rstrip("}").rstrip()
    return f'{head},\n "steps": [\n  {lines}\n ]\n}}\n'


def costs_table(demo):
    """Memory by category of the demo, predicted from the number of parameters and measured."""
    parameters = int(demo["parameters"])
    dtype = demo["config"]["dtype"]
    peaks = demo["peak_bytes"]
    rows = []
    for name, each in zip(("weights", "gradients", "optimizer"), BYTES[dtype]):
        predicted, measured = each * parameters, int(peaks[name])
        rows.append(f"| {name} | {each} Ψ | {predicted:,} | {measured:,} | {measured / predicted:.4f} |")
    total, measured = sum(BYTES[dtype]) * parameters, sum(int(peaks[n]) for n in
                                                          ("weights", "gradients", "optimizer"))
    rows.append(f"| together | {sum(BYTES[dtype])} Ψ | {total:,} | {measured:,} | "
                f"{measured / total:.4f} |")
    rows.append(f"| activations (peak) | | | {int(peaks['activations']):,} | |")
    return (f"Ψ = {parameters:,} parameters in {dtype}; bytes.\n\n"
            "| | formula | predicted | measured | ratio |\n|---|---|---|---|---|\n"
            + "\n".join(rows) + "\n")
