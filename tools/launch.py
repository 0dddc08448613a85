"""`./book run`: starts a chapter's executable, hands signals on, judges how it ended."""
import os
import shlex
import signal
from pathlib import Path

from tools import build, figures, machine, packages, runs
from tools.base import BookError, say, show_path
from tools.process import signal_name, wait_for

# With these a chapter prints something and ends: no run directory, no `done` mark.
INFORMATION_FLAGS = {"-h", "--help", "--help-all", "--version"}
WHY_KILLED = {
    signal.SIGKILL: "the kernel does this when memory runs out; try a smaller --micro_batch_size",
    signal.SIGILL: "it was built for another CPU; remove build/ and try again",
}


def given_run_dir(flags):
    """The --run_dir among a chapter's flags (the last one counts), None if there is none."""
    found = None
    for flag, value in zip(flags, [*flags[1:], None]):
        if flag == "--run_dir":
            found = value
        elif flag.startswith("--run_dir="):
            found = flag.partition("=")[2]
    return Path(found) if found else None


def run_chapter(chapter, flags, only_print=False, install=True, skip_packages=False, plot=True):
    """What `./book run` does; returns the exit code."""
    informs = bool(INFORMATION_FLAGS & set(flags))
    own_dir = not informs and given_run_dir(flags) is None
    executable = build.binary(build.RELEASE, chapter.name)
    if only_print:
        added = ["--run_dir", show_path(runs.next_run_dir(chapter))] if own_dir else []
        print(command_line([show_path(executable), *added, *flags], machine.thread_environment()))
        return 0
    if not skip_packages:
        packages.ensure(packages.RUN, install)
    build.prepare(build.RELEASE, chapter.name)
    run_dir = runs.reserve_run_dir(chapter) if own_dir else given_run_dir(flags)
    added = ["--run_dir", show_path(run_dir)] if own_dir else []
    try:
        return _run_and_judge([show_path(executable), *added, *flags],
                              None if informs else run_dir, plot)
    finally:
        if own_dir and run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()  # the chapter refused its flags before it wrote anything


def command_line(command, env):
    """A command as one would type it, with the environment that the launcher adds to it."""
    return f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} {shlex.join(command)}"


def _run_and_judge(command, run_dir, plot):
    """Runs a chapter. Success = exit code 0 and a `done` mark that this run has written."""
    env = machine.thread_environment()
    if run_dir is not None:
        say(f"book: {command_line(command, env)}")
    before = runs.done_stamp(run_dir) if run_dir else None
    # A bare file name would be looked up on PATH.
    code, _ = wait_for([os.path.abspath(command[0]), *command[1:]], env)
    name = os.path.basename(command[0])
    if code < 0:
        hint = WHY_KILLED.get(-code)
        say(f"error: {name} was killed by {signal_name(-code)}" + (f" ({hint})" if hint else ""))
        return 128 - code
    if code > 0 or run_dir is None:
        return code
    if runs.done_stamp(run_dir) in (None, before):
        raise BookError(f"{name} ended with exit code 0 but wrote no `done` mark into "
                        f"{show_path(run_dir)}: the run is not complete")
    _report(run_dir, plot)
    return 0


def _report(run_dir, plot):
    """Draws the loss plot of a finished run and says where everything lies."""
    say(f"book: the run is complete ({runs.done_text(run_dir)}); its files:")
    if plot:
        try:
            figures.draw("loss", [run_dir])
            print(f"  loss plot   {show_path(run_dir / 'loss.png')}")
        except BookError as error:
            say(f"book: no loss plot: {error}")
    files = (("report", "report.md"), ("metrics", "metrics.jsonl"), ("trace", "trace.json"))
    for what, name in files:
        if (run_dir / name).exists():
            print(f"  {what:<11} {show_path(run_dir / name)}")
