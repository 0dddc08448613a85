"""Flags here as Megatron-LM's: `./book run ch07 -- ... --as megatron` (bridge.py)."""
from itertools import groupby

from tools.run.bridge_rows import (NODE, Framework, Gap, Row, Rule, as_arguments, even_parts,
                                   leave_out, same, to_1f1b, torchrun, when)

SCHEDULES = ("1f1b", "interleaved", "llama3")
CP = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "ring_ulysses": "a2a+p2p"}
BALANCE = {"none": "none", "bias": "none", "sample": "seq_aux_loss", "batch": "global_aux_loss"}
# From the slowest axis to the fastest: usual, and with --use-tp-pp-dp-mapping.
ORDERS = (("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"))


def orders(layout):
    return [layout.only_long(order) == layout.order() for order in ORDERS]


def has_experts(layout):
    return layout.num_experts > 0


def is_latent(layout):
    return layout.attention_kind == "mla"


def parted_experts(layout):
    """The flag with the width of experts, routed or shared, that tp parts; "": none."""
    if not has_experts(layout) or not (layout.expert_tp or layout.num_shared_experts):
        return ""
    return "moe_ffn_hidden_size" if layout.moe_ffn_hidden_size else "ffn_hidden_size"


def parts_dense(layout):
    dense = not has_experts(layout) or layout.first_dense_layers > 0
    return dense or parted_experts(layout) == "ffn_hidden_size"


def of_experts(value):
    return lambda layout: when(has_experts(layout), value(layout))


def of_latents(flag):
    return lambda layout: when(is_latent(layout) and layout.flags[flag] > 0, layout.flags[flag])


def stages(layout):
    """--pipeline-model-parallel-layout: E the embedding, t a layer, L the head; None: even."""
    if layout.pp_size == 1 or layout.has_even_stages():
        return None
    parts = [f"t*{layers}" if layers > 1 else "t" * layers for layers in layout.layers]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def dense_layers(layout):
    """--moe-layer-freq: 0 for a layer without experts."""
    if not has_experts(layout) or layout.first_dense_layers == 0:
        return None
    marks = [int(layer >= layout.first_dense_layers) for layer in range(layout.num_layers)]
    return "+".join(f"[{mark}]*{len(list(run))}" for mark, run in groupby(marks))


def group_of_micro_batches(layout):
    """Micro-batches in a row on a chunk."""
    return layout.pp_run_length or layout.pp_size if layout.pp_schedule == "llama3" \
        else layout.pp_size


def leaves_a_rest(layout):
    """Their interleaved schedule takes no last group of fewer micro-batches than stages."""
    if layout.pp_size == 1 or layout.chunks == 1 or layout.pp_schedule not in SCHEDULES:
        return False
    group = group_of_micro_batches(layout)
    return not layout.pp_size <= group <= layout.grad_acc_steps or \
        0 < layout.grad_acc_steps % group < layout.pp_size


