"""What this chapter's README shows: timelines, scaling, what ZeRO's stages hold and send.

`./book figures` and `./book bench` call it; tools/book/showcase.py says how.
"""
import tempfile
from pathlib import Path

from tools.base import write_whole
from tools.bench import layouts, steady
from tools.book.bench_report import RECORD
from tools.book.showcase import (costs_table, json_text, losses_alone, origin, output_of, read_json,
                                 rows_of, short_demo, write_json)
from tools.gpu import gpu_report
from tools.look import provenance, timelines, trace
from tools.run import build, estimates

from . import claims, draw_collectives, draw_ranks, draw_zero, hiding, overlap, ranks, tokens, zero

BENCH_PROGRAMS = ("comm_bench",)
bench, bench_lines, bench_text = ranks.bench, ranks.lines, ranks.text
TIMELINES = "timelines.json"
DRAWN = (*overlap.WAYS, *zero.DRAWN)  # as a timeline
SCHEMATICS = {**draw_ranks.FIGURES, **draw_zero.FIGURES, **draw_collectives.FIGURES}
DRAWINGS = (("plot_scaling", "overlap.json", "scaling"), ("plot_zero", "zero.json", ""),
            ("plot_loss", "demo.json", "loss"),
            ("plot_timelines", TIMELINES, "timelines"))
PROVENANCE = {"provenance.md": ("demo", "overlap", "bench"),  # of a page: its data
              "provenance_zero.md": ("zero", "bench"), "provenance_collectives.md": ("bench",),
              "provenance_tokens.md": ("tokens",)}
EXAMPLE_RANKS = 3  # the book's
# The book's example of a global batch, on 128 and 512 ranks, and a model that does not fit.
PLAN = ["--plan", "4194304", "--seq_len", "4096", "--dtype", "bf16"]
PLANNED = (["--model", "1B", "--dp_size", "128", "--micro_batch_size", "2"],
           ["--model", "1B", "--dp_size", "512", "--micro_batch_size", "2"],
           ["--model", "8B", "--dp_size", "128"])
# A run whose report says what a rank holds and sends under stage 3, and these rows of it.
STAGE_3 = {"zero_stage": 3, "micro_batch_size": 2, "steps": 3, "eval_interval": 0,
           "sample_tokens": 0}
STAGE_3_RANKS = 4
HELD_ROWS = ("weights ", "gradients ", "optimizer states", "gathered weights",
             "gradients to reduce", "scratch of", "gradients, weights sent")
DEMO_ROWS = ("validation loss", "peak memory", "gradients sent", "communication not hidden")
CLAIMS = {"claims.md": (1, 2, 3, 4, 11), "claims_zero.md": (5, 6, 7, 9, 10)}  # of each page
TOUR = ("all_reduce (sum)", "reduce_scatter (sum)")  # two stops of the tour of the collectives
GRADIENT_BYTES = {"f32": 4, "bf16": 4, "f64": 8}


def measure(chapter, program, commit):
    """A rank that is killed, the ways of data parallelism and the stages of ZeRO."""
    folder, drawn = chapter.folder / "figures", []

    def keep(way, run_dir):
        if way in DRAWN and way not in [each["way"] for each in drawn]:
            recorded = trace.load(run_dir / trace.RECORDED)
            drawn.append({"way": way, **timelines.cut(recorded, steady.typical_step(recorded))})

    write_whole(folder / "why.txt", ranks.why_a_rank_was_lost(chapter))
    record = {**origin(chapter, commit), "overlap": overlap.measure(chapter, keep),
              "scaling": {**overlap.scaling(chapter), "memory": overlap.memory(program)}}
    write_json(folder / "overlap.json", record)
    record = {**origin(chapter, commit),
              "zero": {"held": zero.measure_held(chapter, program),
                       "large": zero.estimate_large(program),
                       "ways": zero.measure_ways(chapter, keep)},
              "claims": claims.measure(chapter)}
    write_json(folder / "zero.json", record)
    write_whole(folder / TIMELINES, timelines.text({**origin(chapter, commit), "ways": drawn}))
    write_json(folder / "tokens.json", {**origin(chapter, commit), **tokens.measure(chapter)})


def demo(chapter, run_dir):
    """What the demo sent of gradients, and the losses of the same batch on one rank."""
    entry = read_json(run_dir / "ledger.json")["dp.all_reduce"]
    return {"ledger": {"dp.all_reduce": {name: entry[name] for name in (
        "calls", "payload_bytes", "wire_bytes", "header_bytes")}},
            "losses_alone": losses_alone(chapter)}


def rerun(chapter, program):
    """Plans and estimates."""
    record = read_json(chapter.folder / "figures" / "zero.json")
    record["zero"]["large"] = zero.estimate_large(program)
    record["claims"].update(claims.estimate(program))
    overlapped = read_json(chapter.folder / "figures" / "overlap.json")
    overlapped["scaling"]["memory"] = overlap.memory(program)
    return {"zero.json": json_text(record), "overlap.json": json_text(overlapped),
            "plan.txt": plans(chapter, program)}


