"""What a mixture of experts costs, by a dry run: parameters and work beside dense models, what a
rank holds by the number of ranks that divide experts, and two published shapes on meshes."""
from tools.base import say
from tools.book.short_runs import run, table
from tools.run import build, estimates

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
ON_MESHES = {"zero_stage": 1, "recompute": "full"}
STAGES = "stages"  # the example that tells of every stage
# A small model, whose runs are counted.
SMALL = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "ffn_hidden_size": 192,
         "num_layers": 2, "seq_len": 64, "num_experts": 8, "moe_ffn_hidden_size": 96}
SMALL_RANKS, SMALL_BATCH = 4, 2
SMALL_EP = (1, 2, 4)
BYTES, CHOICES = 256, 2  # the program's defaults: a vocabulary of bytes, experts of a token


def layers_with_experts(shape):
    return shape["num_layers"] - shape.get("first_dense_layers", 0)


def expert_parameters(shape):
    """Of all routed experts: three matrices each."""
    width = shape.get("moe_ffn_hidden_size", shape["ffn_hidden_size"])
    return layers_with_experts(shape) * shape["num_experts"] * 3 * shape["hidden_size"] * width


def other_parameters(shape):
    """Of embedding, attention with grouped heads, norms, routers and head."""
    h, vocabulary = shape["hidden_size"], shape.get("vocab_size", BYTES)
    return 2 * vocabulary * h + h + shape["num_layers"] * (
        _attention_parameters(shape) + 2 * h + shape["num_experts"] * h)


def _attention_parameters(shape):
    h = shape["hidden_size"]
    return 2 * h * h + 2 * h * h * shape["num_kv_heads"] // shape["num_heads"]


def expert_flops(shape, tokens):
    """18 h h_ff T k L: three matrices, forward and two products backward, of every row."""
    width = shape.get("moe_ffn_hidden_size", shape["ffn_hidden_size"])
    return (18 * shape["hidden_size"] * width * tokens * shape.get("num_experts_per_tok", CHOICES)
            * layers_with_experts(shape))


def step_flops(shape, tokens, seq_len):
    """Of a step that recomputes what blockwise attention does in any case; all layers have experts."""
    h, layers = shape["hidden_size"], shape["num_layers"]
    weights = layers * (_attention_parameters(shape) + shape["num_experts"] * h) + h * shape.get(
        "vocab_size", BYTES)
    pairs = tokens * (seq_len + 1) / 2
    return 6 * weights * tokens + expert_flops(shape, tokens) + 14 * layers * h * pairs


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
    """Bytes and work of rank 0, by a dry run."""
    return estimates.read(program, _flags(shape, **more), _parse)


def estimate_all(program):
    """Every case."""
    say("book: estimating mixtures of experts")
    return {"problem": [{"case": case, **estimate(program, {**LARGE, **shape})}
                        for case, (shape, _) in PROBLEM.items()],
            "ep": [{"ep": ep, **estimate(program, {**LARGE, **MIXTRAL}, dp_size=EP[-1], ep_size=ep)}
                   for ep in EP],
            "meshes": [{"model": model, "mesh": mesh, **estimate(
                program, {**LARGE, **shape}, **ON_MESHES, **mesh)}
                       for model, (shape, meshes) in MESHES.items() for mesh in meshes],
            "small": [{"ep": ep, **estimate(program, SMALL, dtype="f32", micro_batch_size=SMALL_BATCH,
                                            dp_size=SMALL_RANKS, ep_size=ep)} for ep in SMALL_EP]}


def stages_of(text):
    """[{name: bytes}] of every stage, from what the example that tells them prints."""
    head, *lines = text.splitlines()
    return [dict(zip(head.split()[1:], map(int, line.split()[1:]))) for line in lines]


def count_stages(chapter):
    """[{model, mesh, stages}] of the meshes that have stages."""
    example = build.binary(build.RELEASE, f"{chapter.name}_{STAGES}")
    return [{"model": model, "mesh": mesh, "stages": stages_of(estimates.output_of(
        [str(example), "--estimate", *estimates.words_of(_flags(
            {**LARGE, **shape}, **ON_MESHES, **mesh))]))}
            for model, (shape, meshes) in MESHES.items() for mesh in meshes if "pp_size" in mesh]


def count(program):
    """What rank 0 of runs of the small model holds, and what a rank computes in a step on average."""
    found = []
    for ep in SMALL_EP:
        records, _ = run(program, SMALL_RANKS, **SMALL, dtype="f32", micro_batch_size=SMALL_BATCH,
                         ep_size=ep, steps=2)
        found.append({"ep": ep, "flops": records[-1]["flops"] / SMALL_RANKS,
                      **{name: int(records[-1]["peak_bytes"][name]) for name in STATES}})
    return found


