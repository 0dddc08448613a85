"""What this chapter's pages show: schematics, memory, messages, timelines, scaling, the claims.

`./book figures` and `./book bench` call it; tools/book/showcase.py says how.
"""
import re
import tempfile

from tools.base import write_whole
from tools.bench import layouts, steady
from tools.book.showcase import (json_text, origin, output_of, read_json, rows_of, short_demo,
                                 write_json)
from tools.look import provenance, timelines, trace
from tools.run import build, estimates

from . import (claims, draw_layer, draw_linears, draw_overlap, draw_sequence, draw_tensor_2d,
               hiding, memory, scaling, traffic, ways)

SCHEMATICS = {**draw_linears.FIGURES, **draw_layer.FIGURES, **draw_sequence.FIGURES,
              **draw_overlap.FIGURES, **draw_tensor_2d.FIGURES}
DRAWINGS = (("plot_memory", "memory.json", ""), ("plot_scaling", "scaling.json", "scaling"),
            ("plot_timelines", "timelines.json", "timelines"))
# {page's line: data that it names}
PROVENANCE = {"provenance.md": ("demo", "scaling", "traffic", "memory"),
              "provenance_sequence.md": ("memory", "traffic"),
              "provenance_overlap.md": ("ways", "bench", "traffic")}
CLAIMS = {"claims.md": (1, 2, 3, 6, 10), "claims_sequence.md": (4, 5, 7, 8, 9, 11),
          "claims_overlap.md": ("overlap", "result", "QA3.2")}
DEMO = {"tp_size": 2}  # the demo's flags beside the defaults
DEMO_ROWS = ("validation loss", "peak memory", "weights ", "activations sent",
             "communication not hidden")
# A run whose report says what a rank holds under sequence parallelism, and these rows of it.
REPORTED = {"steps": 3, "eval_interval": 0, "sample_tokens": 0, "tp_size": 2,
            "sequence_parallel": None}
REPORT_ROWS = ("saved activations", "weights ", "activations sent", "gradients  ")
REPORT_RANKS = 2
# A model on a cluster that no reader has at hand.
CLUSTER = {"model": "70B", "dtype": "bf16", "seq_len": 4096, "micro_batch_size": 1, "tp_size": 8,
           "zero_stage": 3, "sequence_parallel": None}
CLUSTER_RANKS = 64
BENCH_SHARED = "tp_size"
bench_lines, bench_text = layouts.lines, layouts.text
EXAMPLE_RANKS = {"linears": draw_linears.RANKS, "tensor_2d": 4}  # 4: a square


def bench(_chapter, record, _seconds, _rounds):
    """What goes into the record beside what every chapter measures."""
    return {"layouts": layouts.compare(record["results"])}


def measure(chapter, _program, commit):
    """Timelines on an emulated link, and runs to be laid out on more ranks."""
    folder, drawn = chapter.folder / "figures", []

    def keep(way, run_dir):
        recorded = trace.load(run_dir / trace.RECORDED)
        drawn.append({"way": way, **timelines.cut(recorded, steady.typical_step(recorded))})

    write_json(folder / "ways.json", {**origin(chapter, commit),
                                      "ways": ways.measure(chapter, keep)})
    write_whole(folder / "timelines.json",
                timelines.text({**origin(chapter, commit), "ways": drawn}))
    write_json(folder / "scaling.json", {**origin(chapter, commit),
                                         "scaling": scaling.measure(chapter)})
    for name in ("memory", "traffic"):  # rerun() and count(), which come next, fill them
        write_json(folder / f"{name}.json", origin(chapter, commit))


def estimate(program):
    """What is known without training."""
    return {"large": memory.estimate_large(program), "batches": memory.estimate_batches(program)}


def counted(program):
    """What runs of a few steps send, hold and lose, on any machine."""
    return {"traffic": traffic.count(program), "ledger": traffic.ledger(program), "claims": claims.count(program)}


