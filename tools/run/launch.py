"""`./book run`: starts a chapter's executable, hands signals on, judges how it ended."""
import errno
import os
import re
import shlex
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from tools import chapters, machine
from tools.base import ROOT, BookError, say, show_path
from tools.look import figures, runs, why
from tools.process import STOP_SIGNALS, output_of, signal_name, wait_for
from tools.run import bridge, build, cluster, mesh_page, mpi, packages, program_help, recipes

# With these a chapter prints something and ends: no run directory, no `done` mark.
INFORMATION_FLAGS = set(bridge.ASKING)
# Of these, what depends on how many ranks there are; they start none.
PLANNING_FLAGS = {"--plan", "--estimate", "--pp_show", "--mesh_show", "--prove"}
DIVIDING_FLAGS = {"--dp_size", "--tp_size", "--cp_size", "--pp_size"}
USAGE_ERROR = 2  # every rank ends with it when the flags are wrong
DIVERGED = 1
# After a clean end.
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
WHY_KILLED = {
    signal.SIGKILL: "the kernel does this when memory runs out; try a smaller --micro_batch_size",
    signal.SIGILL: "it was built for another CPU; remove build/ and try again",
}


def given_value(flags, name):
    """The value of a flag among a chapter's, None if it is not there. BookError (2) if it is there
    twice."""
    found = []
    for flag, value in zip(flags, [*flags[1:], None]):
        if flag == name:
            found.append(value)
        elif flag.startswith(name + "="):
            found.append(flag.partition("=")[2])
    if len(found) > 1:
        raise BookError(f"{name} is given twice, as {found[0]} and as {found[1]}; leave one of them out", 2)
    return found[0] if found else None


def given_run_dir(flags):
    """The --run_dir among a chapter's flags, None if there is none."""
    found = given_value(flags, "--run_dir")
    return Path(found) if found else None


@dataclass(frozen=True)
class Options:
    """The options of `./book run` itself."""

    only_print: bool = False
    install: bool = True
    skip_packages: bool = False
    plot: bool = True
    ranks: Optional[int] = None  # None: what the chapter's manifest says
    debug: Optional[int] = None  # this rank runs under gdb


def rank_count(chapter, options):
    """How many ranks to start. BookError (2) for a number that cannot be."""
    ranks = (chapter.ranks or 1) if options.ranks is None else options.ranks
    if ranks < 1:
        raise BookError(f"--ranks {ranks}: there must be at least one; try --ranks "
                        f"{chapter.ranks or 1}", 2)
    if ranks > 1 and chapter.ranks is None:
        raise BookError(f"{chapter.short} runs on one rank; --ranks is for the chapters from "
                        "ch02 on", 2)
    if options.debug is not None and not 0 <= options.debug < ranks:
        raise BookError(f"--debug {options.debug}: the ranks are 0 to {ranks - 1}", 2)
    if options.debug is not None and not options.only_print:
        if shutil.which("gdb") is None:
            raise BookError("--debug needs gdb, which is not installed: apt-get install gdb", 2)
        if not os.isatty(0):
            raise BookError("--debug needs a terminal to talk to gdb", 2)
    return ranks


def started_by(chapter, ranks):
    """What begins a command line of ./book that starts so many ranks of a chapter."""
    book = show_path(ROOT / "book")
    words = [book if "/" in book else f"./{book}", "run", chapter.short]
    words += ["--ranks", str(ranks)] if ranks > 1 else []
    return shlex.join([*words, "--"])


def resumed(chapter, flags, options):
    """(flags, options) with what a resumed run leaves open: the newest run of the chapter that has
    a checkpoint, and as many ranks as it had. BookError (2) if there is none."""
    run_dir = given_run_dir(flags)
    if run_dir is None:
        run_dir = runs.newest_with_checkpoint(chapter)
        if run_dir is None:
            raise BookError(f"--resume: no run of {chapter.short} below "
                            f"{show_path(ROOT / 'runs' / chapter.short)} has a checkpoint; runs "
                            "with --checkpoint_interval 50 write them", 2)
        say(f"book: {show_path(run_dir)} goes on, the newest run of {chapter.short} that has a "
            "checkpoint")
        flags = [*flags, "--run_dir", show_path(run_dir)]
    if chapter.ranks and options.ranks is None and not DIVIDING_FLAGS & {flag.partition("=")[0] for flag in flags}:
        options = replace(options, ranks=runs.ranks_of_checkpoint(run_dir) or options.ranks)
    return flags, options