def billions(number):
    return f"{number / 1e9:,.1f}"


def problem_table(found):
    """Parameters, active ones, work and memory."""
    rows = []
    for own in found:
        shape, told = PROBLEM[own["case"]]
        parameters = own["weights"] / 2
        active = active_parameters(shape, parameters)
        theirs = [f" ({value:g})" if told else "" for value in told or (0, 0)]
        rows.append([own["case"], billions(parameters) + theirs[0], billions(active) + theirs[1],
                     f"{own['flops'] / LARGE['seq_len'] / 1e9:,.0f}",
                     f"{sum(own[name] for name in STATES) / GIB:,.0f}"])
    return table(["", "parameters, 10⁹", "active, 10⁹", "GFLOP a token", "model states, GiB"],
                 rows, "By a dry run of 4,096 tokens, in bf16 with gradients in f32; in brackets the authors' numbers. "
                 "The embedding counts as active, although a token reads only one of its rows.")


def ep_table(found, of_small):
    """Mixtral's shape on 8 data-parallel ranks, by ep; of_small: a sentence below it."""
    tokens, rows = LARGE["seq_len"], []
    for own in found:
        expected = 2 * (other_parameters(MIXTRAL) + expert_parameters(MIXTRAL) / own["ep"])
        rows.append([str(own["ep"]), f"{own['weights'] / GIB:.2f} ({expected / GIB:.2f})",
                     f"{sum(own[name] for name in STATES) / GIB:,.1f}",
                     f"{own['flops'] / 1e12:.1f} ({step_flops(MIXTRAL, tokens, tokens) / 1e12:.1f})",
                     f"{expert_flops(MIXTRAL, tokens) / 1e12:.1f}", f"{own['sent'] / GIB:.2f}"])
    return table(["`ep`", "weights, GiB", "model states, GiB", "TFLOP of a step",
                  "TFLOP of the experts", "sent over `ep`, GiB"], rows,
                 f"Rank 0 of {EP[-1]} data-parallel ranks, Mixtral's shape in bf16, {tokens:,} tokens a rank, by a dry "
                 "run; in brackets by formula. Experts: `3 h h_ff E L / ep` parameters, `18 h h_ff T k L` "
                 f"operations. {of_small}")


def small_text(estimated, counted):
    """A small model whose runs are counted: formula, dry run, runs. A sentence."""
    tokens, held, ratios = SMALL_BATCH * SMALL["seq_len"], [], ([], [])
    flops = step_flops(SMALL, tokens, SMALL["seq_len"])
    for shapes, ran in zip(estimated, counted):
        parameters = other_parameters(SMALL) + expert_parameters(SMALL) // shapes["ep"]
        formulas = {"weights": 4 * parameters, "gradients": 4 * parameters,
                    "optimizer": 8 * parameters, "flops": flops}
        held.append(f"{16 * parameters:,}")
        for ratio, own in zip(ratios, (shapes, ran)):
            ratio += [own[name] / expected for name, expected in formulas.items()]
    of_shapes, of_runs = ("–".join(dict.fromkeys(f"{end:.4f}" for end in (min(own), max(own))))
                          for own in ratios)
    return (f"By formula a small model with `ep` {', '.join(str(ep) for ep in SMALL_EP)} has model states "
            f"of {', '.join(held)} bytes and does {flops:,.0f} operations; dry runs find {of_shapes} times "
            f"these numbers, and real runs {of_runs} times.")


def mesh_name(mesh):
    return " ".join(f"`{name.removesuffix('_size')}` {size}" for name, size in mesh.items())


def ranks_of(mesh):
    return mesh.get("dp_size", 1) * mesh.get("tp_size", 1) * mesh.get("pp_size", 1)


def meshes_table(found, with_stages):
    """What a rank of a large mesh needs: where there are stages, the least and the most."""
    columns, rows = (*STATES, "peak_activations", "peak_total"), []
    for own in found:
        ranks = next((other["stages"] for other in with_stages
                      if (other["model"], other["mesh"]) == (own["model"], own["mesh"])), [own])
        cells = []
        for name in columns:
            sizes = [rank[name] / GIB for rank in ranks]
            ends = dict.fromkeys(f"{size:,.1f}" for size in (min(sizes), max(sizes)))
            cells.append("–".join(ends))
        rows.append([own["model"], f"{ranks_of(own['mesh']):,}", mesh_name(own["mesh"]), *cells])
    return table(["", "ranks", "mesh", *STATES, "activations at their peak", "peak"], rows,
                 "GiB of a rank by a dry run: bf16, 4,096 tokens a micro-batch, ZeRO-1, every layer "
                 "recomputed, experts evenly loaded. With stages 1F1B, `m` = `p`: the least and the most of "
                 "all stages.")
