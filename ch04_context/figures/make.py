"""What this chapter's pages show: schematics, memory, messages, timelines, balance, the claims.

`./book figures` and `./book bench` call it; tools/book/showcase.py says how.
"""
import contextlib
import tempfile

from tools.base import write_whole
from tools.bench import layouts, steady
from tools.bench.bench import CONFIGS
from tools.book.showcase import (json_text, origin, output_of, read_json, rows_of, short_demo,
                                 write_json)
from tools.look import provenance, timelines
from tools.run import build, estimates

from . import (balance, claims, crossover, decoding, draw_heads, draw_masks, draw_ring, hiding,
               memory, methods, runs, traffic, volume, ways, workload)

SCHEMATICS = {**draw_ring.FIGURES, **draw_masks.FIGURES, **draw_heads.FIGURES}
DRAWINGS = (("plot_memory", "memory.json", "memory_8b"), ("plot_layouts", "layouts.json", "layouts"),
            ("plot_timelines", "timelines.json", "timelines"),
            ("plot_timelines", "layout_timelines.json", "layout_timelines"),
            ("plot_crossover", "methods.json", "crossover"))
# {page's line: data that it names}
PROVENANCE = {"provenance.md": ("demo", "traffic", "memory", "ways"),
              "provenance_balance.md": ("layouts", "layout_timelines", "decoding"),
              "provenance_ulysses.md": ("ways", "methods", "traffic", "bench")}
CLAIMS = {"claims.md": (1, 3, 6, 7, "documents"), "claims_balance.md": (2, "balance"),
          "claims_ulysses.md": (4, 5, "overlap", "bench")}
DEMO = {"cp_size": 2}  # the demo's flags beside the defaults
DEMO_ROWS = ("validation loss", "peak memory", "saved activations", "keys, values",
             "communication not hidden")
# Runs whose report says what was sent, by method; and the row of it.
REPORTED = {**runs.SHAPE, "steps": 2, "cp_size": 4, "dp_size": 1, "micro_batch_size": 1,
            **runs.QUIET}
REPORT_ROW = "attention sent over cp"
EXAMPLE_RANKS = {"merge": 1, "ring_self_attention": 4}
BENCH_SHARED = "cp_size"
# As many tokens in a step as B has, in one sample.
BENCH_CONFIGS = {"B2048": {**CONFIGS["B"], "seq_len": 2048, "micro_batch_size": 1}}
bench_lines, bench_text = layouts.lines, layouts.text


def bench(_chapter, record, _seconds, _rounds):
    """What goes into the record beside what every chapter measures."""
    return {"layouts": layouts.compare(record["results"])}


def measure(chapter, program, commit):
    """Timelines on an emulated link, and runs to be laid out with a core for every rank."""
    folder, head = chapter.folder / "figures", origin(chapter, commit)
    with drawn(folder / "timelines.json", head) as keep:
        write_json(folder / "ways.json", {**head, "ways": ways.measure(chapter, keep),
                                          "dry_run_s": memory.time_million(program)})
    measure_layouts(chapter, head)
    write_json(folder / "methods.json", {**head, "crossover": crossover.measure(chapter),
                                         "methods": methods.measure(chapter)})
    for name in ("memory", "traffic"):  # rerun() and count(), which come next, fill them
        write_json(folder / f"{name}.json", head)


def measure_layouts(chapter, head):
    """What balance.md measures."""
    folder = chapter.folder / "figures"
    write_json(folder / "decoding.json", head)  # count() fills it
    with drawn(folder / "layout_timelines.json", head) as keep:
        write_json(folder / "layouts.json", {**head, "layouts": workload.measure(chapter, keep)})


@contextlib.contextmanager
def drawn(path, head):
    """keep(way, trace): a typical step of the trace goes into the file of timelines."""
    kept = []
    yield lambda way, laid_out: kept.append(
        {"way": way, **timelines.cut(laid_out, steady.typical_step(laid_out))})
    write_whole(path, timelines.text({**head, "ways": kept}))


def rerun(chapter, program):
    """Estimates."""
    record = read_json(chapter.folder / "figures" / "memory.json")
    found = {"large": memory.estimate_large(program),
             "recompute": ways.estimate_recompute(program, memory.estimate)}
    return {"memory.json": json_text({**record, **found})}


