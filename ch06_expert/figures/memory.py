"""What a mixture of experts costs, by steps on shapes: parameters and work beside dense models, what a
rank holds by the number of ranks that share out experts, and two published shapes on meshes."""
from tools import estimates
from tools.base import say
from tools.short_runs import run, table

GIB = 2**30
STATES = ("weights", "gradients", "optimizer")
LARGE = {"dtype": "bf16", "micro_batch_size": 1, "seq_len": 4096}
# Shapes of models, by their authors.
MISTRAL = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
           "ffn_hidden_size": 14336, "vocab_size": 32000}
MIXTRAL = {**MISTRAL, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": None}
LATENT = {"attention_kind": "mla", "q_lora_rank": 1536, "kv_lora_rank": 512,
          "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {"hidden_size": 7168, "num_layers": 61, "num_heads": 128, **LATENT,
            "ffn_hidden_size": 18432, "vocab_size": 129280, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_ffn_hidden_size": 2048, "num_shared_experts": 1,
            "first_dense_layers": 3, "router_score": "sigmoid", "norm_topk_prob": None,
            "routed_scaling_factor": 2.5}
# {what it is: (flags, parameters and active ones by its authors, billions)}
PROBLEM = {"dense, Mistral 7B's": (MISTRAL, None),
           "dense, MLP 8 times as wide": ({**MISTRAL, "ffn_hidden_size": 8 * 14336}, None),
           "8 experts, Mixtral 8x7B's": (MIXTRAL, (46.7, 12.9)),
           "256 experts, DeepSeek-V3's": (DEEPSEEK, (671, 37))}
EP = (1, 2, 4, 8)
# {model: [mesh]}; every mesh with ZeRO-1, whole layers recomputed, 1F1B where there are stages.
MESHES = {"Mixtral 8x7B": (MIXTRAL, ({"dp_size": 8, "ep_size": 1}, {"dp_size": 8, "ep_size": 8},
                                     {"dp_size": 64, "ep_size": 8},
                                     {"dp_size": 32, "tp_size": 2, "ep_size": 8})),
          "DeepSeek-V3": (DEEPSEEK, ({"dp_size": 256, "ep_size": 64},
                                     {"dp_size": 128, "pp_size": 16, "ep_size": 64}))}
# A small model, whose runs are counted.
SMALL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 2, "seq_len": 64, "num_experts": 8, "moe_ffn_hidden_size": 96}
SMALL_RANKS = 4


def layers_with_experts(shape):
    return shape["num_layers"] - shape.get("first_dense_layers", 0)


def expert_parameters(shape):
    """Of all routed experts: three matrices each."""
    width = shape.get("moe_ffn_hidden_size", shape["ffn_hidden_size"])
    return layers_with_experts(shape) * shape["num_experts"] * 3 * shape["hidden_size"] * width


def active_parameters(shape, parameters):
    """Those that a token goes through: all, but of the routed experts k of E."""
    if "num_experts" not in shape:
        return parameters
    left_out = 1 - shape["num_experts_per_tok"] / shape["num_experts"]
    return parameters - expert_parameters(shape) * left_out


def _parse(found):
    own = found["simulated"]
    sent = {name: size for name, (_, size) in estimates.sent(found).items()}
    return {**{key: own[key] for key in (*STATES, "activations", "peak_activations", "peak_total",
                                         "flops")},
            "sent": sent.get("ep.all_to_all", 0)}


def _flags(shape, **more):
    if more.get("tp_size", 1) > 1:
        more["sequence_parallel"] = None
    if more.get("pp_size", 1) > 1:
        more["grad_acc_steps"] = more["pp_size"]
    return {**shape, **more}


def estimate(program, shape, **more):
    """Bytes and work of rank 0, by steps on shapes."""
    return estimates.read(program, _flags(shape, **more), _parse)


