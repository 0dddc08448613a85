"""What this chapter's bench measures of operators: memory-bound ones next to memory, attention next
to the matmul library, where a step's time goes, and what techniques gained."""
from tools.base import say
from tools.bench import limits
from tools.bench.bench import CONFIGS, DTYPES, MIN_STEPS, SKIPPED_STEPS, label, profile, run_once

from . import techniques

PROGRAMS = (limits.PORTABLE_PROGRAM,)
SLOWEST = 8  # operators that the table names


def bench(chapter, _record, _seconds, rounds):
    """{memory, attention} by dtype, the profiles of all configurations and what techniques gained."""
    say("book: memory-bound operations and attention, next to memory and matmul")
    found = {"memory": {dtype: limits.op_bench("memory", dtype=dtype, seconds=0.5)
                        for dtype in DTYPES},
             "attention": {dtype: limits.op_bench("attention", dtype=dtype) for dtype in DTYPES},
             "profiles": [profile(chapter, name, dtype) for name in CONFIGS for dtype in DTYPES]}

    def naive_runs(name, dtype):
        say(f"book: {label(name, dtype, 1)}: what techniques gained")
        return [tuple(run_once(chapter, name, dtype, 1, SKIPPED_STEPS + MIN_STEPS,
                                attention=attention)["step_ms"]
                      for attention in ("blockwise", "naive")) for _ in range(rounds)]

    found["techniques"] = techniques.measure(found["profiles"], found["memory"], naive_runs, CONFIGS)
    return found


def no_lines(_record):
    """bench.md shows the medians alone; the rest is in time.md."""
    return []


def text(record):
    """Operations next to their limits, what calling them costs, and what techniques gained."""
    return list(_said(record))


def _said(record):
    for dtype, entries in record["memory"].items():
        for entry in entries:
            yield (f"{dtype:<5} {entry['op']:<24} {entry['gb_per_s']:7.1f} GB/s, "
                   f"{entry['fraction']:.2f} of triad's {entry['triad_gb_per_s']:.1f}")
    for dtype, entry in record["attention"].items():
        yield (f"{dtype:<5} attention, causal half, {entry['gflops']:.0f} GFLOP/s (forward "
               f"{entry['forward_gflops']:.0f}, backward {entry['backward_gflops']:.0f}), "
               f"{entry['fraction']:.2f} of the {entry['f32_matmul_gflops']:.0f} of an f32 matmul")
    for profile in record["profiles"]:
        kinds = ", ".join(f"{kind} {100 * of['ms'] / profile['step_ms']:.0f} %"
                          for kind, of in limits.by_kind(profile).items())
        yield (f"{profile['config']} {profile['dtype']}: {kinds}, outside of operators "
               f"{100 * profile['outside_ms'] / profile['step_ms']:.2f} % of a step")
    for case in record["techniques"]:
        yield (f"{case['config']} {case['dtype']}: a step takes, without " + ", ".join(
            f"{techniques.NAMES[entry['technique']]} "
            f"x{techniques.longer_without(entry, case['step_ms']):.2f}"
            for entry in case["techniques"]))


def tables(record):
    """{file: Markdown}: where the time of a step goes, what techniques gained, operators next to
    their limits, and PyTorch."""
    found = {"time.md": time_lines(record), "techniques.md": techniques.lines(record["techniques"]),
             "limits.md": limit_lines(record), "peers.md": peer_lines(record),
             "peer_times.md": peer_time_lines(record)}
    return {name: "\n".join(lines) + "\n" for name, lines in found.items() if lines}


