"""Starts the plot scripts under the first Python on this machine that has what they import."""
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.base import ROOT, BookError
from tools.look.trace import RECORDED

PLOT_MODULES = ("numpy", "matplotlib")
# With the project's folder in place of the working directory, which may hold a `tools` of its own.
RUN_MODULE = ("import runpy, sys; sys.path[0] = sys.argv.pop(1); "
              "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def _candidates():
    """Pythons to try, best first. The one on PATH may be a pyenv or conda without matplotlib."""
    names = ["python3", "python"] + [f"python3.{minor}" for minor in range(19, 8, -1)]
    found = [sys.executable, shutil.which("python3"), "/usr/bin/python3", "/usr/local/bin/python3"]
    found += [shutil.which(name) for name in names]
    return list(dict.fromkeys(path for path in found if path and os.access(path, os.X_OK)))


@functools.lru_cache(maxsize=None)
def find_python(modules=PLOT_MODULES):
    """The first Python >= 3.9 that imports the modules, None if there is none."""
    test = f"import sys, {', '.join(modules)}; sys.exit(sys.version_info < (3, 9))"
    for python in _candidates():
        try:
            result = subprocess.run([python, "-c", test], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return python
    return None


def need_python():
    """The Python that draws; BookError if there is none."""
    python = find_python()
    if python is None:
        raise BookError("no Python here imports numpy and matplotlib, which the plots need; try:\n"
                        "  apt-get install python3-numpy python3-matplotlib")
    return python


def draw(script, arguments):
    """Runs tools/plot/<script>.py, or a chapter's script given as a module, such as
    chNN_x.figures.plot_y; BookError if no Python can, or if the script refuses."""
    python = need_python()
    module = script if "." in script else f"tools.plot.{script}"
    command = [python, "-c", RUN_MODULE, str(ROOT), module, *map(str, arguments)]
    env = dict(os.environ, MPLBACKEND="Agg")
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env,
                            text=True, errors="replace", check=False)
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:] or ["no message"]
        name = script.rsplit(".", 1)[-1].replace("plot_", "")
        raise BookError(f"{name} plot: {last[0]}", 2 if result.returncode == 2 else 1)
    sys.stderr.write(result.stderr)


def draw_timeline(run_dir, source=None, step=None, script="timeline"):
    """Draws a step of trace.json, or of another trace, into the run directory; the PNG's path.

    script: timeline draws ranks and their messages, ops the operators of one rank.
    """
    path = Path(run_dir) / (source or RECORDED)
    if source and not path.exists():
        path = Path(source)
    stem = Path(run_dir) / (script if path.name == RECORDED else f"{script}_{path.stem}")
    draw(script, [run_dir, path, stem, *([] if step is None else [step])])
    return f"{stem}.png"
