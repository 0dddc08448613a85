"""Flags here as nanotron's YAML: `./book run ch07 -- ... --as nanotron` (bridge.py)."""
from tools.run.bridge_rows import (NODE, Framework, Gap, Row, Rule, even_parts, leave_out, same,
                                   text_of, to_1f1b, torchrun, when)
from tools.run.bridge_torchtitan import OF_EXPERTS, OF_LATENTS

SCHEDULES = ("1f1b", "afab")
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f64": "float64"}
# With ranks of cp; its Llama has none, its Qwen2 without biases is the same model.
ATTENTION = {"ring": "ring", "all_gather": "llama3_ring_attention"}
ORDER = ("pp", "dp", "cp", "tp")


def bucket(layout):
    return max(1, int(layout.bucket_mb))


ROWS = (
    Row(("dp_size",), "parallelism.dp", same("dp_size")),
    Row(("pp_size",), "parallelism.pp", same("pp_size")),
    Row(("tp_size",), "parallelism.tp", same("tp_size")),
    Row(("cp_size",), "parallelism.context_parallel_size", same("cp_size")),
    Row(("ep_size",), "parallelism.expert_parallel_size", same("ep_size")),
    Row(("pp_schedule",), "parallelism.pp_engine",
        lambda it: it.pp_schedule if it.pp_size > 1 else "1f1b"),
    Row(("sequence_parallel",), "parallelism.tp_mode",
        lambda it: "REDUCE_SCATTER" if it.sequence_parallel else "ALL_REDUCE"),
    Row(("tp_overlap",), "parallelism.tp_linear_async_communication",
        lambda it: it.sequence_parallel and it.tp_overlap != "none"),
    Row(("gathered_input",), "parallelism.tp_recompute_allgather",
        lambda it: it.gathered_input == "again"),
    Row(("recompute",), "parallelism.recompute_layer", lambda it: it.recompute == "full"),
    Row(("micro_batch_size",), "tokens.micro_batch_size", same("micro_batch_size")),
    Row(("grad_acc_steps",), "tokens.batch_accumulation_per_replica", same("grad_acc_steps")),
    Row(("seq_len",), "tokens.sequence_length", same("seq_len")),
    Row(("steps",), "tokens.train_steps", same("steps")),
    Row(("zero_stage",), "optimizer.zero_stage", same("zero_stage")),
    Row(("grad_accumulation",), "optimizer.accumulate_grad_in_fp32",
        lambda it: it.dtype == "bf16" and it.grad_accumulation != "bf16"),
    Row(("dtype",), "model.dtype", lambda it: DTYPES[it.dtype]),
    Row(("bucket_mb",), "model.ddp_bucket_cap_mb", bucket, "a whole number of MiB",
        lambda it: it.bucket_mb != bucket(it)),
    Row(("vocab_size",), "model.make_vocab_size_divisible_by", lambda it: 1,
        "padded to a multiple of tensor-parallel ranks, where parts here differ by a row",
        lambda it: it.vocab_size % it.tp_size != 0),
    Row((), "model.model_config.is_llama_config", lambda it: when(it.cp_size == 1)),
    Row((), "model.model_config.is_qwen2_config", lambda it: when(it.cp_size > 1),
        "the one of its models with context parallelism; without biases it is a Llama"),
    Row(("cp_method",), "model.model_config._attn_implementation",
        lambda it: when(it.cp_size > 1, ATTENTION[it.cp_method])),
    Row(("hidden_size",), "model.model_config.hidden_size", same("hidden_size")),
    Row(("ffn_hidden_size",), "model.model_config.intermediate_size", same("ffn_hidden_size")),
    Row(("num_layers",), "model.model_config.num_hidden_layers", same("num_layers")),
    Row(("num_heads",), "model.model_config.num_attention_heads", same("num_heads")),
    Row(("num_kv_heads",), "model.model_config.num_key_value_heads", same("num_kv_heads")),
    Row(("vocab_size",), "model.model_config.vocab_size", same("vocab_size")),
    Row(("max_position_embeddings",), "model.model_config.max_position_embeddings",
        lambda it: it.max_position_embeddings or it.seq_len),
    Row(("rope_theta",), "model.model_config.rope_theta", lambda it: float(it.rope_theta)),
    Row(("rms_norm_eps",), "model.model_config.rms_norm_eps", same("rms_norm_eps")),
    Row(("tie_word_embeddings",), "model.model_config.tie_word_embeddings",
        same("tie_word_embeddings")),
)

