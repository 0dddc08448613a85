"""`./book plan --measure N`: the best layouts of a search, run on this machine.

Each layout runs for a few steps in every round, all of them in turn, the second time in the opposite
order: what else the machine does meets them alike. Steps at a run's begin are left out; of the
others the median counts. All are traced, so that the run's own replay can be laid out: the same
steps with a core for every rank. Where there are fewer cores than ranks, that is what counts.
"""
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tools import machine
from tools.base import BookError, say
from tools.bench import steady
from tools.look import trace as traces
from tools.process import descendants, die_with_parent, signal_name
from tools.run import build, cluster, launch, mpi, packages, plan

ROUNDS = 2
MIN_STEPS = steady.SKIPPED_STEPS + 3  # two that count
RAN = "ran"
# What a search is asked, and no run.
OF_A_SEARCH = ("--cluster", "--nodes", "--plan", "--require")


@dataclass
class Row:
    """A layout: what is predicted of it, and how its runs ended."""

    flags: str
    predicted: float  # seconds of a step, like all that follows
    gib: float        # of the fullest rank
    outcome: str = RAN
    steps: list = field(default_factory=list)     # by the clock on the wall, of all rounds
    replayed: list = field(default_factory=list)  # with a core for every rank

    def found(self, by_replay):
        """The median step; None where the layout did not run."""
        steps = self.replayed if by_replay else self.steps
        return statistics.median(steps) if self.outcome == RAN and steps else None

    def quartiles(self, by_replay):
        """(lower, upper) of the steps; the only one twice."""
        steps = self.replayed if by_replay else self.steps
        if len(steps) < 2:
            return steps[0], steps[0]
        lower, _, upper = statistics.quantiles(steps, n=4, method="inclusive")
        return lower, upper


# --- judging --------------------------------------------------------------------------------------


