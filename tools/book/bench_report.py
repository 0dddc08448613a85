"""A record of `./book bench` as the table that READMEs show."""
import statistics

RECORD = "bench.json"


def bench_table(record, more):
    """The medians of a `./book bench` record as Markdown, with `more` lines of the chapter's own.

    A percentage is the quotient of two medians of its row; beside it stand the lowest and the
    highest of the rounds."""
    host = record["machine"]
    measured = (f"{host['cpu']}, {host['threads']} threads, {' '.join(host['isa'])}; "
                f"commit {record['commit'][:12]}, {record['date'][:10]}.")
    if not record["results"]:
        return "\n".join([*more, "", measured]) + "\n"
    lines = ["| | tokens/s | step, ms | model GFLOP/s | matmul GFLOP/s | MFU (rounds) | bound, ms | "
             "of the bound (rounds) |", "|---|---|---|---|---|---|---|---|"]
    several = len({result["ranks"] for result in record["results"]}) > 1
    for result in record["results"]:
        s = {name: value["median"] for name, value in result["summary"].items()}
        bound = statistics.median(r["bound_ms"] for r in result["rounds"])
        ranks = f", {result['ranks']} rank{'s' * (result['ranks'] > 1)}" if several else ""
        lines.append(
            f"| {result['config']} {result['dtype']}{ranks} | {s['tokens_per_s']:,.0f} | "
            f"{s['step_ms']:.1f} | {s['model_gflops']:.1f} | {s['matmul_gflops']:.1f} | "
            f"{_share(s['model_gflops'] / s['matmul_gflops'], result['summary']['fraction'])} | "
            f"{bound:.1f} | {_share(bound / s['step_ms'], result['summary']['of_bound'])} |")
    rounds = len(record["results"][0]["rounds"])
    lines += more
    lines.append("")
    lines.append(f"Medians of {rounds} interleaved rounds; {measured}")
    return "\n".join(lines) + "\n"


def _share(ratio, rounds):
    """73 % (69–87): of the medians, and the extremes of the rounds."""
    return f"{100 * ratio:.0f} % ({100 * rounds['min']:.0f}–{100 * rounds['max']:.0f})"
