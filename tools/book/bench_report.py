"""A record of `./book bench` as the table that READMEs show."""
import statistics

from tools.book.rounds import median, with_range

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
        bounds = [r["bound_ms"] for r in result["rounds"]]
        bound = statistics.median(bounds)
        speed, step, model, matmul = (
            median((r[name] for r in result["rounds"]), form) for name, form in (
                ("tokens_per_s", ",.0f"), ("step_ms", ".1f"), ("model_gflops", ".1f"), ("matmul_gflops", ".1f")))
        ranks = f", {result['ranks']} rank{'s' * (result['ranks'] > 1)}" if several else ""
        lines.append(
            f"| {result['config']} {result['dtype']}{ranks} | {speed} | {step} | {model} | {matmul} | "
            f"{_share(s['model_gflops'] / s['matmul_gflops'], result['summary']['fraction'])} | "
            f"{median(bounds, '.1f')} | {_share(bound / s['step_ms'], result['summary']['of_bound'])} |")
    rounds = len(record["results"][0]["rounds"])
    lines += more
    lines.append("")
    lines.append(f"Medians of {rounds} interleaved rounds; {measured}")
    return "\n".join(lines) + "\n"


def _share(ratio, rounds):
    """73 % (69–87): of the medians, and the extremes of the rounds."""
    return with_range(100 * ratio, 100 * rounds["min"], 100 * rounds["max"], form=".0f", unit=" %")
