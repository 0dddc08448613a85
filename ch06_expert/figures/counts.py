"""What runs of a few steps send and compute: the bytes of ep, losses of every layout, and of tokens
that are sent to few nodes."""
import random

from tools.base import say
from tools.book.short_runs import run, table

from .memory import SMALL, layers_with_experts

STEPS = 5
VALUE_BYTES = 4
MESSAGE_STEPS = 3
# (ranks, ep, k): with k = E every token goes to every expert, so that all experts are equally loaded.
MESSAGES = ((2, 2, 8), (4, 4, 8), (4, 4, 2), (4, 4, 1))
MESSAGE_BATCH = 4  # samples of a rank
# Flags of the runs in f64, the ranks and the samples of a micro-batch; the first: one rank.
BATCH = 8
AGREEING = ((1, {}), (2, {"ep_size": 2}), (4, {"ep_size": 4}), (4, {"ep_size": 2}),
            (2, {"ep_size": 2, "grad_acc_steps": 2}), (4, {"ep_size": 4, "zero_stage": 1}),
            (4, {"ep_size": 2, "zero_stage": 2}), (4, {"ep_size": 2, "zero_stage": 3}),
            (2, {"ep_size": 2, "recompute": "full"}),
            (4, {"ep_size": 4, "tp_size": 2, "sequence_parallel": None}),
            (4, {"ep_size": 2, "tp_size": 2, "sequence_parallel": None, "expert_tp": None}),
            (4, {"ep_size": 4, "cp_size": 2}),
            (4, {"ep_size": 2, "pp_size": 2, "grad_acc_steps": 4}),
            # Without a pipeline, a backward pass in turns with the next forward pass.
            (2, {"ep_size": 2, "grad_acc_steps": 4, "overlap_dispatch": None}))
BALANCES = ("none", "sample", "batch", "bias")
# Node-limited routing, in DeepSeek-V3's numbers: experts on nodes, of which a token may choose some.
EXPERTS, CHOICES, NODES, ALLOWED = 256, 8, 8, (1, 2, 4, 8)
BY_NODE = {"ep_size": 4, "node_size": 2, "expert_nodes": 2, "dispatch": "by_node"}
TOKENS = 4096


def count(program):
    """Messages and losses."""
    say("book: messages and losses of experts on several ranks")
    return {"ledger": ledger(program), "messages": [_messages(program, *case) for case in MESSAGES],
            "losses": [{"balance": balance, "ranks": ranks, "flags": flags,
                        "steps": _losses(program, ranks, balance, flags)}
                       for balance in BALANCES for ranks, flags in AGREEING],
            "nodes": [{"allowed": allowed, **route(allowed)} for allowed in ALLOWED]}


def ledger(program, **flags):
    """The names of the messages of a run on 4 ranks; alone one in which experts have copies, too."""
    _, found = run(program, 4, **SMALL, dtype="f32", num_experts_per_tok=2, micro_batch_size=MESSAGE_BATCH,
                   steps=MESSAGE_STEPS, **(flags or {"ep_size": 2}))
    return sorted(found)


def _messages(program, ranks, ep, k):
    """Of a step: operations and bytes of rank 0 over ep."""
    _, ledger = run(program, ranks, **SMALL, dtype="f32", num_experts_per_tok=k, ep_size=ep,
                    micro_batch_size=MESSAGE_BATCH, steps=MESSAGE_STEPS)
    rows, counts = ledger["ep.all_to_all"], ledger["ep_counts.all_to_all"]
    return {"ranks": ranks, "ep": ep, "k": k, "calls": rows["calls"] / MESSAGE_STEPS,
            "bytes": rows["wire_bytes"] / MESSAGE_STEPS,
            "counts": counts["wire_bytes"] / MESSAGE_STEPS}


def message_bytes(ep, k):
    """2 exchanges forward, 2 backward, in each layer: T k h values, of which 1/ep stay."""
    tokens = MESSAGE_BATCH * SMALL["seq_len"]
    rows = tokens * k * (ep - 1) / ep
    return 4 * layers_with_experts(SMALL) * rows * SMALL["hidden_size"] * VALUE_BYTES


def _losses(program, ranks, balance, flags):
    """Losses and gradient norms of the same steps in f64."""
    shared = ranks // (flags.get("tp_size", 1) * flags.get("cp_size", 1) * flags.get("pp_size", 1))
    records, _ = run(program, ranks, **SMALL, **flags, dtype="f64", steps=STEPS, balance=balance,
                     micro_batch_size=BATCH // shared // flags.get("grad_acc_steps", 1))
    return [[record["loss"], record["grad_norm"]] for record in records]


def differences(found, balance):
    """[largest relative difference of losses and gradient norms from those of one rank]"""
    own = [case for case in found if case["balance"] == balance]
    base = own[0]["steps"]
    return [max(abs(mine / one - 1) for step, first in zip(case["steps"], base)
                for mine, one in zip(step, first)) for case in own[1:]]


def route(allowed):
    """Tokens with random scores, that choose experts on so many nodes: the nodes of a token, on
    average and at most, and rows that leave a token's node if a node gets one of each token, or one
    for each choice."""
    generator, here = random.Random(0), EXPERTS // NODES
    best = -(-CHOICES // allowed)
    met, most, rows = 0, 0, 0
    for _ in range(TOKENS):
        scores = [generator.random() for _ in range(EXPERTS)]
        of_node = [sum(sorted(scores[n * here:(n + 1) * here])[-best:]) for n in range(NODES)]
        nodes = sorted(range(NODES), key=lambda n: -of_node[n])[:allowed]
        open_to = [n * here + i for n in nodes for i in range(here)]
        picked = sorted(open_to, key=lambda expert: -scores[expert])[:CHOICES]
        home = generator.randrange(NODES)
        met += len({expert // here for expert in picked})
        most = max(most, len({expert // here for expert in picked}))
        rows += sum(expert // here != home for expert in picked)
    return {"mean": met / TOKENS, "most": most, "rows": rows / TOKENS,
            "once": met / TOKENS * (1 - 1 / NODES)}


def messages_table(found):
    """What rank 0 sends over ep in a step."""
    rows = []
    for own in found:
        expected = message_bytes(own["ep"], own["k"])
        rows.append([str(own["ranks"]), str(own["ep"]), str(own["k"]), f"{own['calls']:g}",
                     f"{own['bytes']:,.0f}", f"{expected:,.0f}", f"{own['bytes'] / expected:.3f}",
                     f"{own['counts']:g}"])
    return table(["ranks", "`ep`", "`k` of 8", "all-to-alls", "sent, bytes", "by formula", "ratio",
                  "sent as counts"], rows,
                 f"What rank 0 sends over `ep` in a step, by the ledger; {SMALL['num_layers']} layers.")


def nodes_table(found):
    """Nodes that a token meets."""
    rows = [[str(own["allowed"]), f"{own['mean']:.2f}", str(own["most"]), f"{own['rows']:.2f}",
             f"{own['once']:.2f}"] for own in found]
    return table(["`--route_nodes`", "nodes of a token", "nodes of a token, at most", "rows that leave a node",
                  "copies that leave if each node gets one"], rows,
                 f"{EXPERTS} experts on {NODES} nodes, `k` = {CHOICES}, random scores: means over {TOKENS:,} "
                 "tokens, by going through their choices.")
