"""Several ranks of one thread beside one rank with all of them, in a chapter's bench."""
from tools.book.rounds import with_range


def compare(results):
    """[{config, dtype, ranks, ratio}]: tokens/s of several ranks over those of one, medians."""
    speed = {(r["config"], r["dtype"], r["ranks"]): r["summary"]["tokens_per_s"]["median"]
             for r in results}
    return [{"config": name, "dtype": dtype, "ranks": ranks,
             "ratio": tokens / speed[name, dtype, 1]}
            for (name, dtype, ranks), tokens in speed.items() if ranks > 1]


def lines(record):
    """Tokens/s of several ranks beside those of one, as Markdown; nothing for one rank."""
    if "layouts" not in record:
        return []
    speeds = {(r["config"], r["dtype"], r["ranks"]): r["summary"]["tokens_per_s"]
              for r in record["results"]}
    rows = ["", "| | ranks | tokens/s | with one rank | ratio |", "|---|---:|---:|---:|---:|"]
    for entry in record["layouts"]:
        case = entry["config"], entry["dtype"]
        several, alone = speeds[(*case, entry["ranks"])], speeds[(*case, 1)]
        rows.append(f"| {' '.join(case)} | {entry['ranks']} | {_with_range(several)} | "
                     f"{_with_range(alone)} | {entry['ratio']:.2f} |")
    return rows


def _with_range(values):
    return with_range(values["median"], values["min"], values["max"], " to ", ",.0f")


def text(record):
    """The same for the terminal."""
    for layout in record.get("layouts", []):
        yield (f"{layout['config']} {layout['dtype']}: {layout['ranks']} ranks of one thread reach "
               f"{layout['ratio']:.3f} of the tokens/s of one rank with all threads")
