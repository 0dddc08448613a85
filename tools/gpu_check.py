"""`./book gpu-check`: what a GPU computes, beside the CPU; what its kernels do wrong; how fast they are.

Also in what ./book gpu-bundle packs, where Python's own modules have to suffice. The report is
written anew after every part, so that a run that is killed leaves what was done.
"""
import argparse
import contextlib
import csv
import datetime
import io
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from tools import gpu, machine
from tools.base import ROOT, BookError, end_output, say, show_path
from tools.process import die_with_parent, git_commit, how_ended, output_of

WHOLE_LIMIT_S = 530
EMULATED_SLOWER = 3  # a part may take so much longer there
GRACE_S = 2.0  # between the wish to end and the end
MANIFEST = ROOT / "manifest.json"  # only in a bundle
NOT_RUN, PASSED, FAILED, SKIPPED = "not run", "passed", "failed", "skipped"
SANITIZER_ERROR = 9
FIND_TORCH_S = 25  # to load it from a cold disk
# MPI's messages stay in shared memory: by way of TCP, which UCX takes besides where it finds no
# module for copies between processes, ranks of some versions wait for ever in MPI_Finalize.
ONE_MACHINE = {"UCX_TLS": "sm,self"}
# Relative, of the loss and the gradient norm after 5 steps of a small model.
TOLERANCES = {"f64": 1e-10, "f32": 5e-5, "bf16": 1e-2}
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "ffn_hidden_size": 352, "seq_len": 128, "micro_batch_size": 4, "steps": 5}
SMALL_MODEL = {**MODEL, "hidden_size": 32, "ffn_hidden_size": 88, "seq_len": 32,
               "micro_batch_size": 2}