def count(chapter, program):
    """Bytes that ranks hold and send, and losses, in runs of a few steps; and the examples."""
    record = read_json(chapter.folder / "figures" / "zero.json")
    record["zero"]["held"] = zero.measure_held(chapter, program)
    record["claims"].update(claims.count(program))
    files = {}
    for example in chapter.examples():
        binary = build.binary(build.RELEASE, f"{chapter.name}_{example}")
        files[f"{example}.txt"] = output_of(binary, [], EXAMPLE_RANKS)
    with tempfile.TemporaryDirectory(prefix="book_report_") as scratch:
        flags = estimates.words_of({**STAGE_3, "run_dir": f"{scratch}/run"})
        files["zero_report.txt"] = rows_of(output_of(program, flags, STAGE_3_RANKS), HELD_ROWS)
        record["ledger"] = sorted(read_json(Path(scratch) / "run/ledger.json"))
    return {**files, "zero.json": json_text(record)}


def short_tour(text):
    """Two stops of the tour of the collectives."""
    stops = text.split("\n\n")
    return "\n".join(f"{stop}\n" for stop in stops if stop.splitlines()[0] in TOUR)


def plans(chapter, program):
    """What --plan says of the examples."""
    return "\n".join(f"$ ./book run {chapter.short} -- {' '.join(PLAN + flags)}\n"
                     f"{output_of(program, [*PLAN, *flags])}" for flags in PLANNED).rstrip() + "\n"


def texts(folder):
    """Every table."""
    record, overlapped = read_json(folder / "zero.json"), read_json(folder / "overlap.json")
    timed = read_json(folder / RECORD)
    said = {name: (folder / f"{name}.txt").read_text(encoding="utf-8")
            for name in ("demo", "collectives")}
    compared = timed["zero"]
    of_bench = {"ranks.md": layouts.lines, "allreduce.md": ranks.collective_lines,
                "instruments.md": ranks.link_lines}
    return {"demo_short.txt": short_demo(said["demo"], DEMO_ROWS),
            "gpu.md": gpu_report.text(folder),
            "collectives_short.txt": short_tour(said["collectives"]),
            "traffic.md": traffic_table(read_json(folder / "demo.json")),
            "costs.md": costs_table(read_json(folder / "demo.json")),
            **{name: "\n".join(lines(timed)[1:]) + "\n" for name, lines in of_bench.items()},
            "stages.md": "\n".join(zero.compared_lines(compared)[1:]) + "\n",
            "hiding.md": hiding.table(timed), "latency.md": overlap.latency_table(overlapped),
            "overlap.md": overlap.table(overlapped), "zero.md": zero.ways_table(record),
            "zero_8b.md": zero.large_table(record["zero"]["large"]),
            **{name: claims.table(record, overlapped, compared, numbers)
               for name, numbers in CLAIMS.items()},
            "claims_collectives.md": claims.appendix_table(record, read_json(folder / "demo.json"),
                                                           said["collectives"]),
            **of_tokens(folder),
            **{page: provenance.line({name: read_json(folder / f"{name}.json") for name in data})
               for page, data in PROVENANCE.items() if all((folder / f"{name}.json").exists() for name in data)}}


def of_tokens(folder):
    """What says whether the ratio predicts what is exposed, if that was measured."""
    path = folder / "tokens.json"
    if not path.exists():
        return {}
    measured = read_json(path)
    return {"tokens.md": tokens.table(measured), "claims_tokens.md": claims.rows_text(tokens.claims(measured))}


def traffic_table(demo_record):
    """Gradient bytes per step: the formula, and what was counted where it was sent."""
    config, entry = demo_record["config"], demo_record["ledger"]["dp.all_reduce"]
    dp, parameters = int(config["dp_size"]), int(demo_record["parameters"])
    gradients, steps = parameters * GRADIENT_BYTES[config["dtype"]], len(demo_record["steps"])
    rows = [("payload", "4 Ψ", gradients, entry["payload_bytes"] / steps),
            ("sent by rank 0", "2 (dp-1)/dp 4 Ψ", 2 * (dp - 1) / dp * gradients,
             entry["wire_bytes"] / steps),
            # One bucket holds them all, and less than 8 MiB are to be received of it at once.
            ("scratch of the all-reduce", "(dp-1)/dp 4 Ψ", (dp - 1) / dp * gradients,
             demo_record["peak_bytes"]["communication"])]
    lines = [f"| {name} | {formula} | {predicted:,.0f} | {measured:,.0f} | "
             f"{measured / predicted:.4f} |" for name, formula, predicted, measured in rows]
    headers = entry["header_bytes"] / steps
    return (f"Ψ = {parameters:,} parameters, dp = {dp}; bytes of a step, of the scratch its "
            "peak.\n\n"
            "| | formula | predicted | measured | ratio |\n|---|---|---|---|---|\n"
            + "\n".join(lines)
            + f"\n| headers of these messages | | | {headers:,.0f} | |\n")
