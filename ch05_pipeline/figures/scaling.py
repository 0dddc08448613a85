"""Tokens/s of a rank over pp, with few micro-batches and with many, and a node boundary: the shape
of Fig5.6. Beside it, what tensor parallelism loses at the same boundary.

Ranks are recorded on this machine, whose cores they share, and laid out with a core for each.
"""
import statistics
import tempfile
from pathlib import Path

from tools.base import say
from tools.bench.steady import on_links, train
from tools.book.short_runs import table
from tools.look import trace as traces

PP, TP, MANY = (2, 4, 8, 16), (8, 16), 32
NODE_SIZE, NODE_LINK, NET_LINK = 8, "node=20,10", "net=40,4"
SHAPE = {"hidden_size": 256, "num_heads": 16, "num_kv_heads": 16, "ffn_hidden_size": 704,
         "num_layers": 16, "seq_len": 64, "dp_size": 1}
STEPS, SKIPPED = 7, 3
# The book's tokens/s of a GPU, by m and p, read off its figure. What it says is lost from 8 to 16, in
# percent: with few micro-batches, and by tensor parallelism.
BOOK = {"few": {2: 7380, 4: 8030, 8: 7870, 16: 6690, 32: 3730},
        "many": {2: 15320, 4: 13870, 8: 11640, 16: 7860, 32: 3740}}
BOOK_LOSS, BOOK_TP_LOSS = 14.9, 42.7


def micro_batches(way, p):
    return p - 1 if way == "few" else MANY


def measure(chapter):
    """{found: [{way, ranks, m, step_ms, tokens_per_s_per_rank}]}, replayed; ways: few, many, tp."""
    cases = [(way, p, {"pp_size": p, "grad_acc_steps": micro_batches(way, p), "micro_batch_size": 1})
             for way in BOOK for p in PP]
    cases += [("tp", tp, {"tp_size": tp, "micro_batch_size": MANY}) for tp in TP]
    found = []
    with tempfile.TemporaryDirectory(prefix="book_pipeline_") as scratch:
        for way, ranks, flags in cases:
            say(f"book: speed of {ranks} ranks, {way}")
            # Every rank has one thread, whatever their number.
            recorded = train(chapter, Path(scratch) / f"{way}_{ranks}", ranks, share=max(PP),
                             **SHAPE, **flags, steps=STEPS, trace_steps=STEPS)
            links = (NODE_LINK, NET_LINK) if ranks > NODE_SIZE else (NODE_LINK,)
            laid_out = on_links(recorded, *links,
                                node_size=NODE_SIZE if ranks > NODE_SIZE else None)
            later = list(traces.steps(laid_out).values())[SKIPPED:]
            ms = statistics.median(traces.step_time(step) / 1000 for step in later)
            tokens = recorded.facts["global_batch_tokens"]
            found.append({"way": way, "ranks": ranks, "m": flags.get("grad_acc_steps", 1),
                          "step_ms": round(ms, 3),
                          "tokens_per_s_per_rank": round(1000 * tokens / ms / ranks, 1)})
    return {"node_size": NODE_SIZE, "links": [NODE_LINK, NET_LINK], "found": found}


def rates(measured, way):
    """{ranks: tokens/s of each}"""
    return {own["ranks"]: own["tokens_per_s_per_rank"] for own in measured["found"]
            if own["way"] == way}


def loss(by_ranks, before=8, after=16):
    """What so many more ranks lose of each one's speed, in percent."""
    return 100 * (1 - by_ranks[after] / by_ranks[before])


def expected(way, p):
    """Of the speed without a bubble."""
    m = micro_batches(way, p)
    return 1 / (1 + (p - 1) / m)


def scaling_table(measured):
    """Speed over p by m, beside what the bubble alone would make of that with p = 2 and many."""
    rows = []
    found = {way: rates(measured, way) for way in BOOK}
    base = found["many"][PP[0]] / expected("many", PP[0])
    for p in PP:
        row = [str(p)]
        for way in BOOK:
            row += [f"{found[way][p]:,.0f}", f"{base * expected(way, p):,.0f}",
                    f"{BOOK[way][p]:,}"]
        rows.append(row)
    head = [text for name in ("`m` = `p-1`", f"`m` = {MANY}")
            for text in (f"{name}: tokens/s", "by the bubble", "the book's")]
    return table(["`p`", *head], rows,
                 f"Of each rank, with {SHAPE['num_layers']} layers, {SHAPE['seq_len']} tokens a micro-batch and 1F1B, "
                 f"replayed on nodes of {measured['node_size']} with links `{' '.join(measured['links'])}` (us, GB/s) "
                 f"and a core for every rank. With `m` = `p-1` the batch grows with the ranks (weak scaling), with "
                 f"`m` = {MANY} it does not (strong scaling). By the bubble: what the run with `p` = {PP[0]} and "
                 f"`m` = {MANY} leads us to expect. The book's numbers are of another model, on GPUs.")