QUIET = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}
TRAINING = {"model": "1B", "dtype": "bf16", "seq_len": 2048, "attention": "naive", "steps": 8}
TRACED_STEPS = 5  # the last of them counts
# At the default learning rate, twice as high, the loss passes a spike at which rounding alone makes
# more than this difference: naive and blockwise attention on the same CPU do.
LEARNING = {"dtype": "bf16", "steps": 200, "lr": 1e-3}
LEARNING_TOLERANCE = 1e-2
# Samples that a GPU of so many MiB can train on at a time, the probabilities of all layers kept.
MICRO_BATCHES = ((90 << 10, 8), (60 << 10, 4), (0, 1))
SKIPPED_STEPS = 3
ROUNDS = 3  # of our training and of PyTorch's, as many as there is time for
TORCH_TRAINING = ROOT / "tools" / "bench" / "torch_bench.py"
SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "seq_len", "micro_batch_size", "dtype")
# What is asked of a GPU. Speed fails no check: the report says whether it is reached.
LEAST_OF_TORCH, LEAST_MFU, MOST_IDLE = 0.75, 0.30, 0.05
WAITS_OF_A_STEP = 2  # at its end: for the loss and for the gradient norm
COUNTS_TOLERANCE = 0.05
SECTORS = {"per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
           "per_store": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"}
TORCH = """
import json, statistics, torch
found = []
for name, dtype, n in (("bf16", torch.bfloat16, 8192), ("f32", torch.float32, 8192),
                       ("f64", torch.float64, 4096)):
    a, b = (torch.rand(n, n, dtype=dtype, device="cuda") - 0.5 for _ in range(2))
    times = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(); torch.matmul(a, b.T); end.record(); torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    found.append({"dtype": name, "tflops": 2e-9 * n**3 / statistics.median(times[3:])})
print(json.dumps({"products": found}))
"""


class Skip(Exception):
    """A part cannot run here, and why."""


class Fail(Exception):
    """A part found something wrong: what, and the figures that there are nevertheless."""

    def __init__(self, why, figures=None):
        super().__init__(why)
        self.figures = figures or {}


@dataclass(frozen=True)
class Place:
    """Where the programs are, and what they were built from."""

    bin: Path
    corpus: Path
    commit: str
    cuda_major: str = ""


@dataclass(frozen=True)
class Part:
    """One part of the check; run(check) gives figures: {title: [row as {column: value}]}."""

    name: str
    title: str
    limit_s: float
    run: Callable
    needs_gpu: bool = False  # the emulated one does not do


@dataclass
class Check:
    """What the parts share."""

    place: Place
    folder: Path
    emulated: bool = False
    gpus: list = field(default_factory=list)
    libraries: dict = field(default_factory=dict)
    deadline: float = float("inf")  # of the part that runs
    log: str = "log"

    def program(self, name, on_device=True):
        """The path of a program of ours, of its emulated twin where there is no GPU."""
        path = self.place.bin / (name + ("_emulated" if self.emulated and on_device else ""))
        if not path.exists():
            raise Skip(f"{path.name} was not built")
        return str(path)

    def environment(self):
        """In which our programs find the libraries that do not travel with them."""
        folders = [str(path.parent) for path in self.libraries.values() if path]
        folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        return {**machine.thread_environment(),
                "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(folders))}

    def output(self, command, fine=(0,)):
        """What a command prints, its log besides; Fail if it ends otherwise than it may, or late."""
        log = self.folder / f"{self.log}.txt"
        code, text = run_limited(command, self.environment(), self.deadline - time.monotonic(), log)
        if code is None:
            raise Fail(f"{Path(command[0]).name} took longer than the part's time")
        if code not in fine:
            last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
            raise Fail(f"{Path(command[0]).name} {how_it_ended(code)}: {last[:200]}")
        return text


def how_it_ended(code):
    return how_ended(-code) if code < 0 else f"left with exit code {code}"


def run_limited(command, env, limit_s, log):
    """(exit code, what it printed) of a command; code None if it ran out of time. It and all that it
    has started end with that time, and with us. What it prints is appended to the log at once."""
    with open(log, "ab") as to:
        to.write(f"$ {shlex.join(map(str, command))}\n".encode())
        to.flush()
        begin = to.tell()
        try:
            child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=to,
                                     stderr=subprocess.STDOUT, start_new_session=True,
                                     preexec_fn=die_with_parent)
        except OSError as error:
            raise Fail(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            code = child.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    with open(log, "rb") as done:
        done.seek(begin)
        return code, done.read().decode(errors="replace")


def _end(child):
    """Ends a child's whole session, whether or not the child itself has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


# --- the parts ------------------------------------------------------------------------------------


def find_libraries(check):
    """cuBLASLt, without which no program computes on a GPU, and NCCL."""
    rows = [{"library": name, "file": str(path or "not found")}
            for name, path in check.libraries.items()]
    if not check.emulated and not check.libraries["cuBLASLt"]:
        raise Fail("there is no cuBLASLt: install CUDA's toolkit or the Python package of cuBLAS",
                   {"": rows})
    return {"": rows}


def _needs_cublas(check):
    if not check.emulated and not check.libraries["cuBLASLt"]:
        raise Skip("there is no cuBLASLt")


def run_tests(check):
    """Operations against references of the tests' own, kernels against the CPU."""
    _needs_cublas(check)
    rows = []
    for name in (("test_ops_emulated", "test_cuda_kernels") if check.emulated else
                 ("test_ops_gpu", "test_kernels_gpu")):
        path = check.place.bin / name
        if not path.exists():
            raise Skip(f"{name} was not built")
        text = check.output([str(path)])
        passed = re.search(r"All tests passed \((\d+) assertions? in (\d+) test cases?\)", text)
        if not passed:
            raise Fail(f"{name} does not say that all tests passed", {"": rows})
        rows.append({"program": name, "cases": int(passed[2]), "assertions": int(passed[1])})
    return {"": rows}


def _words(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _train(check, device, flags, run_dir, fine=(0,)):
    """metrics.jsonl of a run of the first chapter."""
    program = check.program("ch01_single_gpu", on_device=device == "cuda")
    check.output([program, *_words({**QUIET, **flags, "device": device, "run_dir": run_dir,
                                    "data": check.place.corpus})], fine)
    lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def difference(a, b):
    """|a - b| / |b|; NaN or infinity in either is infinitely far."""
    a, b = float(a), float(b)
    return abs(a - b) / max(abs(b), 1e-300) if abs(a) + abs(b) < float("inf") else float("inf")


def run_parity(check):
    """The first chapter's losses and gradient norms, step by step."""
    _needs_cublas(check)
    rows, far = [], []
    for dtype, tolerance in TOLERANCES.items():
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
            flags = {**(SMALL_MODEL if check.emulated else MODEL), "dtype": dtype}
            here = _train(check, "cuda", flags, Path(scratch) / "cuda")
            there = _train(check, "cpu", flags, Path(scratch) / "cpu")
        worst = {name: max((difference(a[name], b[name]) for a, b in zip(here, there)),
                           default=float("inf")) for name in ("loss", "grad_norm")}
        rows.append({"dtype": dtype, "steps": len(here),
                     **{name: f"{value:.1e}" for name, value in worst.items()},
                     "tolerance": f"{tolerance:.0e}"})
        if not (len(here) == len(there) and max(worst.values()) <= tolerance):
            far.append(dtype)
    figures = {"largest relative difference from the CPU": rows}
    if far:
        raise Fail(f"too far from the CPU: {', '.join(far)}", figures)
    return figures


def _sanitizer(tool):
    def run(check):
        _needs_cublas(check)
        sanitizer = gpu.find_tool("compute-sanitizer")
        if sanitizer is None:
            raise Skip("compute-sanitizer is not here")
        # The library's own kernels are none of our business, and slow to watch.
        check.output([sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR),
                      check.program("test_kernels_gpu"), "~cuBLASLt*"])
        return {}
    return run


def read_profile(text):
    """{kernel: {per_load, per_store}} of what Nsight Compute prints with --csv."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return {}
    names = {metric: name for name, metric in SECTORS.items()}
    found = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[head:]))):
        kernel = re.search(r"\w+_kernel", row.get("Kernel Name") or "")
        name = names.get(row.get("Metric Name"))
        if kernel and name:
            value = float((row.get("Metric Value") or "nan").replace(",", ""))
            found.setdefault(kernel[0], {})[name] = value
    return found


def run_counts(check):
    """Sectors a request of four kernels: the emulator's, and a GPU's counters."""
    _needs_cublas(check)
    emulated = str(check.place.bin / "gpu_counts_emulated")
    if not Path(emulated).exists():
        raise Skip("gpu_counts_emulated was not built")
    lines = [line for line in check.output([emulated]).splitlines() if line.startswith("{")]
    expected = {each["kernel"]: each for each in map(json.loads, lines)}
    measured, profiler = {}, gpu.find_tool("ncu")
    if not check.emulated:
        if profiler is None:
            raise Skip("ncu (Nsight Compute) is not here")
        text = check.output([profiler, "--csv", "--metrics", ",".join(SECTORS.values()),
                             "--kernel-name", f"regex:{'|'.join(expected)}",
                             check.program("gpu_counts")], fine=range(256))
        if "ERR_NVGPUCTRPERM" in text:
            raise Skip("the driver keeps its counters from this user (ERR_NVGPUCTRPERM)")
        measured = read_profile(text)
    rows, far = [], []
    for kernel, counts in expected.items():
        row = {"kernel": kernel}
        for name in SECTORS:
            row[f"{name}, emulator"] = counts[name]
            if not check.emulated:
                row[f"{name}, GPU"] = value = measured.get(kernel, {}).get(name, float("nan"))
                if not difference(value, counts[name]) <= COUNTS_TOLERANCE:
                    far.append(kernel)
        rows.append(row)
    figures = {"sectors of 32 bytes a request of a warp": rows}
    if far or not rows:
        raise Fail(f"the emulator counts otherwise: {', '.join(dict.fromkeys(far)) or 'nothing'}",
                   figures)
    return figures


def _json_line(text):
    """The last line of an output that is JSON."""
    for line in reversed(text.splitlines()):
        if line.startswith(("[", "{")):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise Fail("it printed no figures")


def run_products(check):
    """Square products beside the data sheet, and beside torch.matmul."""
    _needs_cublas(check)
    sheet = gpu.data_sheet(check.gpus[0].name)
    ours = _json_line(check.output([check.program("gpu_bench"), "--measure", "products"]))
    rows = []
    for each in ours:
        peak = sheet.get(each["dtype"])
        rows.append({"dtype": each["dtype"], "n": each["n"], "TFLOP/s": each["tflops"],
                     "data sheet": peak or "unknown",
                     "fraction": f"{each['tflops'] / peak:.2f}" if peak else ""})
    python, text = _find_torch()
    if python:
        try:
            torch = _json_line(check.output([python, "-c", TORCH]))
        except Fail as fail:
            return {f"products; {text}: {fail}": rows}
        theirs = {each["dtype"]: each["tflops"] for each in torch["products"]}
        for row in rows:
            row["torch.matmul"] = round(theirs[row["dtype"]], 2)
            row["of torch"] = f"{row['TFLOP/s'] / theirs[row['dtype']]:.2f}"
    return {f"products; {text}": rows}


def _find_torch():
    """(The first Python whose torch sees a GPU or None, which torch in words)."""
    for python in gpu.find_pythons():
        found = output_of([python, "-c", "import torch; assert torch.cuda.is_available(); "
                                         "print(torch.__version__)"], timeout=FIND_TORCH_S)
        if found is not None:
            return python, f"torch {found.strip().splitlines()[-1]}"
    return None, "no Python here has a torch that sees the GPU"


def run_memory(check):
    """Memory-bound kernels beside a copy, and the copy beside the data sheet."""
    _needs_cublas(check)
    rows = _json_line(check.output([check.program("gpu_bench"), "--measure", "memory"]))
    peak = gpu.data_sheet(check.gpus[0].name).get("memory")
    return {f"memory; data sheet: {f'{peak} GB/s' if peak else 'unknown'}": [
        {"kernel": row["kernel"], "GB/s": row["gb_per_s"], "of the copy": row["of_copy"]}
        for row in rows]}


def _billion(check):
    """The flags of a model of a billion parameters; Skip where the chapter has none."""
    if " 1B" not in check.output([check.program("ch01_single_gpu"), "--help"]):
        raise Skip("the first chapter has no preset 1B")
    return {**TRAINING, "micro_batch_size": next(
        size for memory, size in MICRO_BATCHES if check.gpus[0].memory_mib >= memory)}


def _asked(what, found, least=None, most=None):
    """A row: what is asked, what was found (None: unknown), whether it is reached."""
    reached = found is not None and (found >= least if most is None else found <= most)
    return {"what": what, "asked": f"at least {least}" if most is None else f"at most {most}",
            "found": "unknown" if found is None else f"{found:.3g}",
            "reached": "unknown" if found is None else "yes" if reached else "no"}


def _middle(records):
    """The median step, by its time, of those after the first ones; Fail if there are none."""
    timed = sorted(records[SKIPPED_STEPS:], key=lambda record: float(record["step_ms"]))
    if not timed:
        raise Fail(f"{len(records)} steps are too few")
    return timed[len(timed) // 2]


def _train_torch(check, python, config):
    """The milliseconds of the median step of PyTorch on a model of that shape."""
    words = _words({**{name: config[name] for name in SHAPE}, "device": "cuda",
                    "steps": TRAINING["steps"]})
    text = check.output([python, str(TORCH_TRAINING), *words])
    return float(_middle([json.loads(line) for line in text.splitlines()
                          if line.startswith("{")])["step_ms"])


def run_training(check):
    """The speed of the first chapter on a model of a billion parameters, in turns with PyTorch."""
    _needs_cublas(check)
    flags = _billion(check)
    python, text = _find_torch()
    ours, theirs, longest_s = [], [], 0.0
    # Each in a process of its own: the GPU's memory does not hold both.
    for _ in range(ROUNDS if python else 1):
        begin = time.monotonic()
        if begin + longest_s > check.deadline:
            break
        with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
            ours.append(_middle(_train(check, "cuda", flags, Path(scratch) / "run")))
            run = json.loads((Path(scratch) / "run" / "run.json").read_text(encoding="utf-8"))
        if python:
            try:
                theirs.append(_train_torch(check, python, run["config"]))
            except Fail as fail:
                text += f": {fail}"
                break
        longest_s = max(longest_s, time.monotonic() - begin)
    middle = {name: statistics.median(float(record[name]) for record in ours)
              for name in ("tokens_per_s", "step_ms", "mfu")}
    row = {**{name: flags[name] for name in ("model", "dtype", "attention", "seq_len",
                                             "micro_batch_size")},
           "rounds": len(ours), "tokens/s": middle["tokens_per_s"], "step ms": middle["step_ms"]}
    of_torch = None
    if theirs:
        row["step ms, PyTorch"] = round(statistics.median(theirs), 3)
        of_torch = statistics.median(ms / float(record["step_ms"])
                                     for ms, record in zip(theirs, ours))
    peak = gpu.data_sheet(check.gpus[0].name).get("bf16")
    of_peak = middle["mfu"] * float(run["matmul_gflops"]) / 1000 / peak if peak else None
    row["MFU, of the measured products"] = f"{middle['mfu']:.3f}"
    row["MFU, of the data sheet"] = "unknown" if of_peak is None else f"{of_peak:.3f}"
    return {f"the median step; {text}": [row], "what is asked": [
        _asked("tokens/s, of PyTorch's", of_torch, least=LEAST_OF_TORCH),
        _asked("MFU, of the data sheet", of_peak, least=LEAST_MFU)]}


def idle_share(events):
    """The part of the time from a step's first kernel to its last in which the device had none.

    events: the step's operations. Where the host was late, the device counts as idle until all
    kernels of the operation were queued. Gaps between kernels of one operation are not seen.
    """
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["args"]["queued"])
                   for event in events)
    if not spans:
        raise Fail("the trace has no operations of the step")
    first, done, _ = spans[0]
    idle = 0.0
    for begin, end, queued in spans[1:]:
        begin = min(max(begin, queued), end)
        idle += max(0.0, begin - done)
        done = max(done, end)
    return idle / (done - first)


def run_steps(check):
    """What a step leaves to the host: how long the device is idle, how often the host waits."""
    _needs_cublas(check)
    flags = SMALL_MODEL if check.emulated else _billion(check)
    flags = {**flags, "steps": TRACED_STEPS, "trace_steps": TRACED_STEPS}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        records = _train(check, "cuda", flags, Path(scratch) / "run")
        trace = json.loads((Path(scratch) / "run" / "trace.json").read_text(encoding="utf-8"))
    # The counter goes on from step to step, and so counts nothing before the first one's end.
    counts = [record["host_waits"] for record in records]
    waits = max((after - before for before, after in zip(counts, counts[1:])), default=None)
    asked = [_asked("host waits of a step, for its loss and its norm", waits, most=WAITS_OF_A_STEP)]
    if not check.emulated:  # it has no time
        asked.append(_asked("idle share between the first and the last kernel", idle_share(
            [event for event in trace["traceEvents"] if event.get("cat") == "device op"
             and event["args"]["step"] == TRACED_STEPS]), most=MOST_IDLE))
    if waits is None or waits > WAITS_OF_A_STEP:
        raise Fail("the host waits for the device before the end of a step", {"": asked})
    return {"": asked}


def run_learning(check):
    """The losses of 200 steps on the text, in bf16, on the device and on the CPU."""
    _needs_cublas(check)
    flags = {**(SMALL_MODEL if check.emulated else MODEL), **LEARNING}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        here = _train(check, "cuda", flags, Path(scratch) / "cuda")
        there = _train(check, "cpu", flags, Path(scratch) / "cpu")
    worst = max((difference(a["loss"], b["loss"]) for a, b in zip(here, there)),
                default=float("inf"))
    rows = [{"steps": len(here), **{name: flags[name] for name in (
        "dtype", "hidden_size", "num_layers", "seq_len", "micro_batch_size", "lr")},
        "first loss": here[0]["loss"], "last loss": here[-1]["loss"],
        "last loss, CPU": there[-1]["loss"], "largest difference": f"{worst:.1e}"}] if here else []
    if not (len(here) == len(there) == LEARNING["steps"] and worst <= LEARNING_TOLERANCE):
        raise Fail(f"the losses differ by more than {LEARNING_TOLERANCE:.0%} from the CPU's",
                   {"": rows})
    return {"": rows}


PARTS = (
    Part("libraries", "libraries", 5, find_libraries),
    Part("tests", "operations against references, kernels against the CPU", 100, run_tests),
    Part("parity", "chapter 1 on the device and on the CPU", 45, run_parity),
    Part("learning", "losses of 200 steps on the device and on the CPU", 25, run_learning),
    Part("memcheck", "kernels under compute-sanitizer: bounds", 45, _sanitizer("memcheck"), True),
    Part("racecheck", "kernels under compute-sanitizer: races", 50, _sanitizer("racecheck"), True),
    Part("initcheck", "kernels under compute-sanitizer: unwritten memory", 45,
         _sanitizer("initcheck"), True),
    Part("counts", "accesses of kernels: Nsight Compute and the emulator", 30, run_counts),
    Part("products", "speed of matrix products", 45, run_products, True),
    Part("memory", "speed of memory-bound kernels", 20, run_memory, True),
    Part("steps", "what a step leaves to the host", 25, run_steps),
    Part("training", "speed of chapter 1 on a billion parameters, and of PyTorch", 95, run_training,
         True),
)


# --- the report -----------------------------------------------------------------------------------


class Report:
    """What a check has found so far, as report.json and report.md."""

    def __init__(self, check, parts):
        self.folder = check.folder
        self.record = {
            "what": "gpu-check", "finished": False, "commit": check.place.commit,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": "emulated" if check.emulated else check.gpus[0].name,
            "gpus": [vars(each) for each in check.gpus],
            "libraries": {name: str(path) if path else None
                          for name, path in check.libraries.items()},
            "machine": {"cpu": machine.cpu_name(), "cores": machine.usable_cores()},
            "parts": [{"name": part.name, "title": part.title, "state": NOT_RUN,
                       "why": "the check ended before", "limit_s": part.limit_s}
                      for part in parts]}

    def set(self, part, state, why="", seconds=None, figures=None):
        """Notes how a part has ended, and writes all."""
        entry = next(each for each in self.record["parts"] if each["name"] == part.name)
        entry.update(state=state, why=why)
        if seconds is not None:
            entry["seconds"] = round(seconds, 1)
        if figures:
            entry["figures"] = figures
        self.write()

    def write(self):
        """Writes both files, each at once or not at all."""
        for name, text in (("report.json", json.dumps(self.record, indent=1) + "\n"),
                           ("report.md", markdown(self.record))):
            scratch = self.folder / f".{name}"
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, self.folder / name)


def table(rows):
    """A Markdown table of rows that are {column: value}."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns),
             *([str(row.get(column, "")) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(record):
    """The report as a page."""
    host = record["machine"]
    device = record["device"]
    for each in record["gpus"][:1]:
        device += f", {each['memory_mib'] / 1024:.0f} GiB, driver {each['driver']}"
    text = (f"# GPU check\n\n{device}; {host['cpu']}, {host['cores']} cores; commit "
            f"{record['commit'][:12]}, {record['date'][:10]}."
            f"{'' if record['finished'] else ' The check has not ended.'}\n\n")
    text += table([{"part": part["title"], "state": part["state"],
                    "seconds": part.get("seconds", ""), "why": part["why"]}
                   for part in record["parts"]])
    for part in record["parts"]:
        for title, rows in part.get("figures", {}).items():
            text += f"\n## {part['title']}{f' ({title})' if title else ''}\n\n{table(rows)}"
    return text


def run_parts(check, parts, whole_limit_s=WHOLE_LIMIT_S):
    """Runs the parts in turn; True if every one that could run passed."""
    check.folder.mkdir(parents=True, exist_ok=True)
    report = Report(check, parts)
    report.write()
    end = time.monotonic() + whole_limit_s
    for part in parts:
        state, why, figures = PASSED, "", {}
        begin = time.monotonic()
        limit_s = part.limit_s * (EMULATED_SLOWER if check.emulated else 1)
        check.deadline, check.log = min(begin + limit_s, end), part.name
        try:
            if part.needs_gpu and check.emulated:
                raise Skip("the emulated device has none of this")
            if begin >= end:
                raise Skip("no time is left")
            figures = part.run(check)
        except Skip as skip:
            state, why = SKIPPED, str(skip)
        except Fail as fail:
            state, why, figures = FAILED, str(fail), fail.figures
        except (KeyboardInterrupt, SystemExit):
            report.set(part, NOT_RUN, "interrupted", time.monotonic() - begin)
            raise
        except (OSError, ValueError, KeyError) as error:  # a program printed what it should not
            state, why = FAILED, f"{type(error).__name__}: {error}"
        report.set(part, state, why, time.monotonic() - begin, figures)
        say(f"gpu-check: {state:<8} {time.monotonic() - begin:5.1f} s  {part.title}"
            + (f": {why}" if why else ""))
    report.record["finished"] = True
    report.write()
    return all(part["state"] != FAILED for part in report.record["parts"])


# --- the command ----------------------------------------------------------------------------------


def add_arguments(parser):
    parser.add_argument("--report", metavar="FOLDER", help="where report.md and report.json go "
                        "(default: build/gpu-check, in a bundle gpu-report)")
    parser.add_argument("--emulated", action="store_true",
                        help="no GPU: the tests on the emulated one, which has no speed")


def require_gpu(emulated):
    """The GPUs; BookError (2) if there are none and none is emulated."""
    gpus = gpu.find_gpus()
    if not gpus and not emulated:
        raise BookError("there is no GPU here: nvidia-smi shows none; --emulated runs the tests on "
                        "the emulated one", 2)
    return [] if emulated else gpus


def run_check(place, gpus, emulated, folder):
    """What `./book gpu-check` does; the exit code."""
    check = Check(place, Path(folder), emulated, gpus, {
        "cuBLASLt": gpu.find_library(gpu.CUBLAS, place.cuda_major),
        "NCCL": gpu.find_library(gpu.NCCL, "2")})
    try:
        passed = run_parts(check, PARTS)
    finally:
        say(f"gpu-check: the report is {show_path(check.folder / 'report.md')}")
    return 0 if passed else 1


def bundle_place():
    """The place of the bundle in which this file lies; BookError (2) where its programs cannot run."""
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    here = os.confstr("CS_GNU_LIBC_VERSION") or ""
    version = tuple(int(part) for part in re.findall(r"\d+", here))
    if version < tuple(int(part) for part in manifest["glibc"].split(".")):
        raise BookError(f"the programs need glibc {manifest['glibc']} or newer, and here is "
                        f"{here or 'none'}; build them on a system as old as this one", 2)
    return Place(ROOT / "bin", ROOT / "data" / "corpus.txt", manifest["commit"],
                 manifest["cuda_major"])


def launch(place, words):
    """Becomes a program of the bundle, in an environment in which it finds its libraries."""
    check = Check(place, Path(), False, [], {
        "cuBLASLt": gpu.find_library(gpu.CUBLAS, place.cuda_major),
        "NCCL": gpu.find_library(gpu.NCCL, "2")})
    env = {**ONE_MACHINE, **check.environment()}
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(ROOT / "lib"), env["LD_LIBRARY_PATH"]]))
    env["PATH"] = os.pathsep.join([str(ROOT / "bin"), env.get("PATH", os.defpath)])
    try:
        os.execvpe(words[0], words, env)
    except OSError as error:
        raise BookError(f"cannot start {words[0]}: {error.strerror}; there are "
                        f"{', '.join(sorted(os.listdir(ROOT / 'bin')))}", 2) from error


def main(argv):
    """./gpu-check and ./run of a bundle."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if argv[0] == "run":
            if len(argv) < 2:
                raise BookError("say which program: ./run ch01_single_gpu --help", 2)
            return launch(bundle_place(), argv[1:])
        parser = argparse.ArgumentParser(prog="./gpu-check", description=__doc__.split("\n")[0])
        add_arguments(parser)
        args = parser.parse_args(argv[1:])
        gpus = require_gpu(args.emulated)
        return end_output(run_check(bundle_place(), gpus, args.emulated,
                                    args.report or "gpu-report"))
    except BookError as error:
        say(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        say("\ngpu-check: interrupted")
        return 128 + signal.SIGINT


def checkout_place(folder):
    """The place of a build in this checkout."""
    return Place(folder / "bin", ROOT / "data" / "corpus.txt", git_commit())
