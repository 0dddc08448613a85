"""What the parts of ./book gpu-check share: programs that run within limits, and what is asked of a GPU.

Python's own modules suffice, as in all that a bundle takes along.
"""
import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from tools import machine
from tools.process import die_with_parent, how_ended

GRACE_S = 2.0  # between the wish to end and the end
# MPI's messages stay in shared memory: by way of TCP, which UCX takes besides where it finds no
# module for copies between processes, ranks of some versions wait for ever in MPI_Finalize.
ONE_MACHINE = {"UCX_TLS": "sm,self"}
QUIET = {"eval_interval": 0, "sample_tokens": 0, "trace_steps": 0}
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "ffn_hidden_size": 352, "seq_len": 128, "micro_batch_size": 4, "steps": 5}
SMALL_MODEL = {**MODEL, "hidden_size": 32, "ffn_hidden_size": 88, "seq_len": 32,
               "micro_batch_size": 2}
BILLION = {"model": "1B", "dtype": "bf16", "seq_len": 2048, "attention": "naive", "steps": 8}
# Samples that a GPU of so many MiB can train on at a time, the probabilities of all layers kept.
MICRO_BATCHES = ((90 << 10, 8), (60 << 10, 4), (0, 1))
SKIPPED_STEPS = 3
# What our programs say where a kernel has failed, and what makes CUDA wait for each of them.
BLOCKING = "CUDA_LAUNCH_BLOCKING"
KERNEL_FAILED = f"{BLOCKING}=1 shows which"
NO_TIME = "not measured"  # what the emulated device says of it, too


class Skip(Exception):
    """A part cannot run here, and why."""


class Fail(Exception):
    """A part found something wrong: what, and the figures that there are nevertheless."""

    def __init__(self, why, figures=None):
        super().__init__(why)
        self.figures = figures or {}


class Late(Fail):
    """A program took longer than the part's time."""


@dataclass(frozen=True)
class Place:
    """Where the programs are, and what they were built from."""

    bin: Path
    corpus: Path
    commit: str
    cuda_major: str = ""
    lib: Optional[Path] = None  # libraries that travel with the programs
    mpiexec: tuple = ()  # the words that start ranks
    layouts: dict = field(default_factory=dict)  # {chapter with ranks: {layout: flags}}
    gcc: Optional[Path] = None  # libraries of the compiler, where the machine's are older