def places(values):
    """The place of each value in their order, from 1 on; equal ones share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def rank_correlation(predicted, measured):
    """Spearman's: 1 where both have the same order, -1 where one is the other backwards. None for
    fewer than three, or where all are equal."""
    if len(predicted) < 3 or len(set(predicted)) == 1 or len(set(measured)) == 1:
        return None
    return _correlation(places(predicted), places(measured))


def _correlation(a, b):
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    above = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b))
    below = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return above / below ** 0.5


def regret(rows, by_replay):
    """How much longer the step of the planner's choice, the first row, takes than that of the best
    that was measured, as a share; None where the choice did not run."""
    measured = [row.found(by_replay) for row in rows]
    if measured[0] is None:
        return None
    return measured[0] / min(value for value in measured if value is not None) - 1


# --- running --------------------------------------------------------------------------------------


def run_layout(program, ranks, flags, run_dir, limit_s):
    """(the trace, RAN) of a run of a few steps; (None, why not) of one that fails or takes too long."""
    command = [str(program), *flags, "--run_dir", str(run_dir)]
    command = mpi.find().command(ranks, command) if ranks > 1 else command
    with subprocess.Popen(command, env=machine.thread_environment(ranks=ranks), text=True, errors="replace",
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True, preexec_fn=die_with_parent) as child:
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            return None, f"not done within {limit_s:g} s"
        except BaseException:
            _end(child)
            raise
    if child.returncode != 0:
        return None, how_failed(child.returncode, output)
    return traces.load(Path(run_dir) / traces.RECORDED), RAN


def _end(child):
    """Ends a run, its ranks first."""
    for pid in [*descendants(child.pid)[::-1], child.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.communicate()


def how_failed(code, output):
    """Why a run ended badly, in a few words."""
    killed = -code if code < 0 else code - 128
    if killed == signal.SIGKILL:
        return "killed by SIGKILL, as where memory runs out"
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    if said:
        return said[0][len("error: "):].split(";")[0]
    return f"killed by {signal_name(killed)}" if killed > 0 else f"exit code {code}"


def measure(rows, program, ranks, flags, limit_s):
    """Runs each layout once a round, and notes in its row what came out. One that fails is not tried
    again."""
    for number in range(ROUNDS):
        for place, row in list(enumerate(rows, 1))[::-1 if number % 2 else 1]:
            if row.outcome != RAN:
                continue
            say(f"book: round {number + 1}/{ROUNDS}, layout {place} of {len(rows)}: {row.flags}")
            with tempfile.TemporaryDirectory(prefix="book_measure_") as scratch:
                own = shlex.split(row.flags)
                given = cluster.without(flags, *(word for word in own if word.startswith("--") and
                                                 word != "--sequence_parallel"))
                given = [word for word in given if word != "--sequence_parallel" or word not in own]
                recorded, row.outcome = run_layout(program, ranks, [*given, *own], Path(scratch) / "run",
                                                   limit_s)
            if recorded is not None:
                row.steps += [ms / 1000 for ms in steady.later_steps(recorded)[0]]
                alone = steady.on_links(recorded)
                row.replayed += [ms / 1000 for ms in steady.later_steps(alone)[0]]


def flags_of_a_run(flags):
    """The flags of a search as those of a run of a few steps, all of them traced. BookError (2) for
    several nodes, and for fewer steps than can be left out."""
    nodes = launch.given_value(flags, "--nodes") or "1"
    if nodes != "1":
        raise BookError(f"--nodes {nodes}: --measure runs on this machine, which is one node; try --nodes 1, with a "
                        "cluster's file whose ranks_per_node are all ranks", 2)
    flags = cluster.without(flags, *OF_A_SEARCH)
    given = {flag.partition("=")[0] for flag in flags}
    steps = launch.given_value(flags, "--steps") or str(steady.STEPS)
    if steps.isdigit() and int(steps) < MIN_STEPS:
        raise BookError(f"--steps {steps}: the first {steady.SKIPPED_STEPS} are left out, and some must remain; "
                        f"try --steps {steady.STEPS}", 2)
    quiet = {**steady.QUIET, "steps": steps, "trace_steps": steps}
    return [*flags, *(word for name, value in quiet.items() if f"--{name}" not in given
                      for word in (f"--{name}", str(value)))]


def leave_out_too_large(rows, ranks):
    """Notes in their rows which layouts need more memory than there is. BookError (2) where all do."""
    free = machine.memory_bytes()[1] / 2**30
    if not free:
        return
    for row in rows:
        if ranks * row.gib > free:
            row.outcome = f"not run: it needs {ranks * row.gib:.1f} GiB in all, {free:.1f} are free here"
    if all(row.outcome != RAN for row in rows):
        least = min(rows, key=lambda row: row.gib)
        raise BookError(
            f"--measure {len(rows)}: of the {len(rows)} best layouts the one that needs least, {least.flags}, takes "
            f"{ranks * least.gib:.1f} GiB on {traces.counted(ranks, 'rank')} in all, and this machine has "
            f"{free:.1f} GiB free; try a smaller --model, or --require \"mem<={free / ranks:.2g}\"", 2)


# --- saying ---------------------------------------------------------------------------------------


def as_json(rows, facts, by_replay):
    """What was found, for programs: seconds, shares; null where there is nothing to say."""
    found = []
    for row in rows:
        entry = {"flags": row.flags, "outcome": row.outcome, "predicted_s": row.predicted, "measured_s": None}
        if row.found(by_replay) is not None:
            entry.update(measured_s=row.found(by_replay), quartiles_s=row.quartiles(by_replay),
                         clock_s=row.found(False), own_replay_s=row.found(True), steps=len(row.steps))
        found.append(entry)
    return {**facts, "rows": found, **_judged(rows, by_replay)}


def _judged(rows, by_replay):
    ran = [row for row in rows if row.found(by_replay) is not None]
    return {"rank_correlation": rank_correlation([row.predicted for row in ran],
                                                 [row.found(by_replay) for row in ran]),
            "regret": regret(rows, by_replay)}


def as_text(rows, facts, by_replay):
    """The same in a table, and in two sentences."""
    measured_by = f"each run's own replay, for {facts['cores']} cores are fewer than the ranks" if by_replay \
        else "the clock"
    lines = [f"{facts['cluster']}: the {len(rows)} best layouts of {traces.counted(facts['ranks'], 'rank')}, "
             f"{facts['tokens']} tokens a step, on this machine. Measured by {measured_by}:",
             f"medians of {ROUNDS} rounds; of each run the first {facts['left_out']} steps are left out.", "",
             f"{'':>4}{'predicted, s':>14}{'measured, s':>14}{'middle half':>18}{'off by':>9}{'own replay, s':>16}"]
    for place, row in enumerate(rows, 1):
        measured = row.found(by_replay)
        if measured is None:
            lines.append(f"{place:>4}{row.predicted:>14.4f}{'-':>14}   {row.outcome}")
        else:
            lower, upper = row.quartiles(by_replay)
            middle = f"{lower:.4f} to {upper:.4f}"
            lines.append(f"{place:>4}{row.predicted:>14.4f}{measured:>14.4f}{middle:>18}"
                         f"{100 * (row.predicted / measured - 1):>+8.1f}%{row.found(True):>16.4f}")
        lines.append(f"      {row.flags}")
    return "\n".join([*lines, "", *_sentences(rows, by_replay)])


def _sentences(rows, by_replay):
    ran = [row for row in rows if row.found(by_replay) is not None]
    judged = _judged(rows, by_replay)
    lines = [f"{len(ran)} of {len(rows)} ran."]
    if judged["rank_correlation"] is not None:
        lines.append(f"Rank correlation (Spearman) of prediction and measurement: {judged['rank_correlation']:.2f}")
    if judged["regret"] is None:
        lines.append("Regret: none can be told, because the planner's choice did not run")
    else:
        best = min(ran, key=lambda row: row.found(by_replay))
        lines.append(f"Regret: the planner's choice takes {ran[0].found(by_replay):.4f} s, number "
                     f"{rows.index(best) + 1} as the best measured {best.found(by_replay):.4f} s: "
                     f"{100 * judged['regret']:.1f} % more")
    return lines


# --- ./book plan --measure ------------------------------------------------------------------------


def best_of_search(program, flags, count):
    """(what the search says as JSON, its exit code). BookError (2) with the program's own words."""
    done = subprocess.run([str(program), *flags, "--plan_best", str(count), "--plan_json"], text=True, check=False,
                          env=machine.thread_environment(), stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode not in (0, 3):
        raise BookError(done.stderr.strip().removeprefix("error: "), done.returncode)
    return json.loads(done.stdout), done.returncode


def run_measure(name, batch, flags, count, limit_s, wants_json, options):
    """What `./book plan --measure` does; the exit code: 1 where no layout ran."""
    asked = plan.search_flags(name, batch, flags)
    of_a_run = flags_of_a_run(asked)
    chapter = plan.find_chapter()
    if not options.skip_packages:
        packages.ensure(packages.RUN, options.install)
    build.prepare(build.RELEASE, chapter.name)
    program = build.binary(build.RELEASE, chapter.name)
    found, code = best_of_search(program, asked, count)
    if code != 0:
        raise BookError("--measure: no layout is as --require says, so there is nothing to run", code)
    ranks, cores = found["ranks"], machine.usable_cores()
    rows = [Row(row["flags"], row["step_s"], row["gib"]) for row in found["best"]]
    leave_out_too_large(rows, ranks)
    measure(rows, program, ranks, of_a_run, limit_s)
    by_replay = ranks > cores
    facts = {"cluster": found["cluster"], "ranks": ranks, "cores": cores, "tokens": found["tokens"],
             "measured_by": "own replay" if by_replay else "clock", "rounds": ROUNDS,
             "left_out": steady.SKIPPED_STEPS}
    print(json.dumps(as_json(rows, facts, by_replay), indent=2) if wants_json else as_text(rows, facts, by_replay))
    return 0 if any(row.outcome == RAN for row in rows) else 1
