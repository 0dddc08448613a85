"""Flags here as torchtitan's: `./book run ch07 -- ... --as torchtitan` (bridge.py)."""
from tools.run.bridge_rows import (NODE, Framework, Gap, Row, Rule, as_arguments, leave_out, same,
                                   to_1f1b, torchrun, when)

# Of one stage a rank, and of several.
SINGLE = {"afab": "GPipe", "1f1b": "1F1B"}
MULTI = {"interleaved": "Interleaved1F1B", "breadth_first": "LoopedBFS", "zb_v": "ZBVZeroBubble",
         "dualpipe_v": "DualPipeV"}
SHAPE = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size",
         "tie_word_embeddings")
# Configurations that the repository has.
CONFIGS = {(4096, 32, 32, 8, 14336, 128256, False): "llama3_8b",
           (8192, 80, 64, 8, 28672, 128256, False): "llama3_70b",
           (16384, 126, 128, 8, 53248, 128256, False): "llama3_405b"}
ORDER = ("pp", "dp", "cp", "tp")
OF_EXPERTS = ("num_experts_per_tok", "moe_ffn_hidden_size", "num_shared_experts",
              "first_dense_layers", "router_score", "norm_topk_prob", "routed_scaling_factor",
              "expert_nodes", "route_nodes", "dispatch", "balance", "balance_coef",
              "router_z_loss_coef", "bias_update_rate", "capacity_factor")
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
              "latent_rms_norm_eps")
OF_MODEL = (*SHAPE, "head_dim", "attention_kind", "num_experts")


def config(layout):
    """The name of the configuration of this shape, or None."""
    if layout.num_experts or layout.attention_kind == "mla" or layout.head_dim:
        return None
    return CONFIGS.get(tuple(layout.flags[flag] for flag in SHAPE))


def shards(layout):
    """data_parallel_shard_degree: cp has its part of the ranks that shard."""
    return layout.shard_ranks // layout.cp_size if layout.zero_stage >= 2 else 1


def copies(layout):
    return layout.dp_size // shards(layout)


def split(stages, layers, first, last):
    """The layers of each stage where the ends count as so many layers; None: it cannot be."""
    each, more = divmod(layers + first + last, stages)
    if each == 0 or max(first, last) > each:
        return None
    found = [each + (stage < more) for stage in range(stages)]
    found[0] -= first
    found[-1] -= last
    return found


