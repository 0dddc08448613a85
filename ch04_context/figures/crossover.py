"""From how many tokens of a rank on does a block of attention hide the next one's keys (Q4.5)?

Runs of a ring with more and more tokens are recorded. A formula says which bandwidth hides half of
each one's messages; replays on other links find it. Twice that is enough to hide them.
"""
import tempfile
from bisect import bisect_right
from pathlib import Path

from tools.base import say
from tools.bench.steady import SKIPPED_STEPS, on_links, train

from . import runs, workload

RANKS = 4
SEQ_LENS = (512, 1024, 2048, 4096, 8192)
SHAPE = {**workload.SHAPE, "micro_batch_size": 1}
STEPS = 8
HALF = 0.5             # of the messages' time that is waited for on the links that are looked for
LINK_OF = 1024         # tokens of a sample, of which the link of the table is such a one
PASSES = 20            # of the search, in each of which the bandwidth is known twice as well
LIMITS = (0.001, 1000) # GB/s, between which it lies
BYTES = 4


def block_bytes(seq_len):
    """Keys and values of a rank's tokens, as they travel."""
    channels = SHAPE["hidden_size"] // SHAPE["num_heads"]
    return SHAPE["micro_batch_size"] * seq_len // RANKS * 2 * SHAPE["num_kv_heads"] * channels * BYTES


def block_flops(seq_len):
    """Two products of half of a block's pairs, under zig-zag."""
    return SHAPE["micro_batch_size"] * 2 * 2 * SHAPE["hidden_size"] * (seq_len / RANKS)**2 / 2


def measure(chapter):
    """{gb_per_s: the link's, lengths: [{seq_len, gflops: of attention, shown: on the link,
    half_gb_per_s: by replays}]}"""
    found, recordings = [], []
    with tempfile.TemporaryDirectory(prefix="book_context_") as scratch:
        for seq_len in SEQ_LENS:
            say(f"book: a ring of {seq_len} tokens")
            recorded = train(chapter, Path(scratch) / str(seq_len), RANKS, cp_size=RANKS,
                             **{**SHAPE, "seq_len": seq_len}, steps=STEPS, trace_steps=STEPS)
            recordings.append(recorded)
            found.append({"seq_len": seq_len, "gflops": _rate(recorded)})
        rate = next(entry["gflops"] for entry in found if entry["seq_len"] == LINK_OF)
        gb_per_s = half_hidden(LINK_OF, rate)
        for entry, recorded in zip(found, recordings):
            entry["half_gb_per_s"] = _search(recorded)
            entry["shown"] = shown(recorded, gb_per_s)
    return {"gb_per_s": gb_per_s, "ranks": RANKS, "lengths": found}


def _rate(recorded):
    """GFLOP/s of attention's forward on a thread, over all ranks."""
    spans = [span for rank in recorded.ranks for span in rank.spans
             if span.name == "attention_forward" and span.step > SKIPPED_STEPS]
    return sum(span.flops for span in spans) / sum(span.cpu_duration for span in spans) / 1000


def half_hidden(seq_len, gflops):
    """GB/s on which a block hides half of a message: t_comm / t_compute is 2."""
    return block_bytes(seq_len) / (block_flops(seq_len) / gflops) / 2


def shown(recorded, gb_per_s):
    """The share of forward's messages that is waited for, on a link of so many GB/s."""
    laid_out = on_links(recorded, f"node=0,{gb_per_s!r}")
    exposed = sent = 0.0
    for number, rank in enumerate(laid_out.ranks):
        passes = [span for span in rank.spans if (span.category, span.name) == ("phase", "forward")
                  and span.step > SKIPPED_STEPS]
        begins = [span.begin for span in passes]

        def within(item):
            at = bisect_right(begins, item.begin) - 1
            return at >= 0 and item.begin < begins[at] + passes[at].duration

        exposed += sum(wait.exposed for wait in rank.waits if within(wait)
                       and laid_out.group(number, wait.group).name == "cp_ring")
        sent += sum(item.duration for item in rank.communications if item.kind == "send"
                    and item.dimension == "cp_ring" and within(item))
    return exposed / sent


def _search(recorded):
    """The bandwidth on which HALF of the messages' time is waited for."""
    low, high = LIMITS
    for _ in range(PASSES):
        middle = (low * high)**0.5
        low, high = (low, middle) if shown(recorded, middle) <= HALF else (middle, high)
    return high


def table(measured):
    """One link for all lengths, and for each the link that hides half."""
    rows = []
    for entry in measured["lengths"]:
        half = half_hidden(entry["seq_len"], entry["gflops"])
        ratio = 2 * half / measured["gb_per_s"]
        rows.append([f"{entry['seq_len']:,}", f"{entry['seq_len'] // RANKS:,}",
                     f"{entry['gflops']:.0f}", f"{ratio:.2f}",
                     f"{100 * max(0, 1 - 1 / ratio):.0f} %", f"{100 * entry['shown']:.0f} %",
                     f"{half:.3g}", f"{entry['half_gb_per_s']:.3g}"])
    return runs.table(["tokens", "of a rank", "GFLOP/s of attention", "t_comm / t_compute",
                       "exposed, by formula", "exposed, replayed",
                       "GB/s that hide half, by formula", "replayed"], rows,
                      f"Keys and values of forward, a ring of {RANKS} ranks. Up to the exposed share of the messages' "
                      f"time, the columns are for a link of {measured['gb_per_s']:.3g} GB/s without latency. "
                      "GFLOP/s are a core's in attention's forward, as it was recorded.")