ROWS = (
    Row(("tp_size",), "--tensor-model-parallel-size", same("tp_size")),
    Row(("pp_size",), "--pipeline-model-parallel-size", same("pp_size")),
    Row(("cp_size",), "--context-parallel-size", same("cp_size")),
    Row(("ep_size",), "--expert-model-parallel-size", of_experts(same("ep_size"))),
    Row(("expert_tp",), "--expert-tensor-parallel-size",
        of_experts(lambda it: it.tp_size if it.expert_tp else 1),
        "left out, it is the tensor-parallel size; here experts are whole unless --expert_tp",
        lambda it: it.tp_size > 1 and not it.expert_tp),
    Row(("mesh_order",), "--use-tp-pp-dp-mapping", lambda it: when(orders(it) == [False, True])),
    Row(("sequence_parallel",), "--sequence-parallel",
        lambda it: when(it.sequence_parallel and it.tp_size > 1)),
    Row(("micro_batch_size",), "--micro-batch-size", same("micro_batch_size")),
    Row(("micro_batch_size", "grad_acc_steps", "dp_size"), "--global-batch-size",
        lambda it: it.global_batch_size,
        "samples of all ranks, from which the micro-batches of a step follow"),
    Row(("seq_len",), "--seq-length", same("seq_len")),
    Row(("zero_stage",), "--use-distributed-optimizer", lambda it: when(it.zero_stage >= 1)),
    Row(("zero_stage",), "--use-megatron-fsdp", lambda it: when(it.zero_stage >= 2)),
    Row(("zero_stage",), "--data-parallel-sharding-strategy",
        lambda it: {2: "optim_grads", 3: "optim_grads_params"}.get(it.zero_stage)),
    Row(("zero_stage",), "--ckpt-format", lambda it: when(it.zero_stage >= 2, "fsdp_dtensor")),
    Row(("shard_size",), "--num-distributed-optimizer-instances",
        lambda it: when(it.zero_stage and it.shard_ranks < it.dp_cp,
                        it.dp_cp // it.shard_ranks),
        "the number of copies, where shard_size is the ranks of each"),
    Row(("grad_sync",), "--overlap-grad-reduce",
        lambda it: when(it.dp_cp > 1 and it.grad_sync != "naive")),
    Row(("gather_overlap",), "--overlap-param-gather",
        lambda it: when(it.zero_stage and it.dp_cp > 1 and it.gather_overlap == "forward")),
    Row(("bucket_mb",), "--ddp-bucket-size",
        lambda it: when("bucket_mb" in it.given, int(it.bucket_mb * 2**18)),
        "elements, where bucket_mb is MiB of f32"),
    Row(("pp_layers",), "--pipeline-model-parallel-layout", stages,
        "a stage of each rank after the other, with the embedding (E) and the head (L)"),
    Row(("pp_chunks",), "--num-virtual-stages-per-pipeline-rank",
        lambda it: when(it.pp_size > 1 and it.chunks > 1 and stages(it) is None, it.chunks)),
    Row(("pp_schedule", "pp_run_length"), "--microbatch-group-size-per-virtual-pipeline-stage",
        lambda it: when(it.pp_size > 1 and it.chunks > 1 and it.pp_schedule == "llama3",
                        group_of_micro_batches(it))),
    Row(("cp_method",), "--cp-comm-type", lambda it: when(it.cp_size > 1, CP[it.cp_method])),
    Row(("ulysses_size",), "--hierarchical-context-parallel-sizes",
        lambda it: when(it.cp_size > 1 and it.cp_method == "ring_ulysses",
                        (it.ulysses_size, it.cp_size // it.ulysses_size)),
        "ranks that exchange heads, then places of a ring"),
    Row(("dispatch",), "--moe-token-dispatcher-type",
        of_experts(lambda it: "flex" if it.dispatch == "by_node" else "alltoall")),
    Row(("dispatch",), "--moe-flex-dispatcher-backend",
        of_experts(lambda it: when(it.dispatch == "by_node", "deepep")),
        "a library's own kernels, by NVLink and RDMA, where by_node exchanges twice"),
    Row(("overlap_dispatch",), "--overlap-moe-expert-parallel-comm",
        lambda it: when(it.overlap_dispatch)),
    Row(("recompute",), "--recompute-granularity",
        lambda it: when(it.recompute != "none", it.recompute)),
    Row(("recompute",), "--recompute-method", lambda it: when(it.recompute == "full", "uniform")),
    Row(("recompute",), "--recompute-num-layers", lambda it: when(it.recompute == "full", 1)),
    Row(("tp_overlap",), "--tp-comm-overlap",
        lambda it: when(it.tp_overlap == "chunks" and it.sequence_parallel and it.tp_size > 1)),
    Row(("dtype",), "--bf16", lambda it: when(it.dtype == "bf16")),
    Row(("grad_accumulation",), "--grad-reduce-in-bf16",
        lambda it: when(it.dtype == "bf16" and it.grad_accumulation == "bf16")),
    Row(("attention",), "--attention-backend",
        lambda it: when("attention" in it.given,
                        {"naive": "unfused", "blockwise": "flash"}[it.attention])),
    Row(("num_layers",), "--num-layers", same("num_layers")),
    Row(("hidden_size",), "--hidden-size", same("hidden_size")),
    Row(("ffn_hidden_size",), "--ffn-hidden-size", same("ffn_hidden_size")),
    Row(("num_heads",), "--num-attention-heads", same("num_heads")),
    Row(("num_kv_heads",), "--group-query-attention",
        lambda it: when(it.num_kv_heads < it.num_heads)),
    Row(("num_kv_heads",), "--num-query-groups",
        lambda it: when(it.num_kv_heads < it.num_heads, it.num_kv_heads)),
    Row(("head_dim",), "--kv-channels",
        lambda it: when(it.head_dim and not is_latent(it), it.head_dim)),
    Row(("attention_kind",), "--multi-latent-attention", lambda it: when(is_latent(it))),
    Row(("q_lora_rank",), "--q-lora-rank", of_latents("q_lora_rank")),
    Row(("kv_lora_rank",), "--kv-lora-rank", of_latents("kv_lora_rank")),
    Row(("qk_nope_head_dim",), "--qk-head-dim", of_latents("qk_nope_head_dim")),
    Row(("qk_rope_head_dim",), "--qk-pos-emb-head-dim", of_latents("qk_rope_head_dim")),
    Row(("v_head_dim",), "--v-head-dim", of_latents("v_head_dim")),
    Row(("num_experts",), "--num-experts", of_experts(same("num_experts"))),
    Row(("num_experts_per_tok",), "--moe-router-topk", of_experts(same("num_experts_per_tok"))),
    Row(("moe_ffn_hidden_size",), "--moe-ffn-hidden-size",
        of_experts(lambda it: it.expert_width)),
    Row(("num_shared_experts",), "--moe-shared-expert-intermediate-size",
        of_experts(lambda it: when(it.num_shared_experts,
                                   it.num_shared_experts * it.expert_width)),
        "the width of all of them together"),
    Row(("first_dense_layers",), "--moe-layer-freq", dense_layers),
    Row(("router_score",), "--moe-router-score-function", of_experts(same("router_score"))),
    Row(("norm_topk_prob",), "--moe-router-pre-softmax",
        of_experts(lambda it: when(it.router_score == "softmax" and not it.norm_topk_prob))),
    Row(("routed_scaling_factor",), "--moe-router-topk-scaling-factor",
        of_experts(lambda it: when(it.routed_scaling_factor != 1, it.routed_scaling_factor))),
    Row(("expert_nodes",), "--moe-router-num-groups",
        of_experts(lambda it: when(it.expert_nodes > 1, it.expert_nodes))),
    Row(("route_nodes",), "--moe-router-group-topk",
        of_experts(lambda it: when(it.expert_nodes > 1, it.route_nodes or it.expert_nodes))),
    Row(("balance",), "--moe-router-load-balancing-type",
        of_experts(lambda it: BALANCE[it.balance]),
        "global_aux_loss counts the choices of this step so far, balance=batch those of the step "
        "before", lambda it: it.balance == "batch"),
    Row(("balance_coef",), "--moe-aux-loss-coeff",
        of_experts(lambda it: when(it.balance in ("sample", "batch"), it.balance_coef))),
    Row(("balance",), "--moe-router-enable-expert-bias",
        of_experts(lambda it: when(it.balance == "bias"))),
    Row(("bias_update_rate",), "--moe-router-bias-update-rate",
        of_experts(lambda it: when(it.balance == "bias", it.bias_update_rate))),
    Row(("router_z_loss_coef",), "--moe-z-loss-coeff",
        of_experts(lambda it: when(it.router_z_loss_coef, it.router_z_loss_coef))),
    Row(("capacity_factor",), "--moe-expert-capacity-factor",
        of_experts(lambda it: when(it.capacity_factor, it.capacity_factor)),
        "of the tokens of a micro-batch on a rank, where capacity_factor is of a sample"),
    Row(("vocab_size",), "--vocab-size", same("vocab_size"),
        "padded to a multiple of tensor-parallel ranks, where parts here differ by a row",
        lambda it: it.vocab_size % it.tp_size != 0),
    Row(("vocab_size",), "--make-vocab-size-divisible-by", lambda it: 1),
    Row(("max_position_embeddings",), "--max-position-embeddings",
        lambda it: it.max_position_embeddings or it.seq_len),
    Row(("tie_word_embeddings",), "--untie-embeddings-and-output-weights",
        lambda it: when(not it.tie_word_embeddings)),
    Row((), "--swiglu", lambda it: True),
    Row((), "--disable-bias-linear", lambda it: True),
    Row((), "--normalization", lambda it: "RMSNorm"),
    Row(("rms_norm_eps",), "--norm-epsilon", same("rms_norm_eps")),
    Row((), "--position-embedding-type", lambda it: "rope"),
    Row(("rope_type",), "--rope-type",
        lambda it: when(is_latent(it) and it.rope_type == "default", "rope")),
    Row(("rope_theta",), "--rotary-base", lambda it: int(it.rope_theta)),
    Row(("rope_type",), "--use-rope-scaling",
        lambda it: when(not is_latent(it) and it.rope_type == "llama3")),
    Row(("rope_factor",), "--rope-scaling-factor",
        lambda it: when(not is_latent(it) and it.rope_type == "llama3", it.rope_factor)),
    Row((), "--attention-dropout", lambda it: 0),
    Row(("dropout",), "--hidden-dropout", same("dropout")),
)

RULES = (
    even_parts("ffn_hidden_size", "Megatron-LM",
               lambda it: it.ffn_hidden_size if parts_dense(it) else 0),
    even_parts("moe_ffn_hidden_size", "Megatron-LM",
               lambda it: it.moe_ffn_hidden_size if parted_experts(it) else 0),
    Rule("pp_schedule", lambda it: it.pp_size > 1 and it.pp_schedule not in SCHEDULES,
         f"Megatron-LM runs {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}",
         lambda it: to_1f1b(it, "overlap_dispatch")),
    Rule("overlap_dispatch",
         lambda it: it.overlap_dispatch and it.pp_size > 1 and it.chunks == 1,
         "Megatron-LM overlaps the dispatch of a pipeline only where a rank has several stages",
         lambda it: leave_out(it, "overlap_dispatch")),
    Rule("overlap_dispatch", lambda it: it.overlap_dispatch and it.recompute == "full",
         "Megatron-LM overlaps no dispatch under full recomputation",
         lambda it: leave_out(it, "overlap_dispatch")),
    Rule("overlap_dispatch", lambda it: it.overlap_dispatch and it.dtype != "bf16",
         "Megatron-LM overlaps the dispatch in bf16 alone", lambda it: ("--dtype bf16",)),
    Rule("grad_acc_steps", leaves_a_rest,
         "Megatron-LM's runs of micro-batches are of at least pp_size, the last one too",
         lambda it: (f"--grad_acc_steps {it.pp_size * -(-it.grad_acc_steps // it.pp_size)}",
                     *leave_out(it, "pp_run_length"))),
    Rule("cp_layout", lambda it: it.cp_size > 1 and it.cp_layout == "contiguous",
         "Megatron-LM gives each rank an early and a late piece of a sample",
         lambda it: ("--cp_layout zigzag",)),
    Rule("dtype", lambda it: it.dtype == "f64", "Megatron-LM computes in f32, f16 or bf16",
         lambda it: ("--dtype bf16",)),
    Rule("router_score",
         lambda it: has_experts(it) and it.balance == "bias" and it.router_score == "softmax",
         "Megatron-LM balances experts by a bias only where a sigmoid scores them",
         lambda it: ("--router_score sigmoid",)),
    Rule("rope_theta", lambda it: it.rope_theta != int(it.rope_theta),
         "Megatron-LM's rotary base is a whole number",
         lambda it: (f"--rope_theta {round(it.rope_theta)}",)),
    Rule("num_experts_per_tok",
         lambda it: has_experts(it) and it.num_experts_per_tok == 1 and
         it.router_score == "softmax" and it.norm_topk_prob,
         "Megatron-LM normalizes no single choice", lambda it: leave_out(it, "norm_topk_prob")),
)

GAPS = (
    Gap(("mesh_order",), "the ranks lie as in pp,dp,cp,tp; other groups are neighbors",
        lambda it: not any(orders(it))),
    Gap(("zero_stage",), "Megatron-FSDP's guide names tp, cp and ep beside it; a pipeline is not "
        "refused", lambda it: it.zero_stage >= 2 and it.pp_size > 1),
    NODE,
    Gap(("document_mask", "document_separator"), "how documents are kept apart is the data's part"),
    Gap(("norm_topk_prob",), "gates of a sigmoid are always divided by their sum",
        lambda it: has_experts(it) and it.router_score == "sigmoid" and not it.norm_topk_prob),
    Gap(("rope_type",), "rotary embeddings are not rescaled",
        lambda it: it.rope_type not in ("default", "llama3") or
        (is_latent(it) and it.rope_type != "default")),
    Gap(("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow",
         "rope_mscale", "rope_mscale_all_dim", "rope_original_max_position_embeddings",
         "latent_rms_norm_eps"), "no flag for it"),
    Gap(("tp_overlap",), "halves of a batch do not run in turns",
        lambda it: it.tp_size > 1 and it.tp_overlap == "batch_halves"),
    Gap(("grad_accumulation",), "gradients have one dtype",
        lambda it: it.grad_accumulation == "both"),
    Gap(("gathered_input",), "a gathered input is always gathered again",
        lambda it: it.gathered_input == "kept"),
    Gap(("reduce_after", "reshard_after", "cp_overlap", "cp_recompute", "pp_in_flight", "pp_times"),
        "no flag for it"),
)


def opening(layout):
    return [torchrun(layout, "pretrain_gpt.py") + " \\"]


MEGATRON = Framework("megatron", "Megatron-LM", ROWS, RULES, GAPS, opening, as_arguments)
