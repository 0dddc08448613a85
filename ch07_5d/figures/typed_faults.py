"""What ./book types says of the seeded faults that it is about.

    python3 -m ch07_5d.figures.typed_faults           plants those that typed_faults.json does not have yet
    python3 -m ch07_5d.figures.typed_faults NAME ...  plants these anew

It builds the program once for each of them.
"""
import re
import subprocess
import sys
from pathlib import Path

from tools import chapters, machine
from tools.base import say
from tools.book.short_runs import table
from tools.book.showcase import origin, read_json, write_json
from tools.exercise import planted
from tools.process import git_commit

FOLDER = Path(__file__).resolve().parent
MODEL = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 48, "vocab_size": 40, "num_layers": 4,
         "seq_len": 16, "micro_batch_size": 2, "grad_acc_steps": 4}
RING, GATHERED = "--cp_size 4", "--cp_size 4 --cp_method all_gather"
BUCKETS = "--dp_size 2 --grad_sync bucketed --bucket_mb 0.02"
HALVES = "--dp_size 2 --tp_size 2 --tp_overlap batch_halves"
CHUNKS = "--tp_size 2 --sequence_parallel --tp_overlap chunks"
SHARDED, HYBRID = "--dp_size 4 --zero_stage", "--dp_size 4 --zero_stage 2 --shard_size 2"
TIED_ENDS = "--pp_size 2 --dp_size 2 --zero_stage 1 --tie_word_embeddings"
EXPERTS = "--dp_size 4 --num_experts 8 --ep_size 4"
ROWS_OF_EXPERTS = "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 8 --ep_size 4"
EXPERTS_OVER_TP = ("--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 4 --ep_size 2 --expert_tp "
                   "--balance sample")
MLA = ("--attention_kind mla --q_lora_rank 6 --kv_lora_rank 8 --qk_nope_head_dim 4 --qk_rope_head_dim 4 "
       "--v_head_dim 4")

