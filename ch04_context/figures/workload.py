"""How evenly ranks share attention: its time on each, steps of both layouts, documents.

Four ranks run on this machine whatever its cores are. Times of attention are CPU times, which do not
grow where ranks share a core; steps are laid out by a replay, every rank on a core of its own.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import on_links, steady, train

from . import balance, runs

RANKS = 4
SHAPE = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 352,
         "num_layers": 2, "seq_len": 8192, "micro_batch_size": 1, "dp_size": 1}
STEPS = 9             # traced ones of a run of a layout
LAYOUTS = ("contiguous", "zigzag")
FAST = "node=10,10"   # a link that costs little
FEW, SKIPPED = 5, 2   # traced steps of a run of documents, and of these not counted
OPERATORS = ("attention_forward", "attention_backward")
LETTERS, SEPARATOR = "abcdefgh", "\n"
SAMPLES = 4           # that repeat in a text of documents


def run(chapter, run_dir, ranks=RANKS, **flags):
    """Trains for a few traced steps on ranks that share all samples; the trace."""
    return train(chapter, run_dir, ranks, cp_size=ranks, **{**SHAPE, **flags})


def attention(recorded, skipped=4):
    """[{forward_ms, backward_ms, flops}] of a later step, for every rank: CPU time, medians."""
    found = []
    for rank in recorded.ranks:
        steps = {}
        for span in rank.spans:
            if span.category == "op" and span.name in OPERATORS:
                cells = steps.setdefault(span.step, dict.fromkeys((*OPERATORS, "flops"), 0))
                cells[span.name] += span.cpu_duration / 1000
                cells["flops"] += span.flops
        later = list(steps.values())[skipped:]
        found.append({"forward_ms": statistics.median(step[OPERATORS[0]] for step in later),
                      "backward_ms": statistics.median(step[OPERATORS[1]] for step in later),
                      "flops": statistics.median(step["flops"] for step in later)})
    return found


def measure(chapter, keep):
    """Both layouts with one document in a sample, and mixes of documents; calls keep(layout, trace)
    with replays of the first."""
    with tempfile.TemporaryDirectory(prefix="book_context_") as scratch:
        say("book: who computes how much of attention")
        layouts = []
        for layout in LAYOUTS:
            recorded = run(chapter, Path(scratch) / layout, cp_layout=layout, steps=STEPS,
                           trace_steps=STEPS)
            laid_out = on_links(recorded, FAST)
            keep(layout, laid_out)
            step, exposed = steady(laid_out)
            layouts.append({"layout": layout, "ranks": attention(recorded), "step_ms": step,
                            "exposed_ms": exposed})
        mixes = [{"mix": mix, "layout": layout, "ranks": _mixed(chapter, scratch, mix, layout)}
                 for mix in balance.MIXES for layout in LAYOUTS]
    return {"layouts": layouts, "documents": mixes}


def _mixed(chapter, scratch, mix, layout):
    """attention() of samples of such documents."""
    text = Path(scratch) / "documents.txt"
    text.write_text(text_of(balance.MIXES[mix]) * SAMPLES, encoding="ascii")
    with tempfile.TemporaryDirectory(dir=scratch) as here:
        recorded = run(chapter, Path(here) / "run", cp_layout=layout, document_mask=None,
                       document_separator=ord(SEPARATOR), data=text, data_order="sequential",
                       val_fraction=0, seq_len=balance.TOKENS, steps=FEW, trace_steps=FEW)
    return attention(recorded, SKIPPED)


def text_of(lengths):
    """A sample of documents of so many bytes, their separators included."""
    return "".join((LETTERS * (length // len(LETTERS) + 1))[:length - 1] + SEPARATOR
                   for length in lengths)


def cells(layout, tokens=SHAPE["seq_len"], ranks=RANKS):
    """Of the causal mask of one document, those of each rank."""
    return [sum(position + 1 for position in balance.positions(layout, rank, tokens, ranks))
            for rank in range(ranks)]


def time_of(rank):
    return rank["forward_ms"] + rank["backward_ms"]


def found_layout(measured, layout):
    """What was measured of a layout."""
    return next(found for found in measured["layouts"] if found["layout"] == layout)


def layouts_table(measured):
    """Attention's forward by rank."""
    rows = []
    counted = {layout: cells(layout) for layout in LAYOUTS}
    for rank in range(RANKS):
        row = [str(rank)]
        for layout in LAYOUTS:
            times = [own["forward_ms"] for own in found_layout(measured, layout)["ranks"]]
            row += [f"{counted[layout][rank] * RANKS / sum(counted[layout]):.2f}",
                    f"{times[rank]:.1f}", f"{times[rank] * RANKS / sum(times):.2f}"]
        rows.append(row)
    head = [text for layout in LAYOUTS for text in (f"{layout}: cells / mean", f"{layout}: ms", f"{layout}: ms / mean")]
    return runs.table(["rank", *head], rows,
                      f"Attention's forward in a step, CPU time: {RANKS} ranks, "
                      f"{SHAPE['seq_len']:,} tokens, {SHAPE['num_layers']} layers in f32. Medians of "
                      "the later steps.")


def steps_table(measured):
    """A step of both layouts."""
    rows = []
    slow = found_layout(measured, LAYOUTS[0])["step_ms"]
    for layout in LAYOUTS:
        found = found_layout(measured, layout)
        times = [time_of(own) for own in found["ranks"]]
        rows.append([layout, f"{max(times):.0f}", f"{sum(times) / RANKS:.0f}",
                     f"{found['step_ms']:.0f}", f"{slow / found['step_ms']:.2f}"])
    return runs.table(["", "attention of the slowest rank, ms", "mean of the ranks",
                       "step, replayed, ms", "tokens/s, × contiguous"], rows,
                      f"The same runs, forward and backward. Replayed on a link of `{FAST}` (us, "
                      "GB/s), every rank on a core of its own.")


def documents_table(measured):
    """Mixes of documents: counted cells, counted operations, time."""
    rows = []
    for mix, lengths in balance.MIXES.items():
        row = [mix]
        for layout in LAYOUTS:
            found = next(case["ranks"] for case in measured["documents"]
                         if (case["mix"], case["layout"]) == (mix, layout))
            row += [f"{balance.uneven(balance.work(layout, RANKS, lengths)):.2f}",
                    f"{balance.uneven([own['flops'] for own in found]):.2f}",
                    f"{balance.uneven([time_of(own) for own in found]):.2f}"]
        rows.append(row)
    head = [text for layout in LAYOUTS
            for text in (f"{layout}: cells", "operations", "time")]
    return runs.table([f"documents of {balance.TOKENS:,} tokens", *head], rows,
                      f"The most of a rank of {RANKS}, in means of the ranks. Cells are the mask's, "
                      "operations those of attention that the ranks counted, and the time is "
                      "attention's on the CPU.")
