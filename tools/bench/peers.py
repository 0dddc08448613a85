"""`./book bench --peers PYTHON`: PyTorch at the same shapes, in turns with our trainer.

`--peers setup` makes a virtual environment in build/peers, with torch from wherever pip is set to
look. Its default index has builds with CUDA alone, of several GB, which run on a CPU as well;
PIP_INDEX_URL chooses another.
"""
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from tools import machine
from tools.base import ROOT, BookError, say, show_path
from tools.bench.turns import WARM_UP_STEPS, Program, take
from tools.process import die_with_parent, output_of, run_step
from tools.run.estimates import words_of

ENVIRONMENT = ROOT / "build" / "peers"
SCRIPT = ROOT / "tools" / "bench" / "torch_bench.py"
SET_UP_BYTES = 12 << 30  # the packages unpacked, and downloaded beside them
OWN, MODES = "ours", ("eager", "compile")
PROFILED_STEPS = 8
# What slows PyTorch down and is none of its doing: a BLAS told to use fewer instructions than the
# CPU has, and an allocator that gives every step's memory back to the system.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "ATEN_CPU_CAPABILITY")
SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
            "MALLOC_TOP_PAD_": str(256 << 20), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def prepare(peers):
    """The Python to run peers under: `peers` itself, or for "setup" that of build/peers.

    BookError (2) where it has no torch.
    """
    python = Path(peers) if peers != "setup" else _set_up()
    version = output_of([str(python), "-c", "import torch; print(torch.__version__)"], timeout=600)
    if version is None:
        raise BookError(f"--peers {peers}: this Python cannot import torch; try one that can, or "
                        "--peers setup", 2)
    say(f"book: peer: PyTorch {version.strip().splitlines()[-1]} of {show_path(python)}")
    if not timed_in("bf16"):
        say("book: the peer is timed in f32 alone: this CPU has no bf16 instructions, and without "
            "them a step of PyTorch in bf16 takes tens of times as long")
    return python


def timed_in(dtype):
    """Whether PyTorch is to be timed in this dtype; bench would wait for hours otherwise."""
    return dtype != "bf16" or machine.multiplies_bf16()


def _set_up():
    """Creates build/peers, unless it is there, and installs torch; its Python."""
    python = ENVIRONMENT / "bin" / "python"
    if output_of([str(python), "-c", "import torch"], timeout=600) is not None:
        return python
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(ENVIRONMENT.parent).free
    if free < SET_UP_BYTES:
        raise BookError(f"--peers setup needs {SET_UP_BYTES >> 30} GB of disk, {free >> 30} GB are "
                        f"free in {show_path(ENVIRONMENT.parent)}; try --peers PYTHON with a "
                        "Python that has torch", 2)
    run_step("creating build/peers", [sys.executable, "-m", "venv", str(ENVIRONMENT)], live=False)
    run_step("installing torch, some GB", [str(python), "-m", "pip", "install", "torch", "numpy"],
             live=True)
    return python


def environment():
    """The process environment of a peer: as many threads as we get, and memory kept for reuse."""
    env = {**machine.thread_environment(), **SETTINGS}
    for name in UNSET:
        env.pop(name, None)
    return env


def measure(python, own_command, config, dtype, seconds, turns):
    """The turns of our training program and of PyTorch's modes: [{name: lines of its steps}].

    own_command: called with a run directory; trains for longer than all turns take.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="book_peers_")))
        run_dir = scratch / "run"
        programs = {OWN: stack.enter_context(
            Program(own_command(run_dir), machine.thread_environment(), scratch / OWN,
                    run_dir / "metrics.jsonl"))}
        for mode in MODES:
            programs[mode] = stack.enter_context(Program(
                _command(python, config, dtype, mode), environment(), scratch / mode))
        return take(programs, seconds, turns)


def profile(python, config, dtype, mode):
    """{kind: ms of a step} of PyTorch in this mode; kinds as in limits.by_kind(), "other" for memory."""
    command = [*_command(python, config, dtype, mode), "--steps", str(WARM_UP_STEPS),
               "--profile", str(PROFILED_STEPS)]
    # Workers of PyTorch's compiler may outlive it, with its output open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=errors, start_new_session=True, preexec_fn=die_with_parent)
        try:
            code = child.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        errors.seek(0)
        if code != 0:
            raise BookError(f"`{shlex.join(command)}` ended with exit code {code}:\n"
                            f"{errors.read()[-2000:]}")
        return json.loads(out.read().splitlines()[-1])["ms"]


def _command(python, config, dtype, mode):
    return [str(python), str(SCRIPT), *words_of({**config, "dtype": dtype}),
            *(["--compile"] if mode == "compile" else [])]


def summarise(turns, tokens):
    """Of the turns of one case, whose steps are of so many tokens: medians over the turns of ours
    and every mode, the mode that is best by them, and of ours / that mode within a turn the median
    and the middle half."""
    steps = {name: [statistics.median(line["step_ms"] for line in turn[name]) for turn in turns]
             for name in (OWN, *MODES)}
    speeds = {name: 1e3 * tokens / statistics.median(ms) for name, ms in steps.items()}
    best = max(MODES, key=speeds.get)
    ratios = [theirs / ours for ours, theirs in zip(steps[OWN], steps[best])]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"tokens_per_s": speeds, "best": best, "ratio": quartiles[1],
            "ratio_low": quartiles[0], "ratio_high": quartiles[2], "turns": len(turns),
            "torch": turns[0][best][0]["torch"], "threads": turns[0][best][0]["threads"]}
