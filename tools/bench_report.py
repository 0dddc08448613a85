"""A record of `./book bench` as the table that READMEs show."""

RECORD = "bench.json"


def bench_table(record, more):
    """The medians of a `./book bench` record as Markdown, with `more` lines of the chapter's own."""
    host = record["machine"]
    lines = ["| | tokens/s | step, ms | model GFLOP/s | matmul GFLOP/s | MFU | of the bound |",
             "|---|---|---|---|---|---|---|"]
    several = len({result["ranks"] for result in record["results"]}) > 1
    for result in record["results"]:
        s = {name: value["median"] for name, value in result["summary"].items()}
        ranks = f", {result['ranks']} rank{'s' * (result['ranks'] > 1)}" if several else ""
        lines.append(f"| {result['config']} {result['dtype']}{ranks} | {s['tokens_per_s']:,.0f} | "
                     f"{s['step_ms']:.0f} | {s['model_gflops']:.0f} | {s['matmul_gflops']:.0f} | "
                     f"{100 * s['fraction']:.0f} % | {100 * s['of_bound']:.0f} % |")
    rounds = len(record["results"][0]["rounds"])
    lines += more
    lines.append("")
    lines.append(f"Medians of {rounds} interleaved rounds; {host['cpu']}, {host['threads']} threads, "
                 f"{' '.join(host['isa'])}; commit {record['commit'][:12]}, {record['date'][:10]}.")
    return "\n".join(lines) + "\n"