def estimate_all(program):
    """Every case."""
    say("book: estimating mixtures of experts")
    return {"problem": [{"case": case, **estimate(program, {**LARGE, **shape})}
                        for case, (shape, _) in PROBLEM.items()],
            "ep": [{"ep": ep, **estimate(program, {**LARGE, **MIXTRAL}, dp_size=EP[-1], ep_size=ep)}
                   for ep in EP],
            "meshes": [{"model": model, "mesh": mesh, **estimate(
                program, {**LARGE, **shape}, zero_stage=1, recompute="full", **mesh)}
                       for model, (shape, meshes) in MESHES.items() for mesh in meshes],
            "small": [{"ep": ep, **estimate(program, SMALL, dtype="f32", micro_batch_size=2,
                                            dp_size=SMALL_RANKS, ep_size=ep)} for ep in (1, 2, 4)]}


def count(program):
    """What rank 0 of runs of the small model holds."""
    found = []
    for ep in (1, 2, 4):
        records, _ = run(program, SMALL_RANKS, **SMALL, dtype="f32", micro_batch_size=2, ep_size=ep,
                         steps=2)
        found.append({"ep": ep, **{name: int(records[-1]["peak_bytes"][name]) for name in STATES}})
    return found


def billions(number):
    return f"{number / 1e9:,.1f}"


def problem_table(found):
    """Parameters, those in a token's way, work and memory."""
    rows = []
    for own in found:
        shape, told = PROBLEM[own["case"]]
        parameters = own["weights"] / 2
        active = active_parameters(shape, parameters)
        theirs = [f" ({value:g})" if told else "" for value in told or (0, 0)]
        rows.append([own["case"], billions(parameters) + theirs[0], billions(active) + theirs[1],
                     f"{own['flops'] / LARGE['seq_len'] / 1e9:,.0f}",
                     f"{sum(own[name] for name in STATES) / GIB:,.0f}"])
    return table(["", "parameters", "of these in a token's way", "GFLOP a token",
                  "weights, gradients and states, GiB"],
                 rows, "Billions of parameters, in brackets the authors'; by steps on shapes of 4,096 tokens, in bf16 "
                 "with gradients in f32. In a token's way is all of the embedding, though it reads one row.")


def ep_table(found):
    """Mixtral's shape on 8 data-parallel ranks, by ep."""
    rest = found[0]["weights"] / 2 - expert_parameters(MIXTRAL)
    rows = []
    for own in found:
        expected = 2 * (rest + expert_parameters(MIXTRAL) / own["ep"])
        rows.append([str(own["ep"]), f"{own['weights'] / GIB:.2f} ({expected / GIB:.2f})",
                     f"{sum(own[name] for name in STATES) / GIB:,.1f}",
                     f"{own['flops'] / 1e12:.1f}", f"{own['sent'] / GIB:.2f}"])
    return table(["`ep`", "weights, GiB", "weights, gradients and states, GiB", "TFLOP of a step",
                  "sent over `ep`, GiB"], rows,
                 f"Rank 0 of {EP[-1]} data-parallel ranks, Mixtral's shape, 4,096 tokens a rank, by steps "
                 "on shapes. In brackets by formula: 2 bytes for each of `3 h h_ff E L / ep` parameters of experts and "
                 "of all others.")


def mesh_name(mesh):
    return " ".join(f"`{name.removesuffix('_size')}` {size}" for name, size in mesh.items())


def ranks_of(mesh):
    return mesh.get("dp_size", 1) * mesh.get("tp_size", 1) * mesh.get("pp_size", 1)


def meshes_table(found):
    """What rank 0 of a large mesh needs."""
    rows = [[own["model"], f"{ranks_of(own['mesh']):,}", mesh_name(own["mesh"]),
             *(f"{own[name] / GIB:,.1f}" for name in (*STATES, "peak_activations")),
             f"{own['peak_total'] / GIB:,.1f}"] for own in found]
    return table(["", "ranks", "mesh", *STATES, "activations, at most", "peak"], rows,
                 "GiB of rank 0 by steps on shapes: bf16, 4,096 tokens a micro-batch, ZeRO-1, every layer "
                 "recomputed, experts evenly loaded. With stages 1F1B, `m` = `p`; rank 0 has the "
                 "embedding and DeepSeek-V3's 3 dense layers.")
