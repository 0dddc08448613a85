"""Tokens/s of a rank over tp, with a node boundary: the shape of Fig3.10.

Ranks up to MOST are recorded on this machine, where they share its cores, and laid out by a replay
on a machine with a core for each of them. The batch stays as it is.
"""
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import on_links, steady, train

from . import runs

TP = (1, 2, 4, 8, 16)
NODE_SIZE, NODE_LINK, NET_LINK = 8, "node=20,10", "net=40,4"
SHAPE = {"hidden_size": 256, "num_heads": 16, "num_kv_heads": 16, "ffn_hidden_size": 704,
         "num_layers": 4, "seq_len": 256, "micro_batch_size": 4}
WAYS = ("tensor", "again")
# The book's 3B, on nodes of 8 H100 too: tokens/s of a GPU, without and with sequence parallelism.
BOOK_TP = (2, 4, 8, 16, 32)
BOOK = {"tensor": (13923.18, 12420.76, 10903.32, 6245.60, 2146.44),
        "again": (14167.25, 13460.16, 10888.53, 6159.30, 3609.73)}


def lay_out(recorded, tp):
    """The replayed run: nodes of NODE_SIZE, and every rank owns a core."""
    links = (NODE_LINK, NET_LINK) if tp > NODE_SIZE else (NODE_LINK,)
    node_size = NODE_SIZE if tp > NODE_SIZE else None
    return on_links(recorded, *(links if tp > 1 else ()), node_size=node_size)


def measure(chapter):
    """[{way, tp, step_ms, exposed_ms, tokens_per_s_per_rank}], replayed."""
    found = []
    with tempfile.TemporaryDirectory(prefix="book_scaling_") as scratch:
        for tp in TP:
            for way in WAYS:
                if tp == 1 and found:  # one rank shares nothing, whatever the way
                    found.append({**found[0], "way": way})
                    continue
                say(f"book: {runs.WAY_NAMES[way]}, tp = {tp}")
                # Every rank has one thread, whatever their number.
                recorded = train(chapter, Path(scratch) / f"{way}_{tp}", tp, share=max(TP),
                                 tp_size=tp, **SHAPE, **(runs.WAYS[way] if tp > 1 else {}))
                step, exposed = steady(lay_out(recorded, tp))
                tokens = recorded.facts["global_batch_tokens"]
                found.append({"way": way, "tp": tp, "step_ms": step, "exposed_ms": exposed,
                              "tokens_per_s_per_rank": 1000 * tokens / step / tp})
    return {"node_size": NODE_SIZE, "links": [NODE_LINK, NET_LINK], "shape": SHAPE,
            "replayed": found}


def points(measured, way):
    """[(tp, tokens/s of a rank)] of a way."""
    return [(found["tp"], found["tokens_per_s_per_rank"]) for found in measured["replayed"]
            if found["way"] == way]


def drops(rates):
    """What each rate is below the one before it, in percent."""
    return [100 * (after / before - 1) for before, after in zip(rates, rates[1:])]


def table(measured):
    """Tokens/s of a rank over tp by way, and what each doubling costs."""
    rows, before = [], {}
    for tp in TP:
        row = [str(tp)]
        for way in WAYS:
            found, = (found for found in measured["replayed"]
                      if (found["way"], found["tp"]) == (way, tp))
            rate = found["tokens_per_s_per_rank"]
            change = f"{drops((before[way], rate))[0]:+.1f} %" if way in before else ""
            row += [f"{rate:,.0f}", change, f"{found['exposed_ms']:.1f}"]
            before[way] = rate
        rows.append(row)
    return runs.table(["`tp`", "tokens/s of a rank", "change", "exposed, ms", "with SP", "change",
                       "exposed, ms"], rows,
                      f"Replayed on nodes of {measured['node_size']}, links "
                      f"`{' '.join(measured['links'])}` (us, GB/s), a core for every rank. SP: sequence "
                      f"parallelism. {SHAPE['num_layers']} layers, h = {SHAPE['hidden_size']}, "
                      f"{SHAPE['micro_batch_size'] * SHAPE['seq_len']:,} tokens for any `tp`: strong scaling.")