# {a fault: the layout in which a training step meets it}. All of tests/faults, by their `What`, in which a message is
# left out, doubled, over the wrong group or read before it has arrived; in which a gradient, or a number that ranks
# sum, loses a term, or has one twice; or in which weights are out of date. A training step of this chapter's trainer
# meets them. Of faults that change the same lines one is here, and none that was seeded for the types themselves.
FAULTS = {
    "accumulate_overwrites": "--dp_size 2",
    "block_before_its_own_unseen": RING + " --document_mask",
    "chunk_rest_dropped": CHUNKS + " --seq_len 12",
    "context_block_skipped": RING,
    "context_gradient_of_first_step_kept": RING,
    "context_gradient_over_dp_only": "--dp_size 2 --cp_size 2",
    "context_gradients_a_step_off": GATHERED,
    "context_kv_copies_not_summed": "--cp_size 4 --cp_method ulysses --num_kv_heads 2",
    "context_last_gradients_not_awaited": RING,
    "context_ring_gradients_a_step_off": RING,
    "deferred_overwrites": "--pp_size 2 --pp_schedule zb_h1",
    "dp_bucket_launched_early": BUCKETS,
    "dp_every_micro_batch_synced": "--dp_size 2",
    "dp_last_micro_batch_not_synced": "--dp_size 2",
    "dp_parameter_in_no_bucket": BUCKETS,
    "expert_balance_of_micro_batches": EXPERTS + " --balance batch",
    "expert_counts_exchanged_again": EXPERTS + " --recompute full",
    "expert_counts_of_one_copy": "--pp_size 2 --pp_schedule dualpipe --num_experts 8 --balance bias",
    "expert_gates_without_gradient": EXPERTS_OVER_TP,
    "expert_gradient_over_dp_cp": EXPERTS,
    "expert_load_counted_twice": EXPERTS + " --balance bias --recompute full",
    "expert_load_of_own_rows": "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 4 --balance bias",
    "expert_loss_of_every_tp_rank": EXPERTS_OVER_TP,
    "expert_norm_of_first_rank": EXPERTS,
    "expert_shared_gradient_dropped": EXPERTS + " --num_shared_experts 1",
    "fused_clip_before_it_is_written": "--dp_size 2",
    "latent_norms_counted_by_all": "--tp_size 2 " + MLA,
    "latent_ring_gradient_of_another_place": RING + " " + MLA,
    "latent_ring_shared_key_stays": RING + " " + MLA,
    "latent_ring_weight_of_last_micro_batch": RING + " " + MLA,
    "latent_ring_weight_of_own_block": RING + " " + MLA,
    "latent_shared_key_of_own_heads": "--tp_size 2 " + MLA,
    "latent_shared_key_without_a_head": RING + " " + MLA,
    "pipeline_copies_twice_in_norm": "--pp_size 2 --tie_word_embeddings",
    "pipeline_last_weight_gradient_dropped": "--pp_size 2 --pp_schedule zb_h1",
    "pipeline_mirrored_norms_apart": "--pp_size 2 --pp_schedule dualpipe",
    "pipeline_norm_of_a_stage": "--pp_size 2 --dp_size 2",
    "pipeline_tied_gradient_of_one_end": "--pp_size 2 --tie_word_embeddings",
    "recompute_counts_loss_twice": "--dp_size 2 --recompute full",
    "rounds_accumulate": SHARDED + " 2",
    "tensor_chunk_before_it_arrived": CHUNKS,
    "tensor_embedding_gradient_twice": "--tp_size 2",
    "tensor_f_without_all_reduce": "--tp_size 2",
    "tensor_halves_free_alone": HALVES + " --zero_stage 3",
    "tensor_halves_reduced_apart": HALVES + " --zero_stage 2",
    "tensor_kv_copies_drift": "--tp_size 4 --num_kv_heads 2",
    "tensor_loss_of_every_rank": "--tp_size 2",
    "tensor_norm_gradient_of_own_rows": "--tp_size 2 --sequence_parallel",
    "tensor_recomputation_completes_what_nobody_reads": "--tp_size 2 --recompute full",
    "tensor_router_of_own_rows": ROWS_OF_EXPERTS,
    "tensor_single_kv_head_not_summed": "--tp_size 2 --num_kv_heads 1",
    "tied_weight_counted_once": "--dp_size 2 --tie_word_embeddings",
    "uncounted_in_norm": "--tp_size 2",
    "zero_copies_differ": HYBRID,
    "zero_copies_in_norm": HYBRID,
    "zero_expert_gradients_by_edp": "--dp_size 4 --zero_stage 1 --num_experts 8 --ep_size 2",
    "zero_first_chunk_alone": "--pp_size 2 --pp_schedule interleaved --pp_chunks 2 --dp_size 2 --zero_stage 3",
    "zero_freed_before_backward": SHARDED + " 3",
    "zero_gather_not_awaited": SHARDED + " 3",
    "zero_gathers_before_the_update": "--dp_size 4 --zero_stage 1 --gather_overlap optimizer",
    "zero_kv_copies_not_summed": "--dp_size 2 --tp_size 2 --num_kv_heads 1 --zero_stage 1",
    "zero_last_micro_batch_only": SHARDED + " 2",
    "zero_norm_of_a_shard": SHARDED + " 1",
    "zero_stale_weights": SHARDED + " 1",
    "zero_tied_ends_apart": TIED_ENDS,
    "zero_tied_weight_among_others": TIED_ENDS,
    "zero_tied_weight_twice": SHARDED + " 1 --tie_word_embeddings",
    "zero_unit_of_two_groups": "--dp_size 4 --zero_stage 1 --num_experts 8 --ep_size 2",
    "zero_unit_of_uneven_parts": "--dp_size 2 --tp_size 2 --sequence_parallel --zero_stage 1 --vocab_size 41",
}
# {a fault that the types do not name: why}
REASONS = {
    "block_before_its_own_unseen": "which pairs of queries and keys count is not typed, and keys may go by unread",
    "context_block_skipped": "which pairs of queries and keys count is not typed, and keys may go by unread",
    "context_gradients_a_step_off": "the kind is right, the place another rank's: types do not know *which* rows",
    "context_kv_copies_not_summed": "the sum is made by hand over parts of one message, which have one type",
    "expert_counts_exchanged_again": "an exchange too many, after which all values are right",
    "expert_load_counted_twice": "a term that enters twice on its own rank is a term of a sum still",
    "expert_shared_gradient_dropped": "a gradient of an activation is let go of; only those of weights and from a ring "
                                      "have to be read",
    "latent_ring_shared_key_stays": "the same: it is computed, and nothing reads it",
    "latent_ring_weight_of_last_micro_batch": "a gradient is filled with zeros, which is how a buffer may begin",
    "latent_shared_key_without_a_head": "a local sum lacks a term: no rank is involved",
    "recompute_counts_loss_twice": "a term that enters twice on its own rank is a term of a sum still",
    "tensor_embedding_gradient_twice": "a local `add` of a tensor to itself: the value is wrong, and the type right",
    "zero_expert_gradients_by_edp": "it comes to a factor, and a scale has no type",
    "zero_tied_weight_among_others": "the shards of two stages begin at other elements: types do not know *which* rows",
    "zero_unit_of_uneven_parts": "the shards of two ranks begin at other elements: types do not know *which* rows",
}

