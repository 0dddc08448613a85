"""Losses of compositions beside one rank's, and what comparing copies sends."""
from tools.base import say
from tools.book.short_runs import run, table

from .placed import SMALL as SHAPE

STEPS, BATCH = 5, 8
MODEL = {name: SHAPE[name] for name in ("num_heads", "num_kv_heads", "hidden_size", "ffn_hidden_size",
                                        "num_layers", "seq_len")}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 96}
# (flags that change the model, ranks, flags of the layout): three dimensions at a time, and more.
COMPOSED = (
    ({}, 8, {"tp_size": 2, "pp_size": 2, "grad_acc_steps": 2, "sequence_parallel": None}),
    ({}, 8, {"tp_size": 2, "cp_size": 2, "zero_stage": 3, "mesh_order": "tp,dp,pp,cp"}),
    ({"tie_word_embeddings": None}, 8, {"pp_size": 2, "cp_size": 2, "zero_stage": 1, "grad_acc_steps": 4,
                                        "mesh_order": "cp,pp,tp,dp"}),
    (EXPERTS, 8, {"tp_size": 2, "ep_size": 4, "cp_size": 2, "sequence_parallel": None,
                  "zero_stage": 2, "mesh_order": "dp,pp,cp,tp"}),
    (EXPERTS, 16, {"tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 2, "grad_acc_steps": 2,
                   "sequence_parallel": None, "zero_stage": 1}),
    (EXPERTS, 16, {"tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 4, "grad_acc_steps": 2,
                   "sequence_parallel": None, "expert_tp": None, "mesh_order": "tp,cp,dp,pp"}),
)
CHECKED = (2, 4)  # ranks of dp that compare all of their copies


def _losses(program, ranks, flags):
    copies = ranks // (flags.get("tp_size", 1) * flags.get("cp_size", 1) * flags.get("pp_size", 1))
    size = BATCH // copies // flags.get("grad_acc_steps", 1)
    records, _ = run(program, ranks, **MODEL, **flags, dtype="f64", steps=STEPS, micro_batch_size=size)
    return [[record["loss"], record["grad_norm"]] for record in records]


def count(program):
    say("book: losses of compositions, and comparing copies")
    found = {"compositions": [], "checked": []}
    for model, ranks, flags in COMPOSED:
        found["compositions"].append({
            "ranks": ranks, "flags": {**model, **flags}, "steps": _losses(program, ranks, {**model, **flags}),
            "alone": _losses(program, 1, dict(model))})
    for ranks in CHECKED:
        records, ledger = run(program, ranks, **MODEL, dtype="f32", steps=4, micro_batch_size=2,
                              check_copies=2)
        found["checked"].append({"ranks": ranks, "steps": len(records), "every": 2,
                                 "bytes": ledger["copies.all_gather"]["wire_bytes"]})
    return found


def difference(own):
    """The largest relative difference of losses and gradient norms from one rank's."""
    return max(abs(mine / one - 1) for step, first in zip(own["steps"], own["alone"])
               for mine, one in zip(step, first))


def tensors():
    """Parameters of MODEL by name: nine of a layer, embedding, last norm, head."""
    return 9 * MODEL["num_layers"] + 3


def copies_bytes(ranks):
    """8 bytes to each of the others, for each parameter."""
    return 8 * (ranks - 1) * tensors()


def layout_text(own):
    sizes = [f"`{axis}` {own['flags'][f'{axis}_size']}" for axis in ("tp", "cp", "pp", "ep")
             if f"{axis}_size" in own["flags"]]
    dense = own["ranks"] // (own["flags"].get("tp_size", 1) * own["flags"].get("cp_size", 1)
                             * own["flags"].get("pp_size", 1))
    more = [f"ZeRO-{own['flags']['zero_stage']}"] if "zero_stage" in own["flags"] else []
    more += ["tied ends"] if "tie_word_embeddings" in own["flags"] else []
    more += ["`--expert_tp`"] if "expert_tp" in own["flags"] else []
    return " ".join([f"`dp` {dense}", *sizes]) + (", " + ", ".join(more) if more else "")


def compositions_table(found):
    rows = [[str(own["ranks"]), layout_text(own), f"`{own['flags'].get('mesh_order', 'pp,dp,cp,tp')}`",
             f"{own['steps'][-1][0]:.12f}", f"{own['alone'][-1][0]:.12f}", f"{difference(own):.0e}"]
            for own in found]
    return table(["ranks", "layout", "`--mesh_order`", "last loss", "last loss of one rank", "largest difference"], rows,
                 f"f64, {STEPS} steps; differences are relative, and the largest is over all losses and gradient norms.")


def checked_table(found):
    rows = []
    for own in found:
        each = own["bytes"] / (own["steps"] / own["every"])
        formula = copies_bytes(own["ranks"])
        rows.append([str(own["ranks"]), f"{each:,.0f}", f"{formula:,.0f}", f"{each / formula:.4f}"])
    return table(["ranks of `dp`", "sent to compare, bytes", "by formula", "ratio"], rows,
                 f"What rank 0 sends each time, by the ledger: 8 bytes to each of the others for each of {tensors()} "
                 "parameters.")