def count(chapter, program):
    """Messages, peaks and losses of runs of a few steps; and the examples."""
    record, decoded = (read_json(chapter.folder / "figures" / f"{name}.json")
                       for name in ("traffic", "decoding"))
    found = {"traffic": traffic.count(program), "ledger": traffic.ledger(program),
             "claims": claims.count(program), **memory.count(program)}
    files = {"traffic.json": json_text({**record, **found}),
             "decoding.json": json_text({**decoded, "decoding": decoding.count(program)}),
             "methods_report.txt": report(program)}
    for example in chapter.examples():
        binary = build.binary(build.RELEASE, f"{chapter.name}_{example}")
        files[f"{example}.txt"] = output_of(binary, [], EXAMPLE_RANKS[example])
    return files


def report(program):
    """What the reports of runs say of messages over cp, by method."""
    lines = ""
    for method in runs.METHODS:
        with tempfile.TemporaryDirectory(prefix="book_report_") as scratch:
            flags = estimates.words_of({**REPORTED, **runs.by_method(method),
                                        "run_dir": f"{scratch}/run"})
            found = rows_of(output_of(program, flags, REPORTED["cp_size"]), (REPORT_ROW,))
        lines += found.replace(REPORT_ROW, f"{method:<13}")
    return lines


def texts(folder):
    """Every table of which the data are there."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {"work.md": balance.work_table(), "documents.md": balance.documents_table(),
             "volume.md": volume.table(), "hiding.md": hiding.table(),
             **of_memory(data), **of_runs(data), **of_counts(data)}
    if (folder / "demo.txt").exists():
        found["demo_short.txt"] = short_demo(
            (folder / "demo.txt").read_text(encoding="utf-8"), DEMO_ROWS)
    for page, names in PROVENANCE.items():
        found[page] = provenance.line({name: data[name] for name in names if name in data})
    return found


def of_memory(data):
    """Tables of estimates."""
    if "large" not in data.get("memory", {}):
        return {}
    large = data["memory"]["large"]
    return {"problem.md": memory.problem_table(large), "memory_8b.md": memory.large_table(large),
            "fits.md": memory.fits_table(large["fits"]),
            "million.md": memory.million_table(large, data.get("ways", {}).get("dry_run_s"))}


def of_runs(data):
    """Tables of what was measured and replayed."""
    found = {}
    if "ways" in data:
        found["ways.md"] = ways.table(data["ways"]["ways"])
        if "recompute" in data.get("memory", {}):
            found["recompute.md"] = ways.recompute_table(data["ways"]["ways"],
                                                         data["memory"]["recompute"])
    if "decoding" in data.get("decoding", {}):
        found["decoding.md"] = decoding.table(data["decoding"]["decoding"])
    if "layouts" in data:
        measured = data["layouts"]["layouts"]
        found.update({"layouts.md": workload.layouts_table(measured),
                      "steps.md": workload.steps_table(measured),
                      "documents_counted.md": workload.documents_table(measured)})
    if "methods" in data:
        found.update({"crossover.md": crossover.table(data["methods"]["crossover"]),
                      "choices.md": methods.choices_table(data["methods"]["methods"])})
    if "bench" in data:
        found["ranks.md"] = "\n".join(layouts.lines(data["bench"])[1:]) + "\n"
    return found


def of_counts(data):
    """Tables of what was counted, and the claims."""
    counted = data.get("traffic", {})
    if "traffic" not in counted:
        return {}
    record = {**counted, "ways": data.get("ways", {}).get("ways"),
              "layouts": data.get("layouts", {}).get("layouts"),
              "crossover": data.get("methods", {}).get("crossover"), "bench": data.get("bench")}
    return {"messages.md": traffic.messages_table(counted["traffic"]),
            "sent.md": traffic.sent_table(counted["traffic"]),
            "held.md": memory.held_table(counted["held"]),
            "held_keys.md": memory.held_keys_table(counted["keys"]),
            **{name: claims.table(record, numbers) for name, numbers in CLAIMS.items()}}