@dataclass(frozen=True)
class Part:
    """One part of the check; run(check) gives figures: {title: [row as {column: value}]}."""

    name: str
    title: str
    limit_s: float
    run: Callable
    needs_gpu: bool = False  # the emulated one does not do
    tool: str = ""  # without which no GPU can tell
    # All that it runs on a GPU, or a function that names them; None: any of those that a check has.
    programs: object = None


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
    cards: int = 0  # with a rank each, of --ranks

    def program(self, name, on_device=True):
        """The path of a program of ours, of its emulated twin where there is no GPU."""
        path = self.place.bin / (name + ("_emulated" if self.emulated and on_device else ""))
        if not path.exists():
            raise Skip(f"{path.name} was not built")
        return str(path)

    def environment(self):
        """In which our programs find the libraries that do not travel with them."""
        folders = [str(self.place.gcc)] if self.place.gcc else []
        folders += [str(path.parent) for path in self.libraries.values() if path]
        folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        return {"NCCL_DEBUG": "WARN",  # or NCCL keeps the reason of an error to itself
                **machine.thread_environment(),
                "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(folders))}

    def rank_environment(self, ranks=1):
        """The same for so many ranks, and for an mpiexec that travels with the programs."""
        own = self.environment()
        libraries = own["LD_LIBRARY_PATH"]
        env = {**own, **machine.thread_environment(ranks=ranks), "LD_LIBRARY_PATH": libraries}
        if self.place.lib:
            env = {**ONE_MACHINE, **env,
                   "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.place.lib), libraries])),
                   "PATH": os.pathsep.join([str(self.place.bin), env.get("PATH", os.defpath)])}
        return env

    def output(self, command, fine=(0,), env=None):
        """What a command prints, its log besides; Fail if it ends otherwise than it may, or late."""
        env = env or self.environment()
        code, text = self._run(command, env, f"{self.log}.txt")
        if code is None:
            raise Late(f"{Path(command[0]).name} took longer than the part's time")
        if code not in fine:
            why = last_line(text)
            if KERNEL_FAILED in text:  # which of them, only a run tells in which none overlap
                again, text = self._run(command, {**env, BLOCKING: "1"}, f"{self.log}-blocking.txt")
                why += f"; with {BLOCKING}=1: " + ("it passed" if again in fine else last_line(text))
            raise Fail(f"{Path(command[0]).name} {how_it_ended(code)}: {why}")
        return text

    def _run(self, command, env, log):
        return run_limited(command, env, self.deadline - time.monotonic(), self.folder / log)

    def turns(self, most):
        """Counts up to `most` rounds: the first, and others while one more is likely to fit in."""
        longest_s = 0.0
        for number in range(most):
            begin = time.monotonic()
            if number and begin + longest_s > self.deadline:
                return
            yield number
            longest_s = max(longest_s, time.monotonic() - begin)


def last_line(text):
    """Of an output, the last that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:200]


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


def needs_cublas(check):
    """Skip where no program can compute on the GPU."""
    if not check.emulated and not check.libraries["cuBLASLt"]:
        raise Skip("there is no cuBLASLt")


def lacks_bf16(check):
    """Why a program of ours is refused bf16 on this GPU, "" where it is not."""
    if all(each.multiplies_bf16 for each in check.gpus[:1]):
        return ""
    return f"a GPU of compute capability {check.gpus[0].capability} does not multiply bf16"


def words_of(flags):
    """Flags as words of a command line; True is a switch."""
    return [word for name, value in flags.items()
            for word in (f"--{name}", *(() if value is True else (str(value),)))]


def read_metrics(run_dir):
    """metrics.jsonl of a run."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train(check, device, flags, run_dir, before=(), chapter="ch01_single_gpu", env=None):
    """metrics.jsonl of a run of a chapter, on one rank. before: a tool under which it runs."""
    program = check.program(chapter, on_device=device == "cuda")
    check.output([*before, program,
                  *words_of({**QUIET, **flags, "device": device, "run_dir": run_dir,
                             "data": check.place.corpus})], env=env)
    return read_metrics(run_dir)


def billion(check):
    """The flags of a model of a billion parameters, in bf16; Skip where the chapter has none or the
    GPU computes in no bf16."""
    if lacks_bf16(check):
        raise Skip(lacks_bf16(check))
    if " 1B" not in check.output([check.program("ch01_single_gpu"), "--help"]):
        raise Skip("the first chapter has no preset 1B")
    return {**BILLION, "micro_batch_size": next(
        size for memory, size in MICRO_BATCHES if check.gpus[0].memory_mib >= memory)}


def middle(records, skipped=SKIPPED_STEPS):
    """The median step, by its time, of those after the first ones; Fail if there are none."""
    timed = sorted(records[skipped:], key=lambda record: float(record["step_ms"]))
    if not timed:
        raise Fail(f"{len(records)} steps are too few")
    return timed[len(timed) // 2]


def json_line(text):
    """The last line of an output that is JSON."""
    for line in reversed(text.splitlines()):
        if line.startswith(("[", "{")):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise Fail("it printed no figures")


def difference(a, b):
    """|a - b| / |b|; NaN or infinity in either is infinitely far."""
    a, b = float(a), float(b)
    return abs(a - b) / max(abs(b), 1e-300) if abs(a) + abs(b) < float("inf") else float("inf")


def largest_difference(here, there, name):
    """Of a quantity, over the steps of two runs; infinity if there is no step."""
    return max((difference(a[name], b[name]) for a, b in zip(here, there)), default=float("inf"))


def asked(what, found, least=None, most=None):
    """A row: what is asked, what was found (None: not measured), whether it is reached."""
    reached = found is not None and (found >= least if most is None else found <= most)
    return {"what": what, "asked": f"at least {least}" if most is None else f"at most {most}",
            "found": NO_TIME if found is None else f"{found:.3g}",
            "reached": "unknown" if found is None else "yes" if reached else "no"}