def ends(layout):
    """(layers less in the first stage, in the last) that divide the layers so; None: none do."""
    if layout.pp_size == 1:
        return None
    stages, most = len(layout.layers), max(layout.layers)
    for total in range(2 * most + 1):
        for first in range(total // 2, -1, -1):
            for pair in ((first, total - first), (total - first, first)):
                if split(stages, layout.num_layers, *pair) == layout.layers:
                    return pair
    return None


def of_ends(value):
    return lambda layout: None if ends(layout) is None else value(layout, *ends(layout))


def layers_per_stage(layout, first, last):
    return -(-(layout.num_layers + first + last) // len(layout.layers))


def of_pipeline(value):
    return lambda layout: when(layout.pp_size > 1, value(layout))


def samples_at_once(layout):
    """Of a rank: with a pipeline all micro-batches of the step."""
    return layout.micro_batch_size * (layout.grad_acc_steps if layout.pp_size > 1 else 1)


def runs(layout):
    """Whether it has the schedule, with as many stages."""
    if layout.pp_size == 1:
        return True
    return layout.pp_schedule in (SINGLE if layout.chunks == 1 else MULTI)


def divides_experts(layout):
    """Whether ranks that shard a copy are enough for the experts."""
    return shards(layout) * layout.cp_size * layout.tp_size % layout.ep_size == 0


ROWS = (
    Row(OF_MODEL, "--module", lambda it: when(config(it), "llama3")),
    Row(OF_MODEL, "--config", config),
    Row(("dp_size", "zero_stage", "shard_size"), "--parallelism.data_parallel_replicate_degree",
        copies),
    Row(("dp_size", "zero_stage", "shard_size"), "--parallelism.data_parallel_shard_degree",
        shards, "dp_size is both degrees' product",
        lambda it: copies(it) > 1 and shards(it) > 1),
    Row(("zero_stage", "reshard_after"), "--parallelism.fsdp_reshard_after_forward",
        lambda it: when(it.zero_stage >= 2, "always" if it.zero_stage == 3 and
                        it.reshard_after == "block" else "never"),
        "with `never` weights are whole from forward to backward, and sharded between steps",
        lambda it: it.zero_stage == 2),
    Row(("tp_size",), "--parallelism.tensor_parallel_degree", same("tp_size")),
    Row(("sequence_parallel",), "--parallelism.enable_sequence_parallel",
        lambda it: when(it.tp_size > 1 and it.sequence_parallel)),
    Row(("sequence_parallel",), "--parallelism.no-enable_sequence_parallel",
        lambda it: when(it.tp_size > 1 and not it.sequence_parallel)),
    Row(("pp_size",), "--parallelism.pipeline_parallel_degree", same("pp_size")),
    Row(("pp_schedule",), "--parallelism.pipeline_parallel_schedule",
        of_pipeline(lambda it: {**SINGLE, **MULTI}[it.pp_schedule]),
        "the micro-batches' order may differ, as PyTorch makes the schedule"),
    Row(("pp_layers",), "--parallelism.pipeline_parallel_first_stage_less_layers",
        of_ends(lambda it, first, last: first)),
    Row(("pp_layers",), "--parallelism.pipeline_parallel_last_stage_less_layers",
        of_ends(lambda it, first, last: last)),
    Row(("pp_layers", "pp_chunks"), "--parallelism.pipeline_parallel_layers_per_stage",
        of_ends(layers_per_stage), "the ends count as the layers that they have less"),
    Row(("micro_batch_size",), "--parallelism.pipeline_parallel_microbatch_size",
        of_pipeline(same("micro_batch_size"))),
    Row(("cp_size", "cp_method"), "--parallelism.context_parallel_degree", same("cp_size")),
    Row(("cp_layout",), "--parallelism.context_parallel_load_balancer",
        lambda it: when(it.cp_size > 1, "headtail" if it.cp_layout == "zigzag" else "None")),
    Row(("ep_size", "expert_tp"), "--parallelism.expert_parallel_degree",
        lambda it: when(it.num_experts, it.ep_size)),
    Row(("micro_batch_size", "grad_acc_steps"), "--training.local_batch_size", samples_at_once,
        "a pipeline's micro-batches are parts of it", lambda it: it.pp_size > 1),
    Row(("micro_batch_size", "grad_acc_steps", "dp_size"), "--training.global_batch_size",
        lambda it: it.global_batch_size),
    Row(("seq_len",), "--training.seq_len", same("seq_len")),
    Row(("dtype",), "--training.mixed_precision_param",
        lambda it: "bfloat16" if it.dtype == "bf16" else "float32",
        "weights stay f32 and are cast where they are gathered", lambda it: it.dtype == "bf16"),
    Row((), "--training.disable_cuda_graphs", lambda it: when(it.pp_size > 1 or it.ep_size > 1)),
    Row(("recompute",), "activation_checkpoint:none", lambda it: when(it.recompute == "none")),
    Row(("recompute",), "activation_checkpoint:selective",
        lambda it: when(it.recompute == "selective"),
        "every second product is computed again, where selective drops attention probabilities"),
    Row(("recompute",), "activation_checkpoint:full", lambda it: when(it.recompute == "full")),
)

RULES = (
    Rule("pp_schedule", lambda it: not runs(it),
         "torchtitan runs afab or 1f1b with one stage a rank, and interleaved, breadth_first, zb_v "
         "or dualpipe_v with several", to_1f1b),
    Rule("zero_stage", lambda it: it.zero_stage == 1,
         "torchtitan shards gradients wherever it shards optimizer states",
         lambda it: ("--zero_stage 2",)),
    Rule("shard_size", lambda it: it.zero_stage >= 2 and it.shard_ranks % it.cp_size != 0,
         "torchtitan shards over all ranks of cp", lambda it: leave_out(it, "shard_size")),
    Rule("cp_method", lambda it: it.cp_size > 1 and it.cp_method != "all_gather",
         "torchtitan gathers keys and values",
         lambda it: ("--cp_method all_gather", *leave_out(it, "ulysses_size"))),
    Rule("expert_tp", lambda it: it.expert_tp, "torchtitan's experts are whole",
         lambda it: leave_out(it, "expert_tp")),
    Rule("ep_size", lambda it: not divides_experts(it),
         "torchtitan's ep_size divides the ranks that shard a copy, times tp_size",
         lambda it: (*["--zero_stage 2"] * (it.zero_stage < 2),
                     *leave_out(it, "shard_size"))),
    Rule("dtype", lambda it: it.dtype == "f64", "torchtitan computes in f32 or bf16",
         lambda it: ("--dtype bf16",)),
)

GAPS = (
    Gap(OF_MODEL, "no flag has the model's shape; it is a function of the module's "
        "config_registry.py, to be named with --module and --config",
        lambda it: config(it) is None),
    Gap(("model",), "llama3_405b also converts linear layers to Float8, which the function decides",
        lambda it: config(it) == "llama3_405b"),
    Gap(("rope_theta", "rope_type"), "the configuration has theta 500000 and Llama 3.1's scaling",
        lambda it: config(it) is not None and
        (it.rope_theta != 500000 or it.rope_type != "llama3")),
    Gap(("rope_theta", "rope_type"), "a part of the model's configuration",
        lambda it: config(it) is None),
    Gap(("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast",
         "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim",
         "rope_original_max_position_embeddings", "rms_norm_eps", "max_position_embeddings",
         "dropout", "document_mask", "document_separator", "attention", *OF_EXPERTS, *OF_LATENTS),
        "a part of the model's configuration"),
    Gap(("pp_layers",), "no flag divides the layers so; module_fqns_per_model_part of a "
        "configuration does", lambda it: it.pp_size > 1 and ends(it) is None),
    Gap(("mesh_order",), "the ranks lie as in pp,dp,cp,tp; other groups are neighbors",
        lambda it: it.only_long(ORDER) != it.order()),
    NODE,
    Gap(("cp_size",), "weights are sharded over cp, too, where ZeRO shards none",
        lambda it: it.cp_size > 1 and it.zero_stage == 0),
    Gap(("reshard_after",), "weights are freed after each block or after backward",
        lambda it: it.zero_stage == 3 and it.reshard_after != "block"),
    Gap(("grad_accumulation",), "gradients are summed in f32",
        lambda it: it.dtype == "bf16" and it.grad_accumulation != "f32"),
    Gap(("overlap_dispatch", "ulysses_size", "pp_run_length", "pp_in_flight", "pp_times",
         "grad_sync", "bucket_mb", "gather_overlap", "reduce_after", "gathered_input",
         "tp_overlap", "cp_overlap", "cp_recompute"), "no flag for it"),
)


def opening(layout):
    return [torchrun(layout, "-m torchtitan.train") + " \\"]


TORCHTITAN = Framework("torchtitan", "torchtitan", ROWS, RULES, GAPS, opening, as_arguments)