def run_chapter(chapter, flags, options):
    """What `./book run` does; returns the exit code."""
    recipe = None
    if any(flag.partition("=")[0] == "--recipe" for flag in flags):
        recipe = recipes.load(chapter, given_value(flags, "--recipe") or "")
        flags = recipes.expand(flags, recipe)
    page = None
    if any(flag.partition("=")[0] == "--mesh_page" for flag in flags):
        page = given_value(flags, "--mesh_page") or ""
        flags = cluster.without(flags, "--mesh_page")
        mesh_page.check_flags(chapter, chapters.find_chapters(), flags, page)
    framework = None
    if any(flag.partition("=")[0] == "--as" for flag in flags):
        framework = bridge.find(given_value(flags, "--as") or "")
        flags = cluster.without(flags, "--as")
        bridge.check_flags(chapter, chapters.find_chapters(), flags)
    names = {flag.partition("=")[0] for flag in flags}
    informs = bool(INFORMATION_FLAGS & names) or framework is not None or page is not None
    on_ranks = "--fuzz" in names and options.ranks is not None  # of mpiexec, not threads of one process
    if "--resume" in names and not informs:
        flags, options = resumed(chapter, flags, options)
    ranks = rank_count(chapter, options)
    if options.ranks is not None and chapter.ranks and (PLANNING_FLAGS & names or framework or page):
        if "--world_size" in names:
            raise BookError(f"--ranks {ranks} and --world_size say the same thing; give one", 2)
        flags = [*flags, "--world_size", str(ranks)]
    ranks = 1 if informs and not on_ranks else ranks
    own_dir = not informs and given_run_dir(flags) is None
    executable = build.binary(build.RELEASE, chapter.name)
    of_threads = {"--prove", "--fuzz"} & names  # whose ranks are threads of one process
    threads = machine.usable_cores() if of_threads and ranks == 1 else ranks
    env = {**machine.thread_environment(ranks=threads), "USP_STARTED_BY": started_by(chapter, ranks)}
    if options.only_print:
        added = ["--run_dir", show_path(runs.next_run_dir(chapter))] if own_dir else []
        program = [show_path(executable), *added]
        question = bridge.QUESTION if framework else mesh_page.QUESTION if page else ()
        asked = [*program, *flags, *question]
        print(mpi.command_line(rank_command(asked, ranks, options.debug, None), env))
        if ranks > 1 and options.debug is None:
            print_elsewhere(program, flags, ranks)
        return 0
    if {"-h", "--help"} & names and not build.is_up_to_date(build.RELEASE, [chapter.name]):
        text = program_help.help_text(chapter, show_path(executable))
        if text is not None:
            print(text, end="")
            return 0
    if not options.skip_packages:
        packages.ensure(packages.RUN, options.install)
    if ranks > 1:
        mpi.find()  # before the work of building
    build.prepare(build.RELEASE, chapter.name)
    if recipe:
        recipes.check_flags(recipe, known_flags(chapter))
    if framework:
        return bridge.show(executable, flags, framework, recipe.title if recipe else "")
    if page:
        return mesh_page.write(executable, flags, Path(page), recipe.title if recipe else "")
    run_dir = runs.reserve_run_dir(chapter) if own_dir else given_run_dir(flags)
    added = ["--run_dir", show_path(run_dir)] if own_dir else []
    program = [show_path(executable), *added, *flags]
    terminal = os.ttyname(0) if options.debug is not None else None
    command = rank_command(program, ranks, options.debug, terminal)
    try:
        code = _run_and_judge(command, env, ranks, None if informs else run_dir, options)
        if recipe and "--estimate" in names and code == 0:
            print("", *recipe.lines(), sep="\n")
        return code
    finally:
        if own_dir and run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()  # the chapter refused its flags before it wrote anything


def run_example(chapter, name, flags, options):
    """What `./book run CHAPTER/NAME` does; an example has no run directory."""
    names = chapter.examples()
    if name not in names:
        raise BookError(f"{chapter.short} has no example {name!r}; examples there: "
                        f"{', '.join(names) or 'none'}", 2)
    ranks = rank_count(chapter, options)
    env = machine.thread_environment(ranks=ranks)
    program = [show_path(build.binary(build.RELEASE, f"{chapter.name}_{name}")), *flags]
    terminal = os.ttyname(0) if options.debug is not None and not options.only_print else None
    command = rank_command(program, ranks, options.debug, terminal)
    if options.only_print:
        print(mpi.command_line(command, env))
        return 0
    if not options.skip_packages:
        packages.ensure(packages.RUN, options.install)
    build.prepare(build.RELEASE, f"{chapter.name}_{name}")
    if ranks == 1:
        return _run_alone(command, env)
    job = mpi.Job(ranks, options.debug)
    code = job.run(command, env)
    if code != 0:
        mpi.show_held(job)
    return code


def known_flags(chapter):
    """{flag: the kind of its value, "" for a switch} of a chapter's program, as its --help lists
    them; {} if it cannot say."""
    text = output_of([str(build.binary(build.RELEASE, chapter.name)), "--help"])
    return dict(re.findall(r"^ +(?:-\w,)?(--\w[\w-]*)(?: ([A-Z]+))?", text or "", re.M))


def rank_command(program, ranks, debug, terminal):
    """The command line that runs a program on so many ranks, one of them perhaps under gdb."""
    if "/" not in program[0]:
        program = [f"./{program[0]}", *program[1:]]  # not looked up on PATH
    if ranks > 1:
        return mpi.find().command(ranks, program, debug, terminal)
    return program if debug is None else ["gdb", "--args", *program]