REFUSED, TYPES, UNDER_WAY, LOST, SILENT = "refused", "types", "under way", "lost gradients", "not named"
NAMED = (TYPES, UNDER_WAY, LOST)
CLASSES = {TYPES: "types that do not fit", UNDER_WAY: "*under way*: read before its wait, or written while it is sent",
           LOST: "*lost gradients*: written over or left unread", REFUSED: "refused by any dry run",
           SILENT: "not named"}


def words_of(layout):
    """Flags of the layout on a small model; what the layout says itself goes first."""
    own = layout.split()
    return [*own, *(word for name, value in MODEL.items() if f"--{name}" not in own
                    and not (name == "num_kv_heads" and "mla" in own) for word in (f"--{name}", str(value)))]


def said(program, words):
    """(exit code, what the program prints)."""
    done = subprocess.run([str(program), *words], env=machine.thread_environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def judge(program, layout):
    """{"class": one of CLASSES, "says": the error, where there is one}."""
    words = words_of(layout)
    code, text = said(program, [*words, "--estimate"])
    if code != 0:
        return {"class": REFUSED, "says": text.strip().splitlines()[-1]}
    code, text = said(program, [*words, "--mesh_show", "types"])
    if code == 0:
        return {"class": SILENT, "says": ""}
    found = re.search(r"^NOT TYPED\n  (.+)$", text, re.M)
    if not found:  # another rank than the one that --estimate plays
        return {"class": REFUSED, "says": text.strip().splitlines()[-1]}
    return {"class": class_of(found[1]), "says": found[1]}


def class_of(error):
    if re.search(r"a wait is missing|under way", error):
        return UNDER_WAY
    return LOST if re.search(r"nothing has read", error) else TYPES


def measure(names=(), path=FOLDER / "typed_faults.json"):
    """Each of these faults, or of those that are not in the record."""
    chapter = chapters.resolve("ch07")
    before = read_json(path)["faults"] if path.exists() else {}
    record = {**origin(chapter, git_commit()), "command": "python3 -m ch07_5d.figures.typed_faults",
              "faults": {name: own for name, own in before.items() if name in FAULTS}}
    copy = planted.Copy(chapter)
    with copy.program() as program:
        for layout in sorted(set(FAULTS.values())):
            found = judge(program, layout)
            if found["class"] != SILENT:
                raise SystemExit(f"{layout}: without a fault, too: {found}")
    for name, layout in FAULTS.items():
        if name in names or (not names and name not in before):
            say(f"book: planting {name}")
            with copy.program(name) as program:
                record["faults"][name] = {"layout": layout, **judge(program, layout)}
            say(f"  {record['faults'][name]['class']}: {record['faults'][name]['says']}")
            write_json(path, record)


def named_in(record, of):
    return [name for name, own in sorted(record["faults"].items()) if own["class"] == of]


def texts(record):
    chapter = chapters.resolve("ch07")
    counts = [[what, str(len(named_in(record, of))), ", ".join(f"`{name}`" for name in named_in(record, of))]
              for of, what in CLASSES.items()]
    silent = [[f"`{name}`", planted.fault_in(name, chapter).what, REASONS[name]] for name in named_in(record, SILENT)]
    made = f"`{record['command']}` plants them, and writes [typed_faults.json](figures/typed_faults.json).\n"
    return {"typed_faults.md": table(["what the checker says", "faults", "which"], counts),
            "typed_faults_silent.md": table(["fault", "what is wrong", "why no type says so"], silent),
            "typed_faults_provenance.md": made}


if __name__ == "__main__":
    measure(sys.argv[1:])