def time_lines(record):
    """A recorded step by operator."""
    profiles = record["profiles"]
    labels = [f"{profile['config']} {profile['dtype']}" for profile in profiles]
    lines = ["| ms of a step | " + " | ".join(labels) + " |", "|---|" + "---:|" * len(labels)]
    times = [{op["op"]: op["ms"] for op in profile["ops"]} for profile in profiles]
    names = sorted({name for of_case in times for name in of_case}, key=lambda name: -sum(
        of_case.get(name, 0) / profile["step_ms"] for of_case, profile in zip(times, profiles)))
    def row(what, values):
        lines.append(f"| {what} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    for name in names[:SLOWEST]:
        row(f"`{name}`", [of_case.get(name, 0) for of_case in times])
    row(f"{len(names) - SLOWEST} others", [sum(of_case.get(name, 0) for name in names[SLOWEST:])
                                           for of_case in times])
    row("outside of operators", [profile["outside_ms"] for profile in profiles])
    row("**step**", [profile["step_ms"] for profile in profiles])
    return lines


def limit_lines(record):
    """Memory-bound operations and attention beside what bounds them, measured in turns."""
    dtypes = list(record["memory"])
    lines = ["| | " + " | ".join(f"{dtype} | limit | of it" for dtype in dtypes) + " |",
             "|---|" + "---:|" * 3 * len(dtypes)]

    def row(what, pairs):
        lines.append(f"| {what} | " + " | ".join(
            f"{value:.1f} | {limit:.1f} | {100 * value / limit:.0f} %" for value, limit in pairs)
            + " |")

    for entries in zip(*record["memory"].values()):
        row(f"`{entries[0]['op']}`, GB/s",
            [(entry["gb_per_s"], entry["triad_gb_per_s"]) for entry in entries])
    row("attention, both passes, GFLOP/s", [
        (record["attention"][dtype]["gflops"], record["attention"][dtype]["f32_matmul_gflops"])
        for dtype in dtypes])
    return lines


def peer_lines(record):
    """Tokens/s of PyTorch's modes and ours, in turns, and ours relative to its best."""
    if not record["peers"]:
        return []
    first = record["peers"][0]
    lines = [f"| tokens/s, {first['turns']} turns | PyTorch {first['torch']}, eager | compile | "
             "ours | ours / the better, in the same turn (middle half) |",
             "|---|---:|---:|---:|---:|"]
    for entry in record["peers"]:
        speeds = entry["tokens_per_s"]
        noise = ": noise" if entry["ratio_low"] <= 1 <= entry["ratio_high"] else ""
        lines.append(f"| {entry['config']} {entry['dtype']} | {speeds['eager']:,.0f} | "
                     f"{speeds['compile']:,.0f} | {speeds['ours']:,.0f} | {entry['ratio']:.2f} "
                     f"({entry['ratio_low']:.2f}–{entry['ratio_high']:.2f}){noise} |")
    return lines


def peer_time_lines(record):
    """Where the time of a step goes, ours and PyTorch's, and what the products leave to gain."""
    entries = [entry for entry in record["peers"] if "kinds" in entry]
    if not entries:
        return []
    lines = ["| ms of a step, ours / PyTorch | " + " | ".join(
        f"{entry['config']} {entry['dtype']}" for entry in entries) + " |",
        "|---|" + "---:|" * len(entries)]

    def row(what, text):
        lines.append(f"| {what} | " + " | ".join(text(entry["kinds"]) for entry in entries) + " |")

    def both(of):
        return lambda kinds: " / ".join(of(kinds, kinds[whose]) for whose in ("ours", "theirs"))

    for name, kind in (("products of the linear layers", "matmul"), ("attention", "attention"),
                       ("all else", "other")):
        row(name, both(lambda _, ms, kind=kind: f"{ms[kind]:.1f}"))
    row("**step**", both(lambda _, ms: f"{sum(ms.values()):.1f}"))
    row("products, GFLOP/s", both(lambda kinds, ms: f"{1e3 * kinds['gflop'] / ms['matmul']:,.0f}"))
    row("PyTorch's step, in our products", lambda kinds: (
        f"{sum(kinds['theirs'].values()) / kinds['ours']['matmul']:.2f}"))
    return lines
