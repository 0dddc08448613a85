"""What this chapter's bench measures of ranks, and the run whose rank is killed.

One rank with all threads against as many ranks of one thread each, at equal global batch; what
operators reach on one such rank and on two; the collectives, next to the MPI library's own; emulated
links, next to what was asked of them; what tracing costs; how much communication the ways of data
parallelism hide; and the stages of ZeRO next to plain data parallelism.
"""
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tools import machine
from tools.base import BookError, say
from tools.bench import layouts, limits
from tools.bench.bench import DTYPES, SKIPPED_STEPS, profile, run_once, run_quietly, steps_for
from tools.look import why
from tools.run import build, mpi

from . import overlap, zero

TRACING_ROUNDS = 7  # at least: it costs less than one round differs from the next
# Ranks and flags of comm_bench: on more ranks than cores MPI_Allreduce spins, so it gets less to do.
COLLECTIVES = ((2, ()), (8, ("--rounds", "50", "--large", "65536")))
KILL_RANKS, KILL_STEP, KILL_DEADLINE_S = 4, 5, 120


def why_a_rank_was_lost(chapter):
    """What ./book why says of a rank that was killed."""
    with tempfile.TemporaryDirectory(prefix="book_figures_") as scratch:
        run_dir = Path(scratch) / "run"
        _kill_a_rank(chapter, run_dir)
        return why.report(why.examine(why.read_records(run_dir),
                                      witnessed=why.read_witnessed(run_dir))) + "\n"


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


def bench(chapter, record, seconds, rounds):
    """What goes into the record beside what every chapter measures."""
    return {"layouts": layouts.compare(record["results"]), "rates": _measure_rates(chapter),
            "collectives": _measure_collectives(), "links": _measure_links(),
            "tracing": _measure_tracing(chapter, seconds, rounds),
            "overlap": overlap.measure(chapter), "replay": overlap.check_replay(chapter),
            "zero": zero.compare(
                lambda dtype, **flags: run_once(chapter, "B", dtype, overlap.RANKS,
                                                SKIPPED_STEPS + zero.TIMED_STEPS, **flags),
                DTYPES, rounds)}


def _measure_collectives():
    """What comm_bench prints for each number of ranks."""
    program = str(build.binary(build.RELEASE, "comm_bench"))
    measured = []
    for ranks, flags in COLLECTIVES:
        say(f"book: collectives on {ranks} ranks")
        command = mpi.find().command(ranks, [program, *flags])
        measured.append(json.loads(run_quietly(command, ranks).splitlines()[-1]))
    return measured


def _measure_links():
    """What comm_bench says of emulated links: asked and measured microseconds of messages."""
    say("book: emulated links")
    program = str(build.binary(build.RELEASE, "comm_bench"))
    return json.loads(run_quietly(mpi.find().command(2, [program, "--links"]), 2).splitlines()[-1])


def _measure_tracing(chapter, seconds, rounds):
    """{untraced, traced}: medians of tokens/s in configuration A, every step traced or none."""
    ranks = machine.usable_cores()
    steps = steps_for(seconds, run_once(chapter, "A", "f32", ranks, 8)["step_ms"])
    speeds = {"untraced": [], "traced": []}
    rounds = max(rounds, TRACING_ROUNDS)
    for number in range(rounds):
        for name, traced_steps in (("untraced", 0), ("traced", steps)):
            result = run_once(chapter, "A", "f32", ranks, steps, trace_steps=traced_steps)
            speeds[name].append(result["tokens_per_s"])
            say(f"book: round {number + 1}/{rounds}  {name:<8}  {result['tokens_per_s']:9.0f} "
                "tokens/s")
    return {"ranks": ranks, "steps": steps,
            **{name: statistics.median(values) for name, values in speeds.items()}}


def _measure_rates(chapter):
    """What kinds of operators reach on a rank of one thread, alone and as one of two, which
    share A's batch: [{dtype, ranks, rates: {kind: GFLOP/s or GB/s}}]."""
    return [{"dtype": dtype, "ranks": ranks,
             "rates": {kind: of["rate"] for kind, of in limits.by_kind(
                 profile(chapter, "A", dtype, ranks, threads=1)).items()}}
            for dtype in DTYPES for ranks in (1, 2)]


def lines(record):
    """All of it as Markdown."""
    return (layouts.lines(record) + collective_lines(record) + rate_lines(record)
            + link_lines(record)
            + (zero.compared_lines(record["zero"]) if "zero" in record else []))


