"""`./book export`: a run's newest checkpoint as a model directory that Hugging Face's tools read."""
import array
import json
import math
import os
import shutil
import sys
from pathlib import Path

from tools import chapters, runs
from tools.base import BookError, say, show_path
from tools.checkpoints import BYTES, Checkpoint, newest, write_header

# dtype: what the format calls it, what transformers calls it.
DTYPES = {"f32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "f64": ("F64", "float64")}
CHUNK = 1 << 20  # elements
INDEX = "model.safetensors.index.json"
# What belongs to an imported model and is handed on with it.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "tokenizer.model", "generation_config.json")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What Mixtral calls parts of our names; of its experts, that is: its MLPs have nothing else.
MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.",
           ".up_proj.": ".w3."}


def export_run(run_dir, output, dtype=None, max_shard_gb=5.0):
    """Writes config.json and the weights of RUN_DIR's newest checkpoint to `output`."""
    run = runs.read_run(run_dir)
    checkpoint = Checkpoint(newest(run_dir))
    refuse_unsayable(checkpoint.config)
    dtype = dtype or checkpoint.config["dtype"]
    output = Path(output)
    if (Path(run_dir) / "done").exists() and runs.done_text(run_dir).startswith("diverged"):
        say(f"book: this run has {runs.done_text(run_dir)}; its weights are those of the last "
            "update that was made")
    _create(output)
    shards = _split(weights_of(checkpoint.config), DTYPES[dtype][0], max_shard_gb * 1e9)
    names = _shard_names(len(shards))
    written = [*(name + ".tmp" for name in names), *names, INDEX, *COMPANIONS,
               "config.json"]
    try:
        for name, shard in zip(names, shards):
            _write_shard(output / (name + ".tmp"), checkpoint, shard, dtype)
        if len(shards) > 1:
            _write_index(output, names, shards, checkpoint.config, DTYPES[dtype][0])
        for name in names:
            os.replace(output / (name + ".tmp"), output / name)
        companions = _copy_companions(checkpoint.config["model"], output)
        # Last: without it the directory is no model.
        config = config_of(checkpoint.config, dtype, _byte_tokens(run), companions)
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except BaseException as error:  # also Ctrl-C: half a model would be in the way of the next try
        for name in written:
            (output / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BookError(f"writing to {show_path(output)} failed: {error.strerror}")
        raise
    _tell(output, checkpoint, names, dtype, config)
    return 0


def has_experts(config):
    """Whether a run with these flags has a mixture of experts."""
    return config.get("num_experts", 0) > 0


def refuse_unsayable(config):
    """BookError (2) where neither Llama's format nor Mixtral's says what the run computes."""
    if config.get("attention_kind", "gqa") != "gqa":
        raise BookError(f"attention_kind={config['attention_kind']} cannot be exported: the formats "
                        "of Llama and Mixtral say gqa alone", 2)
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
                        "which says such things, says attention_kind=mla too, which is not "
                        "exported; what can be exported was trained with --norm_topk_prob and "
                        "without these", 2)


def stored_name(config, name):
    """What the model's directory calls a parameter."""
    for here, there in MIXTRAL.items() if has_experts(config) else ():
        name = name.replace(here, there)
    return name


def weights_of(config):
    """{name: shape} of the run's model, in the order of its layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    width = head_dim(config)
    q, kv = config["num_heads"] * width, config["num_kv_heads"] * width
    weights = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_layers"]):
        weights.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in {
            "input_layernorm": (hidden,), "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "post_attention_layernorm": (hidden,),
            **_mlp_of(config)}.items()})
    weights["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = (vocab, hidden)
    return weights


def _mlp_of(config):
    """{name: shape} of a layer's MLP, or of its router and experts."""
    hidden, ffn = config["hidden_size"], mlp_width(config)
    if not has_experts(config):
        return {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn)}
    weights = {"mlp.gate": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        weights.update({f"mlp.experts.{expert}.gate_proj": (ffn, hidden),
                        f"mlp.experts.{expert}.up_proj": (ffn, hidden),
                        f"mlp.experts.{expert}.down_proj": (hidden, ffn)})
    return weights


def mlp_width(config):
    """Of the MLP, or of each expert."""
    return has_experts(config) and config["moe_ffn_hidden_size"] or config["ffn_hidden_size"]


def head_dim(config):
    """--head_dim, or what it means where it is 0."""
    return config["head_dim"] or config["hidden_size"] // config["num_heads"]


def config_of(config, dtype, byte_tokens, companions):
    """config.json of a run with these flags, in the spelling that old and new releases read."""
    rope = None
    if config["rope_type"] != "default":
        rope = {"rope_type": config["rope_type"], "factor": config["rope_factor"]}
    if config["rope_type"] == "llama3":
        rope.update({key: config[f"rope_{key}"] for key in (
            "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")})
    result = {
        **_family_of(config),
        "torch_dtype": DTYPES[dtype][1], "hidden_size": config["hidden_size"],
        "intermediate_size": mlp_width(config),
        "num_hidden_layers": config["num_layers"], "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"], "head_dim": head_dim(config),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"] or config["seq_len"],
        "rope_theta": config["rope_theta"], "rope_scaling": rope,
        "rms_norm_eps": config["rms_norm_eps"],
        "tie_word_embeddings": config["tie_word_embeddings"], "hidden_act": "silu",
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        # Without these, tokens 1 and 2 would begin and end what transformers generates.
        **{key: companions.get(key) for key in TOKEN_KEYS}}
    if byte_tokens:
        result["byte_tokens"] = True
    return result