def rerun(chapter, program):
    """Estimates."""
    record = read_json(chapter.folder / "figures" / "memory.json")
    return {"memory.json": json_text({**record, **estimate(program)}),
            "cluster.txt": cluster(chapter, program)}


def cluster(chapter, program):
    """An estimate for many ranks, below its command."""
    flags = ["--estimate", *estimates.words_of(CLUSTER)]
    said = output_of(program, [*flags, "--world_size", str(CLUSTER_RANKS)])
    command = f"./book run {chapter.short} --ranks {CLUSTER_RANKS} -- {' '.join(flags)}"
    return "".join(f"{line.rstrip()}\n" for line in (f"$ {command}", *said.splitlines()))


def count(chapter, program):
    """Messages, states and losses of runs of a few steps; and the examples."""
    record = read_json(chapter.folder / "figures" / "traffic.json")
    files = {"traffic.json": json_text({**record, **counted(program)}),
             "sequence_report.txt": report(program)}
    for example in chapter.examples():
        binary = build.binary(build.RELEASE, f"{chapter.name}_{example}")
        files[f"{example}.txt"] = output_of(binary, [], EXAMPLE_RANKS[example])
    return files


def report(program):
    """Rows of the report of a run with sequence parallelism."""
    with tempfile.TemporaryDirectory(prefix="book_report_") as scratch:
        flags = estimates.words_of({**REPORTED, "run_dir": f"{scratch}/run"})
        return rows_of(output_of(program, flags, REPORT_RANKS), REPORT_ROWS)


def example_of(text):
    """{products: {layer: y}, messages: of the two orders} as the example prints them."""
    found = re.findall(r"^(\w[\w-]*) +y = (\[\[.*\]\])$", text, re.M)
    return {"products": {name: [[float(number) for number in re.findall(r"-?[\d.]+", row)]
                                for row in re.findall(r"\[([^\[\]]+)\]", rows)]
                         for name, rows in found},
            "messages": [int(count) for count in re.findall(r": (\d+) messages?$", text, re.M)]}


def texts(folder):
    """Every table of which the data are there."""
    data = {path.stem: read_json(path) for path in folder.glob("*.json")}
    found = {"hiding.md": hiding.table(), **of_memory(data), **of_runs(data)}
    if (folder / "demo.txt").exists():
        found["demo_short.txt"] = short_demo(
            (folder / "demo.txt").read_text(encoding="utf-8"), DEMO_ROWS)
    if {"memory", "traffic"} <= set(data):
        record = {"memory": data["memory"], **data["traffic"],
                  **{name: data.get(name, {}).get(name) for name in ("scaling", "ways")}}
        if (folder / "linears.txt").exists():
            record["linears"] = example_of((folder / "linears.txt").read_text(encoding="utf-8"))
        found.update({name: claims.table(record, numbers) for name, numbers in CLAIMS.items()})
    for page, names in PROVENANCE.items():
        found[page] = provenance.line({name: data[name] for name in names if name in data})
    return found


def of_memory(data):
    """Tables of estimates."""
    if "memory" not in data:
        return {}
    large, batches = data["memory"]["large"], data["memory"]["batches"]
    return {"problem.md": memory.problem_table(large), "replicated.md": memory.replicated_table(large),
            "kept.md": memory.kept_table(large), "memory_70b.md": memory.large_table(large),
            "batches.md": memory.batches_table(batches)}


def of_runs(data):
    """Tables of runs."""
    found = {}
    if "traffic" in data:
        cases = data["traffic"]["traffic"]
        found.update({"messages.md": traffic.messages_table(cases),
                      "sent.md": traffic.sent_table(cases),
                      "costs.md": claims.states_table(data["traffic"]["claims"]["states"])})
    if "ways" in data:
        found["ways.md"] = ways.table(data["ways"]["ways"])
        found["latency.md"] = ways.latency_table(data["ways"]["ways"])
    if "bench" in data:
        found["ranks.md"] = "\n".join(layouts.lines(data["bench"])[1:]) + "\n"
    if "scaling" in data:
        found["scaling.md"] = scaling.table(data["scaling"]["scaling"])
    return found
