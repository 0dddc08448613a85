"""What runs of a few steps send and compute: messages of a pipeline, losses of every schedule."""
from tools.base import say
from tools.book.short_runs import run, table

from .memory import SMALL

STEPS = 5
# Messages: (p, v, m), and layers of the model.
MESSAGES = ((2, 1, 4, 8), (2, 2, 4, 8), (4, 1, 4, 8), (4, 2, 4, 8), (4, 1, 4, 16))
MESSAGE_STEPS = 2
VALUE_BYTES = 4
# Flags of the runs in f64; the first: one rank. Of as many micro-batches as DualPipe needs.
AGREEING = ({}, *({"pp_size": 2, "pp_schedule": name} for name in ("naive", "afab", "1f1b")),
            {"pp_size": 2, "pp_schedule": "interleaved", "pp_chunks": 2},
            {"pp_size": 2, "pp_schedule": "breadth_first", "pp_chunks": 2},
            {"pp_size": 2, "pp_schedule": "llama3", "pp_chunks": 2, "pp_run_length": 4},
            *({"pp_size": 4, "pp_schedule": name} for name in (
                "1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v", "auto")),
            {"pp_size": 2, "dp_size": 2}, {"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "cp_size": 2})
AGREEING_MICRO_BATCHES = 8


def count(program):
    """Messages and losses."""
    say("book: messages and losses of pipelines")
    return {"messages": [_messages(program, *case) for case in MESSAGES],
            "losses": [{"flags": flags, "steps": _losses(program, flags)} for flags in AGREEING]}


def _messages(program, p, v, m, layers):
    """Of a step: messages and bytes that rank 0 sends over pp."""
    flags = {"pp_schedule": "interleaved", "pp_chunks": v} if v > 1 else {}
    _, ledger = run(program, p, **{**SMALL, "num_layers": layers}, **flags, pp_size=p,
                    grad_acc_steps=m, steps=MESSAGE_STEPS)
    sent = ledger["pp.send"]
    return {"p": p, "v": v, "m": m, "layers": layers, "calls": sent["calls"] / MESSAGE_STEPS,
            "bytes": sent["wire_bytes"] / MESSAGE_STEPS}


def _losses(program, flags):
    """Losses and gradient norms of the same steps in f64."""
    dp = flags.get("dp_size", 1)
    ranks = dp * flags.get("pp_size", 1) * flags.get("tp_size", 1) * flags.get("cp_size", 1)
    shape = {**SMALL, **flags, "dp_size": dp}
    records, _ = run(program, ranks, **shape, dtype="f64", steps=STEPS,
                     grad_acc_steps=AGREEING_MICRO_BATCHES // dp)
    return [[record["loss"], record["grad_norm"]] for record in records]


def largest_difference(found):
    """Of losses and gradient norms from those of the first run, relative."""
    base = found[0]["steps"]
    return max(abs(own / one - 1) for other in found[1:] for step, first in zip(other["steps"], base)
               for own, one in zip(step, first))


def messages_of_rank_0(v, m):
    """Forward of each stage of its, and backward of those that are not the model's first."""
    return (2 * v - 1) * m


def message_values():
    """Values in a message: s b h."""
    return SMALL["seq_len"] * SMALL["micro_batch_size"] * SMALL["hidden_size"]


def messages_table(found):
    """What rank 0 sends in a step."""
    rows = [[str(own["p"]), str(own["v"]), str(own["m"]), str(own["layers"]),
             f"{own['calls']:g} ({messages_of_rank_0(own['v'], own['m'])})",
             f"{own['bytes'] / own['calls'] / VALUE_BYTES:,.0f} ({message_values():,})"]
            for own in found]
    return table(["`p`", "`v`", "`m`", "layers", "messages", "values in each"], rows,
                 "What rank 0 sends in a step over `pp`, counted by the ledger; in brackets "
                 "`(2v-1) m` and `s b h`.")
