"""What model directories of Hugging Face's say of a run: their names, shapes and config.json.

A run with the flag attention_kind=mla is a DeepSeek-V3, one with experts a Mixtral, and another a
Llama.
"""
import json

from tools.base import BookError

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What DeepSeek-V3 in transformers adds to the mean square of latents; config.json does not say it.
LATENT_EPS = 1e-6
BIAS = "mlp.gate.e_score_correction_bias"  # of a layer of DeepSeek-V3's
# What Mixtral calls parts of our names; of its experts, that is: its MLPs have nothing else.
MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.",
           ".up_proj.": ".w3."}


def has_experts(config):
    """Whether a run with these flags has a mixture of experts."""
    return config.get("num_experts", 0) > 0


def has_latents(config):
    """Whether its attention makes keys and values of latents."""
    return config.get("attention_kind", "gqa") == "mla"


def experts_at(config, layer):
    """Whether this layer has experts."""
    return has_experts(config) and layer >= config["first_dense_layers"]


def refuse_unsayable(config):
    """BookError (2) where the format in question does not say what the run computes."""
    if has_latents(config):
        _refuse_unsayable_latents(config)
        return
    if not has_experts(config):
        return
    said = {"router_score": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1,
            "num_shared_experts": 0, "first_dense_layers": 0}
    unsaid = [f"{key}={json.dumps(config[key])}" for key, value in said.items()
              if config[key] != value]
    if config["route_nodes"] not in (0, config["expert_nodes"]):
        unsaid.append(f"route_nodes={config['route_nodes']}")
    if config["balance"] == "bias":
        unsaid.append("balance=bias")
    if unsaid:
        raise BookError(f"Mixtral's format does not say {', '.join(unsaid)}, and DeepSeek-V3's, "
                        "which says such things, says attention_kind=mla too; what can be exported "
                        "was trained with --norm_topk_prob and without these, or with "
                        "--attention_kind mla --router_score sigmoid", 2)


def _refuse_unsayable_latents(config):
    """The same where DeepSeek-V3's format is the one."""
    epsilon = config.get("latent_rms_norm_eps") or config["rms_norm_eps"]
    if epsilon != LATENT_EPS:
        raise BookError(f"DeepSeek-V3's format means {LATENT_EPS:g} in the norms of latents, and "
                        f"this run adds {epsilon:g}; what can be exported was trained with "
                        f"--latent_rms_norm_eps {LATENT_EPS:g}", 2)
    if not experts_at(config, config["num_layers"] - 1):
        return
    if config["router_score"] != "sigmoid":
        raise BookError(f"DeepSeek-V3's format does not say router_score={config['router_score']}; "
                        "what can be exported was trained with --router_score sigmoid", 2)
    groups, allowed = _groups_of(config)
    counted = -(-config["num_experts_per_tok"] // allowed)
    if groups > 1 and counted != 2:
        raise BookError(f"DeepSeek-V3's format ranks groups by their best 2 experts, and "
                        f"num_experts_per_tok={config['num_experts_per_tok']} over "
                        f"route_nodes={allowed} by {counted}; what can be exported was trained "
                        f"with --num_experts_per_tok {2 * allowed}, or without --route_nodes", 2)
    if config["num_experts"] == 1:
        raise BookError("DeepSeek-V3's format takes no single expert: transformers adds up the "
                        "best 2 of a group; what can be exported was trained with --num_experts 2",
                        2)


def _groups_of(config):
    """(groups of experts in a row, groups in which a token may choose)"""
    if config["route_nodes"] in (0, config["expert_nodes"]):
        return 1, 1
    return config["expert_nodes"], config["route_nodes"]


def stored_name(config, name):
    """What the model's directory calls a parameter."""
    for here, there in MIXTRAL.items() if has_experts(config) and not has_latents(config) else ():
        name = name.replace(here, there)
    return name


def weights_of(config):
    """{name: shape} of the run's model, in the order of its layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_layers"]):
        weights.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in {
            "input_layernorm": (hidden,), **_attention_of(config),
            "post_attention_layernorm": (hidden,), **_mlp_of(config, layer)}.items()})
        if has_latents(config) and experts_at(config, layer):
            weights[f"model.layers.{layer}.{BIAS}"] = (config["num_experts"],)
    weights["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = (vocab, hidden)
    return weights


def _attention_of(config):
    """{name: shape} of a layer's attention."""
    hidden, heads = config["hidden_size"], config["num_heads"]
    if not has_latents(config):
        q, kv = heads * head_dim(config), config["num_kv_heads"] * head_dim(config)
        return {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q)}
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    latent, q_latent = config["kv_lora_rank"], config["q_lora_rank"]
    queries = {"self_attn.q_proj": (heads * (nope + rope), hidden)}
    if q_latent:
        queries = {"self_attn.q_a_proj": (q_latent, hidden),
                   "self_attn.q_a_layernorm": (q_latent,),
                   "self_attn.q_b_proj": (heads * (nope + rope), q_latent)}
    return {**queries, "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (heads * (nope + value), latent),
            "self_attn.o_proj": (hidden, heads * value)}


