"""What this chapter's README shows: memory by formulas, in dry runs and in runs, and a step's time.

`./book figures` and `./book bench` call it; tools/book/showcase.py says how.
"""
import shutil

from tools.base import write_whole
from tools.book.bench_report import RECORD
from tools.book.showcase import costs_table, json_text, origin, read_json, write_json
from tools.gpu import gpu_report
from tools.look import figures, provenance, trace

from . import cases, claims, draw_accumulation, draw_block, operations, recomputation

BENCH_PROGRAMS = operations.PROGRAMS
bench, bench_lines, bench_text = operations.bench, operations.no_lines, operations.text
SCHEMATICS = {**draw_block.FIGURES, **draw_accumulation.FIGURES}
DRAWINGS = (("plot_activations", "estimates.json", ""), ("plot_step_time", RECORD, "time"))


def measure(chapter, program, commit):
    """Runs of configuration A with every mode of recomputation, and what the claims need."""
    folder = chapter.folder / "figures"

    def keep_profile(run_dir):
        figures.draw("memory", [run_dir])
        for name in ("memory.json", "memory.svg"):
            shutil.copy(run_dir / name, folder / name)

    write_json(folder / "estimates.json",
               {**origin(chapter, commit), "cases": cases.collect(program)})
    write_json(folder / "recomputation.json",
               {**origin(chapter, commit), "claims": claims.measure(program, keep_profile),
                "recomputation": recomputation.measure(program)})


def demo(chapter, run_dir):
    """The operators of the last step that the demo recorded, drawn, and as a trace to open."""
    folder = chapter.folder / "figures"
    figures.draw_timeline(run_dir, script="ops")
    shutil.copy(run_dir / "ops.svg", folder / "trace.svg")
    write_whole(folder / trace.RECORDED, trace.last_step(run_dir / trace.RECORDED))
    return {}


def rerun(chapter, program):
    """The estimates."""
    record = read_json(chapter.folder / "figures" / "estimates.json")
    return {"estimates.json": json_text({**record, "cases": cases.collect(program)})}


def texts(folder):
    """Every table."""
    record = read_json(folder / "recomputation.json")
    estimated = read_json(folder / "estimates.json")["cases"]
    measured = {name: read_json(folder / f"{name}.json") for name in ("demo", "estimates", "recomputation")}
    return {"provenance.md": provenance.line(measured),
            "gpu.md": gpu_report.text(folder),
            "costs.md": costs_table(read_json(folder / "demo.json")),
            "states.md": cases.states_table(estimated),
            "recomputation.md": recomputation.table(record),
            "recomputation_time.md": recomputation.times_table(record),
            "claims.md": claims.table(estimated, record),
            **operations.tables(read_json(folder / RECORD))}