def print_elsewhere(program, flags, ranks):
    """Prints the commands that run these ranks on a cluster or on GPUs, each below a comment."""
    node_size = given_value(flags, "--node_size") or ""
    lines = cluster.lines(
        mpi.find(), ranks, int(node_size) if node_size.isdigit() else 0, program, flags,
        machine.usable_cores(),
        lambda count: {"OMP_WAIT_POLICY": "passive", **machine.thread_environment(ranks=count)})
    print(*lines, sep="\n")


def _run_and_judge(command, env, ranks, run_dir, options):
    """Runs a chapter; the exit code. Success = 0 and a `done` mark that this run has written; a run
    that was stopped, or has diverged, writes one too and ends with another code."""
    if run_dir is not None:
        say(f"book: {mpi.command_line(command, env)}")
        warning = machine.thread_warning(ranks)
        if warning:
            say(f"book: {warning}")
    before = runs.done_stamp(run_dir) if run_dir else None
    if ranks == 1:
        code = _run_alone(command, env)
        complete = run_dir is None or runs.done_stamp(run_dir) not in (None, before)
    elif run_dir is None:
        return _run_ranks_that_answer(command, env, ranks)
    else:
        known = why.identities(run_dir)
        job = mpi.Job(ranks, options.debug)
        code = job.run(command, env)
        complete = runs.done_stamp(run_dir) not in (None, before)
        if complete:
            code = _code_of_ranks(code, run_dir, job.signals)
        if options.debug is None and not (complete and code in (0, DIVERGED, *STOPPED)):
            code = _explain_failure(job, code, run_dir, known)
            complete = False
    if run_dir is None or options.debug is not None or (code != 0 and not complete):
        return code
    if not complete:
        raise BookError(f"{os.path.basename(command[0])} ended with exit code 0 but wrote no "
                        f"`done` mark into {show_path(run_dir)}: the run is not complete")
    try:
        _report(run_dir, options.plot)
    except OSError as error:
        # Nobody can read it, as end_output() will say; the run ended as it did.
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
    return code


def _run_ranks_that_answer(command, env, ranks):
    """Runs ranks that print something and leave no files; 1: what they say is no."""
    job = mpi.Job(ranks, None)
    code = job.run(command, env)
    if code not in (0, 1):
        mpi.show_held(job)
    return code


def _code_of_ranks(code, run_dir, signals):
    """The exit code of ranks whose `done` mark says how they ended: mpiexec may have killed some of
    them while they left, because the first that had left did so with another code than 0."""
    how = runs.done_text(run_dir).partition(" ")[0]
    if how == "diverged":
        return DIVERGED
    if how == "interrupted" and code not in STOPPED:
        return 128 + (signals[0] if signals else signal.SIGTERM)
    return code


def _run_alone(command, env):
    """Runs a program without mpiexec; returns the exit code, 128 + N where signal N killed it."""
    code, asked = wait_for(command, env)
    if code >= 0:
        return code
    if -code in (signal.SIGPIPE, *asked):  # `| head`: who has read enough wants no error
        return 128 - code
    hint = WHY_KILLED.get(-code)
    say(f"error: {os.path.basename(command[0])} was killed by {signal_name(-code)}"
        + (f" ({hint})" if hint else ""))
    return 128 - code


def _explain_failure(job, code, run_dir, known):
    """Says why a run of several ranks ended badly; returns the exit code of ./book.

    known: the identities of records that an earlier run has left here.
    """
    records = {rank: record for rank, record in why.read_records(run_dir).items()
               if (record.rank, record.pid, record.started) not in known}
    if job.killed:
        say("book: everything was ended by the second signal; the run is not complete")
        return 128 + job.signals[0]
    failed = any(record.state == "failed" for record in records.values())
    if job.signals and not failed:
        say("book: interrupted before the ranks could end in good order; the run is not complete")
        return 128 + job.signals[0]
    unfinished = sum(record.state != "finished" for record in records.values())
    witnessed = why.read_witnessed(run_dir, unfinished) if records else []
    launcher = (job.pid, job.ended_by) if job.ended_by else None
    case = why.examine(records, job.deaths, witnessed, size=job.size, stopped=job.stopped,
                       launcher=launcher)
    death, _ = why.first_death(case)
    exited = death is None or death.status in (None, USAGE_ERROR << 8)
    if code == USAGE_ERROR and exited:
        return code  # rank 0 has said what is wrong with the flags
    if records:
        why.write_endings(run_dir, job.deaths, job.stopped, launcher)
    if why.verdict(case):
        say("\nbook: the run has failed:")
        say(why.report(case))
    else:
        say(f"\nerror: the run has failed: mpiexec ended with exit code {code}")
        mpi.show_held(job)
    if launcher:
        return 128 + job.ended_by
    killed = death is not None and death.status and os.WIFSIGNALED(death.status)
    return 128 + os.WTERMSIG(death.status) if killed else 1


def _report(run_dir, plot):
    """Draws the loss plot of a finished run and says where everything lies."""
    ended = "has failed" if runs.done_text(run_dir).startswith("diverged") else "is complete"
    say(f"book: the run {ended} ({runs.done_text(run_dir)}); its files:")
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