def _family_of(config):
    """The keys by which the formats differ."""
    if not has_experts(config):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                "attention_bias": False, "mlp_bias": False}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": config["num_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"], "router_jitter_noise": 0.0,
            "output_router_logits": False, "sliding_window": None}


def _create(output):
    """Makes the directory; BookError (2) if there is something in it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise BookError(f"{show_path(output)} is not empty; name a new directory", 2)
    except OSError as error:
        raise BookError(f"cannot create {show_path(output)}: {error.strerror}", 2)


def _split(weights, kind, max_bytes):
    """[{name: shape}], each of at most max_bytes unless a single weight has more."""
    shards, filled = [{}], 0
    for name, shape in weights.items():
        size = math.prod(shape) * BYTES[kind]
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _shard_names(count):
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_shard(path, checkpoint, shard, dtype):
    kind = DTYPES[dtype][0]
    with open(path, "wb") as file:
        write_header(file, {stored_name(checkpoint.config, name): (kind, shape)
                            for name, shape in shard.items()}, {"format": "pt"})
        for name, shape in shard.items():
            # A master copy has the digits that the run's own dtype drops.
            for stored in checkpoint.weight(name, shape, wide=dtype != checkpoint.config["dtype"]):
                for data in stored.read(CHUNK):
                    file.write(convert(data, stored.type, kind))
        file.flush()
        os.fsync(file.fileno())


def convert(data, source, target):
    """Little-endian elements in another dtype; rounds to nearest, ties to even."""
    if source == target:
        return data
    if source == "BF16":  # the upper half of an F32
        words = _unpack("H", data)
        values = array.array("f", _pack(array.array("I", [word << 16 for word in words])))
    else:
        values = _unpack("d" if source == "F64" else "f", data)
    if target == "BF16":
        return _pack(array.array("H", map(_to_bf16, values, _words(values))))
    return _pack(array.array("d" if target == "F64" else "f", values))


def _words(values):
    """The bits of the values rounded to F32."""
    rounded = values if values.typecode == "f" else array.array("f", values)
    return array.array("I", rounded.tobytes())


def _to_bf16(value, word):
    """The upper half of an F32, rounded; `value` is what the F32 itself was rounded from."""
    if value != value:  # pylint: disable=comparison-with-itself
        return (word >> 16) | 0x40
    if word & 0xFFFF == 0x8000:  # a tie, unless rounding to F32 has made it one
        nearest = array.array("f", array.array("I", [word]).tobytes())[0]
        if abs(value) != abs(nearest):
            return (word >> 16) + (abs(value) > abs(nearest))
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


def _unpack(code, data):
    values = array.array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _pack(values):
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _write_index(output, names, shards, config, kind):
    total = sum(math.prod(shape) * BYTES[kind] for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total},
             "weight_map": {stored_name(config, weight): name
                            for name, shard in zip(names, shards) for weight in shard}}
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _byte_tokens(run):
    """Whether the run was trained on the bytes of a text."""
    return not str(run.get("data", {}).get("path", "")).endswith(".bin")


def _copy_companions(model, output):
    """Copies the tokenizer of an imported model; what its config.json says of special tokens."""
    source = Path(model)
    if not source.is_absolute() or not (source / "config.json").is_file():
        return {}  # a preset, or no longer there
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise BookError(f"{show_path(source / 'config.json')}: {error}")
    return {key: config.get(key) for key in TOKEN_KEYS}


def _program(config):
    """The first one that computes such a model."""
    header = "expert_parallel.h" if "num_local_experts" in config else "model.h"
    return next(chapter.short for chapter in chapters.find_chapters()
                if (chapter.folder / header).exists())


def _tell(output, checkpoint, names, dtype, config):
    """What was written, and how it is used."""
    files = names[0] if len(names) == 1 else f"{len(names)} files and their index"
    print(f"step {checkpoint.record['step']} as {dtype}: {show_path(output)}/config.json, {files}")
    if config.get("byte_tokens"):
        print("Its tokens are the bytes of a text: there is no tokenizer file.")
    elif not (output / "tokenizer.json").exists():
        say("book: no tokenizer is written, for the run had none; ids are as in its .bin file")
    data = "" if config.get("byte_tokens") or config["vocab_size"] == 256 else \
        f" --data FILE.bin --token_dtype {checkpoint.config['token_dtype']}"
    print(f"./book run {_program(config)} -- --model {show_path(output)}{data} --seq_len "
          f"{min(config['max_position_embeddings'], checkpoint.config['seq_len'])}")
