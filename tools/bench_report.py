"""A record of `./book bench` as the tables and the figure that READMEs show."""
import json

from tools import figures, limits, techniques, zero

RECORD = "bench.json"
SLOWEST = 8  # operators that the table names


def write(folder):
    """From bench.json in a chapter's figures/: bench.md, and where a step's time was recorded
    time.md and time.svg, time.png."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    (folder / "bench.md").write_text(bench_table(record), encoding="utf-8")
    if "profiles" in record:
        (folder / "time.md").write_text(time_tables(record), encoding="utf-8")
        figures.draw("step_time", [folder / RECORD, folder / "time"])


def bench_table(record):
    """The medians of a `./book bench` record as Markdown."""
    host = record["machine"]
    lines = ["| | tokens/s | step, ms | model GFLOP/s | matmul GFLOP/s | MFU | of the bound |",
             "|---|---|---|---|---|---|---|"]
    for result in record["results"]:
        s = {name: value["median"] for name, value in result["summary"].items()}
        ranks = f", {result['ranks']} rank{'s' * (result['ranks'] > 1)}" if "layouts" in record else ""
        lines.append(f"| {result['config']} {result['dtype']}{ranks} | {s['tokens_per_s']:,.0f} | "
                     f"{s['step_ms']:.0f} | {s['model_gflops']:.0f} | {s['matmul_gflops']:.0f} | "
                     f"{100 * s['fraction']:.0f} % | {100 * s['of_bound']:.0f} % |")
    rounds = len(record["results"][0]["rounds"])
    lines += layout_lines(record) + rate_lines(record) + link_lines(record)
    if "zero" in record:
        lines += zero.compared_lines(record["zero"])
    lines.append("")
    lines.append(f"Medians of {rounds} interleaved rounds; {host['cpu']}, {host['threads']} threads, "
                 f"{' '.join(host['isa'])}; commit {record['commit'][:12]}, {record['date'][:10]}.")
    return "\n".join(lines) + "\n"


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


def layout_lines(record):
    """What `./book bench` measured of ranks and collectives, as Markdown; nothing for one rank."""
    lines = []
    if "layouts" in record:
        lines += ["", "| | ranks | tokens/s, relative to one rank with all threads |", "|---|---|---|"]
        lines += [f"| {entry['config']} {entry['dtype']} | {entry['ranks']} | {entry['ratio']:.2f} |"
                  for entry in record["layouts"]]
    if "collectives" in record:
        lines += ["", "| all-reduce | ranks | ours | MPI_Allreduce | relative speed |",
                  "|---|---|---|---|---|"]
    for entry in record.get("collectives", []):
        lines.append(f"| {entry['small_bytes']:,} bytes | {entry['ranks']} | "
                     f"{entry['small_us']:.0f} us | | |")
        lines.append(f"| {entry['large_bytes']:,} bytes | {entry['ranks']} | "
                     f"{entry['large_ms']:.2f} ms | {entry['mpi_ms']:.2f} ms | {entry['ratio']:.2f} |")
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


def time_tables(record):
    """Where the time of a step goes: by operator, next to memory and matmul, next to PyTorch."""
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
    bounds = {(r["config"], r["dtype"]): r["rounds"] for r in record["results"]}
    row("matmuls alone (the bound)", [
        sum(r["bound_ms"] for r in bounds[profile["config"], profile["dtype"]])
        / len(bounds[profile["config"], profile["dtype"]]) for profile in profiles])
    lines += techniques.lines(record["techniques"]) + operation_lines(record) + peer_lines(record)
    return "\n".join(lines) + "\n"


def operation_lines(record):
    """Memory-bound operations and attention as fractions of what bounds them."""
    dtypes = list(record["memory"])
    lines = ["", "| | " + " | ".join(f"{dtype}, of the limit" for dtype in dtypes) + " |",
             "|---|" + "---:|" * len(dtypes)]
    for entries in zip(*record["memory"].values()):
        lines.append(f"| `{entries[0]['op']}`, GB/s, of triad's | " + " | ".join(
            f"{entry['gb_per_s']:.1f}, {100 * entry['fraction']:.0f} %" for entry in entries) + " |")
    attention = [record["attention"][dtype] for dtype in dtypes]
    lines.append("| attention, both passes, GFLOP/s of the causal half, of an f32 matmul's | "
                 + " | ".join(f"{entry['gflops']:.0f}, {100 * entry['fraction']:.0f} %"
                              for entry in attention) + " |")
    return lines


def peer_lines(record):
    """Tokens/s of PyTorch's modes and ours, in turns, and ours relative to its best."""
    if not record["peers"]:
        return []
    first = record["peers"][0]
    lines = ["", f"| tokens/s, {first['turns']} turns | PyTorch {first['torch']}, eager | compile | "
             "ours | relative to the better, middle half |", "|---|---:|---:|---:|---:|"]
    for entry in record["peers"]:
        speeds = entry["tokens_per_s"]
        lines.append(f"| {entry['config']} {entry['dtype']} | {speeds['eager']:,.0f} | "
                     f"{speeds['compile']:,.0f} | {speeds['ours']:,.0f} | {entry['ratio']:.2f} "
                     f"({entry['ratio_low']:.2f}-{entry['ratio_high']:.2f}) |")
    return lines