def collective_lines(record):
    """All-reduces, ours and the MPI library's, as Markdown."""
    lines = []
    if "collectives" in record:
        lines += ["", "| all-reduce | ranks | ours | MPI_Allreduce | its time over ours |",
                  "|---|---|---|---|---|"]
    for entry in record.get("collectives", []):
        lines.append(f"| {entry['small_bytes']:,} bytes | {entry['ranks']} | "
                     f"{entry['small_us']:.0f} us | | |")
        lines.append(f"| {entry['large_bytes']:,} bytes | {entry['ranks']} | "
                     f"{entry['large_ms']:.2f} ms | {entry['mpi_ms']:.2f} ms | "
                     f"{entry['mpi_ms'] / entry['large_ms']:.1f} |")
    return lines


def rate_lines(record):
    """What operators reach on a rank of one thread, alone and as one of two, as Markdown."""
    if "rates" not in record:
        return []
    kinds = list(record["rates"][0]["rates"])
    lines = ["", "| a rank of one thread, A | " + " | ".join(
        f"{kind}, {limits.UNITS[kind]}" for kind in kinds) + " |", "|---|" + "---:|" * len(kinds)]
    lines += [f"| {entry['dtype']}, {'alone' if entry['ranks'] == 1 else 'one of two'} | "
              + " | ".join(f"{entry['rates'][kind]:.1f}" for kind in kinds) + " |"
              for entry in record["rates"]]
    return lines


def link_lines(record):
    """What `./book bench` measured of emulated links and of tracing, as Markdown."""
    lines = []
    if "links" in record:
        lines += ["", "| emulated link | message | asked | measured | ratio |", "|---|---|---|---|---|"]
        lines += [f"| {entry['latency_us']:g} us, {entry['gb_per_s']:g} GB/s | {entry['bytes']:,} bytes | "
                  f"{entry['asked_us']:,.0f} us | {entry['measured_us']:,.0f} us | {entry['ratio']:.3f} |"
                  for entry in record["links"]]
    if "replay" in record:
        lines += ["", "| ranks, on their own links and cores | step, measured | step, replayed | ratio |",
                  "|---|---|---|---|"]
        lines += [f"| {entry['ranks']} | {entry['step_ms']:.1f} ms | {entry['replayed_step_ms']:.1f} ms | "
                  f"{entry['replayed_step_ms'] / entry['step_ms']:.3f} |" for entry in record["replay"]]
    if "tracing" in record:
        tracing = record["tracing"]
        lines += ["", f"With every step traced, configuration A runs at "
                  f"{tracing['traced'] / tracing['untraced']:.3f} of its tokens/s without."]
    return lines


def text(record):
    """The same for the terminal."""
    return [*_said(record), *(zero.compared_lines(record["zero"]) if "zero" in record else [])]


def _said(record):
    yield from layouts.text(record)
    for entry in record.get("rates", []):
        yield (f"{entry['dtype']} on {entry['ranks']} rank{'s' * (entry['ranks'] > 1)} of one thread: "
               + ", ".join(f"{kind} {rate:.1f} {limits.UNITS[kind]}"
                           for kind, rate in entry["rates"].items()))
    for entry in record.get("collectives", []):
        yield (f"{entry['ranks']} ranks: all-reduce of {entry['small_bytes']} bytes in "
               f"{entry['small_us']:.0f} us; of {entry['large_bytes']} bytes in "
               f"{entry['large_ms']:.2f} ms, MPI_Allreduce {entry['mpi_ms']:.2f} ms: "
               f"{entry['ratio']:.2f} of its speed")
    for entry in record.get("links", []):
        yield (f"link of {entry['latency_us']:g} us and {entry['gb_per_s']:g} GB/s: "
               f"{entry['bytes']:>8} bytes in {entry['measured_us']:.0f} us, "
               f"{entry['ratio']:.3f} of what was asked")
    if "tracing" in record:
        tracing = record["tracing"]
        yield (f"tracing every step: {tracing['traced'] / tracing['untraced']:.3f} of the tokens/s")
    for entry in record.get("overlap", {}).get("ways", []):
        yield (f"{entry['grad_sync']:<10} on a link {record['overlap']['link']}: step "
               f"{entry['step_ms']:.0f} ms, replayed {entry['replayed_step_ms']:.0f} ms; "
               f"{entry['exposed_ms']:.0f} ms of communication exposed, {entry['messages']} messages")
    for entry in record.get("replay", []):
        yield (f"replay of {entry['ranks']} rank{'s' * (entry['ranks'] > 1)} on the links and cores "
               f"that they had: step {entry['replayed_step_ms']:.1f} ms, measured "
               f"{entry['step_ms']:.1f} ms")