def _mlp_of(config, layer):
    """{name: shape} of a layer's MLP, or of its router and experts."""
    hidden = config["hidden_size"]

    def wide(name, width):
        return {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden),
                f"{name}.down_proj": (hidden, width)}

    if not experts_at(config, layer):
        return wide("mlp", config["ffn_hidden_size"])
    weights, width = {"mlp.gate": (config["num_experts"], hidden)}, expert_width(config)
    for expert in range(config["num_experts"]):
        weights.update(wide(f"mlp.experts.{expert}", width))
    if has_latents(config):  # without shared experts tensors of no rows, as transformers has them
        weights.update(wide("mlp.shared_experts", config["num_shared_experts"] * width))
    return weights


def expert_width(config):
    """Of each expert."""
    return config["moe_ffn_hidden_size"] or config["ffn_hidden_size"]


def head_dim(config):
    """--head_dim, or what it means where it is 0."""
    return config["head_dim"] or config["hidden_size"] // config["num_heads"]


def row_runs(config, name, rows):
    """[(first row, rows)] of ours, in the order in which a directory of DeepSeek-V3 has them: the
    channels that RoPE turns as pairs are neighbors there, where ours lie half of them apart. None:
    in our order."""
    if not has_latents(config):
        return None
    rope = config["qk_rope_head_dim"]
    if name.endswith(".kv_a_proj_with_mqa.weight"):
        unrotated = config["kv_lora_rank"]
    elif name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        unrotated = config["qk_nope_head_dim"]
    else:
        return None
    runs = []
    for head in range(0, rows, unrotated + rope):
        runs.append((head, unrotated))
        runs += [(head + unrotated + channel % 2 * (rope // 2) + channel // 2, 1)
                 for channel in range(rope)]
    return runs


def rope_of(config):
    """config.json's rope_scaling; None for RoPE as it is."""
    kind = config["rope_type"]
    if kind == "default":
        return None
    own = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"),
           "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}[kind]
    rope = {"rope_type": kind, "factor": config["rope_factor"]}
    rope.update({key: config[f"rope_{key}"] for key in own
                 if not (key.startswith("mscale") and config[f"rope_{key}"] == 0)})
    if kind != "linear":
        key = "original_max_position_embeddings"
        rope[key] = config[f"rope_{key}"]
    return rope


def config_of(config, torch_dtype, byte_tokens, source):
    """config.json of a run with these flags, in the spelling that old and new releases read;
    `source`: that of the model it began with."""
    result = {
        **_family_of(config, source),
        "torch_dtype": torch_dtype, "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_layers"], "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"], "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"] or config["seq_len"],
        "rope_theta": config["rope_theta"], "rope_scaling": rope_of(config),
        "rms_norm_eps": config["rms_norm_eps"],
        "tie_word_embeddings": config["tie_word_embeddings"], "hidden_act": "silu",
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        # Without these, tokens 1 and 2 would begin and end what transformers generates.
        **{key: source.get(key) for key in TOKEN_KEYS}}
    if byte_tokens:
        result["byte_tokens"] = True
    return result


def _family_of(config, source):
    """The keys by which the formats differ."""
    if has_latents(config):
        return _deepseek_of(config, source)
    if not has_experts(config):
        dense = {"head_dim": head_dim(config), "intermediate_size": config["ffn_hidden_size"]}
        if source.get("model_type") == "mistral":  # it came without a window that has an effect
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                    "sliding_window": None, **dense}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                "attention_bias": False, "mlp_bias": False, **dense}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": config["num_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"], "router_jitter_noise": 0.0,
            "output_router_logits": False, "sliding_window": None, "head_dim": head_dim(config),
            "intermediate_size": expert_width(config)}


def _deepseek_of(config, source):
    """The keys of DeepSeek-V3's format; one whose MLPs are all dense has no experts to speak of."""
    result = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
              "attention_bias": False, "intermediate_size": config["ffn_hidden_size"],
              "q_lora_rank": config["q_lora_rank"] or None,
              **{key: config[key] for key in ("kv_lora_rank", "qk_nope_head_dim",
                                              "qk_rope_head_dim", "v_head_dim")},
              "head_dim": config["qk_rope_head_dim"], "rope_interleave": interleaves(source),
              "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
              "num_nextn_predict_layers": 0, "first_k_dense_replace": config["num_layers"],
              "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 0,
              "moe_intermediate_size": config["ffn_hidden_size"], "n_group": 1, "topk_group": 1}
    if has_experts(config):
        groups, allowed = _groups_of(config)
        result.update(
            first_k_dense_replace=config["first_dense_layers"],
            n_routed_experts=config["num_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            n_shared_experts=config["num_shared_experts"],
            moe_intermediate_size=expert_width(config), n_group=groups, topk_group=allowed,
            norm_topk_prob=config["norm_topk_prob"],
            routed_scaling_factor=config["routed_scaling_factor"])
    return result


def interleaves(source):
    """Whether pairs of rotated channels are neighbors: unless the model it began with says no."""
    return source.get("rope_interleave", True) is True