RULES = (
    even_parts("ffn_hidden_size", "nanotron", lambda it: it.ffn_hidden_size),
    Rule("num_experts", lambda it: it.num_experts > 0,
         "nanotron's ranks exchange no tokens for experts"),
    Rule("attention_kind", lambda it: it.attention_kind == "mla",
         "nanotron has grouped-query attention alone"),
    Rule("head_dim", lambda it: it.head_dim not in (0, it.hidden_size / it.num_heads),
         "nanotron's heads are hidden_size / num_heads wide"),
    Rule("pp_schedule", lambda it: it.pp_size > 1 and
         (it.pp_schedule not in SCHEDULES or it.chunks > 1),
         "nanotron runs 1f1b or afab, with one stage a rank",
         to_1f1b),
    Rule("zero_stage", lambda it: it.zero_stage > 1, "nanotron shards optimizer states alone",
         lambda it: ("--zero_stage 1", *leave_out(it, "reduce_after", "reshard_after"))),
    Rule("shard_size", lambda it: it.shard_size not in (0, it.dp_cp),
         "nanotron shards over all ranks of dp", lambda it: leave_out(it, "shard_size")),
    Rule("cp_method", lambda it: it.cp_size > 1 and it.cp_method not in ATTENTION,
         "nanotron sends keys round a ring or gathers them",
         lambda it: ("--cp_method ring", *leave_out(it, "ulysses_size"))),
)

GAPS = (
    Gap(("pp_layers",), "nanotron divides the layers by what its blocks compute",
        lambda it: it.pp_size > 1),
    Gap(("cp_layout",), "with a ring each rank has one piece of a sample",
        lambda it: it.cp_size > 1 and it.cp_method == "ring" and it.cp_layout == "zigzag"),
    Gap(("cp_size",), "optimizer states are sharded over dp, and here over dp and cp",
        lambda it: it.cp_size > 1 and it.zero_stage == 1),
    Gap(("mesh_order",), "the ranks lie as in pp,dp,cp,tp; other groups are neighbors",
        lambda it: it.only_long(ORDER) != it.order()),
    NODE,
    Gap(("recompute",), "attention probabilities are never stored",
        lambda it: it.recompute == "selective"),
    Gap(("rope_type", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor",
         "rope_original_max_position_embeddings", "rope_beta_fast", "rope_beta_slow",
         "rope_mscale", "rope_mscale_all_dim"), "rotary embeddings are not rescaled"),
    Gap(("document_mask", "document_separator", "dropout", "attention", "grad_sync",
         "gather_overlap", "reduce_after", "reshard_after", "cp_overlap", "cp_recompute",
         "ulysses_size", "pp_chunks", "pp_run_length", "pp_in_flight", "pp_times",
         "overlap_dispatch", "expert_tp", *OF_EXPERTS, *OF_LATENTS), "no field for it"),
)


def opening(layout):
    return ["# " + torchrun(layout, "run_train.py --config-file THIS_FILE")]


def write(values):
    """Lines of YAML; a name's dots are levels."""
    tree = {}
    for name, value in values:
        *path, last = name.split(".")
        branch = tree
        for level in path:
            branch = branch.setdefault(level, {})
        branch[last] = value

    def lines(branch, indent):
        for key, value in branch.items():
            if isinstance(value, dict):
                yield f"{indent}{key}:"
                yield from lines(value, indent + "  ")
            else:
                yield f"{indent}{key}: {number(value)}"

    return list(lines(tree, ""))


def number(value):
    """YAML 1.1 reads 1e-05 as text."""
    text = text_of(value) if not isinstance(value, float) else repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if e and isinstance(value, float) and "." not in mantissa \
        else text


NANOTRON = Framework("nanotron", "nanotron", ROWS, RULES, GAPS, opening, write)
