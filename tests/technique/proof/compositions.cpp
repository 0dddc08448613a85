#include "proof/compositions.h"

#include <optional>

#include "base/rules.h"
#include "technique/layout_of_flags.h"
#include "testing.h"

/// The rules from the other side: what they refuse fails, hangs, or passes without a word.
namespace usp::test {
namespace {

/// Sizes of a model and a batch.
constexpr const char* kTwinSizes =
    "--hidden_size 24 --num_heads 6 --num_kv_heads 6 --ffn_hidden_size 12 --num_layers 2 "
    "--vocab_size 21 --seq_len 12 --micro_batch_size 2 --grad_acc_steps 2 --dtype f64 "
    "--device cpu ";

struct Refused {
  const char* rule;
  Otherwise otherwise;
  std::string flags;
};

/// The file of a schedule for two ranks and two micro-batches, which are those of 1F1B.
std::string file_of_two(const std::string& first_rank) {
  return keep_drawn("of_two_" + std::to_string(first_rank.size()) + ".txt",
                    "placement loop\n0: " + first_rank + "\n1: F0 BW0 F1 BW1\n");
}

const std::vector<Refused>& refused_flags() {
  using enum Otherwise;
  const std::string one_by_one = file_of_two("F0 F1 BW0 BW1"), turns = file_of_two("F0 F1&BW0 BW1");
  static const std::vector<Refused> all = {
      {"heads_of_width", silent, "--dp_size 2 --hidden_size 25"},
      {"kv_heads_of_heads", wrong, "--dp_size 2 --num_kv_heads 4"},
      {"pairs_of_head", wrong, "--dp_size 2 --head_dim 3"},
      {"pairs_of_channels", wrong, "--dp_size 2 --attention_kind mla --qk_rope_head_dim 3"},
      {"value_within_key", wrong,
       "--dp_size 2 --attention_kind mla --qk_nope_head_dim 2 --qk_rope_head_dim 2 --v_head_dim 6"},
      {"heads_of_latents", silent, "--dp_size 2 --attention_kind mla --num_kv_heads 3"},
      {"nodes_of_experts", wrong, "--dp_size 2 --num_experts 4 --expert_nodes 3 --route_nodes 2"},
      {"routes_to_nodes", wrong, "--dp_size 2 --num_experts 4 --expert_nodes 2 --route_nodes 3"},
      {"routes_to_choices", wrong,
       "--dp_size 2 --num_experts 4 --num_experts_per_tok 3 --expert_nodes 2 --route_nodes 1"},
      {"tp_of_heads", wrong, "--num_kv_heads 2 --tp_size 4"},
      {"tp_of_kv_heads", wrong, "--num_kv_heads 3 --tp_size 2"},
      {"tp_of_ffn", silent, "--ffn_hidden_size 2 --tp_size 3"},
      {"tp_of_vocabulary", silent, "--vocab_size 2 --tp_size 3"},
      {"tp_of_rows", wrong,
       "--hidden_size 32 --num_heads 8 --num_kv_heads 8 --micro_batch_size 1 --cp_size 2 --tp_size "
       "4 --sequence_parallel"},
      {"halves_of_micro_batch", wrong,
       "--micro_batch_size 3 --tp_size 2 --tp_overlap batch_halves"},
      {"halves_outside_schedules", wrong, "--pp_size 2 --tp_size 2 --tp_overlap batch_halves"},
      {"turns_of_halves", silent,
       "--tp_size 2 --sequence_parallel --num_experts 4 --tp_overlap batch_halves "
       "--overlap_dispatch"},
      {"flag_of_tp", silent, "--dp_size 2 --sequence_parallel"},
      {"cp_of_tokens", wrong, "--seq_len 10 --cp_size 2"},
      {"ulysses_in_cp", wrong, "--cp_size 3 --cp_method ring_ulysses --ulysses_size 2"},
      {"ulysses_of_heads", wrong, "--num_heads 3 --num_kv_heads 1 --cp_size 2 --cp_method ulysses"},
      {"ulysses_of_kv_heads", wrong, "--num_kv_heads 3 --cp_size 2 --cp_method ulysses"},
      {"keep_of_full_recompute", silent, "--cp_size 2 --cp_recompute keep"},
      {"keep_of_blockwise", wrong,
       "--cp_size 2 --recompute full --attention naive --cp_recompute keep"},
      {"flag_of_cp", silent, "--dp_size 2 --cp_layout contiguous"},
      {"shards_in_dp", wrong, "--dp_size 4 --zero_stage 1 --shard_size 3"},
      {"shards_in_edp", wrong,
       "--dp_size 4 --zero_stage 1 --shard_size 4 --num_experts 4 --ep_size 2"},
      {"stage_of_flag", silent, "--dp_size 2 --zero_stage 1 --reshard_after step"},
      {"grad_accumulation_of_bf16", silent, "--dp_size 2 --grad_accumulation both"},
      {"ep_of_experts", wrong, "--dp_size 2 --num_experts 3 --ep_size 2"},
      {"experts_on_all_ranks", wrong, "--dp_size 2 --num_experts 3 --ep_size 3"},
      {"tokens_on_one_rank", wrong, "--tp_size 2 --num_experts 4"},
      {"tp_of_experts", silent,
       "--tp_size 2 --sequence_parallel --num_experts 4 --moe_ffn_hidden_size 1 --expert_tp"},
      {"experts_without_dropout", silent, "--dp_size 2 --num_experts 4 --dropout 0.1"},
      {"nodes_to_dispatch", silent, "--dp_size 4 --num_experts 4 --ep_size 4 --dispatch by_node"},
      {"nodes_of_equal_experts", wrong,
       "--dp_size 6 --num_experts 3 --ep_size 3 --dispatch by_node --node_size 2"},
      {"nodes_of_equal_size", silent, "--dp_size 4 --node_size 3"},
      {"flag_of_ep", silent, "--dp_size 2 --num_experts 4 --dispatch by_node --node_size 2"},
      {"flag_of_experts", silent, "--dp_size 2 --balance sample"},
      {"layers_in_list", wrong, "--pp_size 2 --pp_layers 1,2"},
      {"ranks_of_file", wrong, "--dp_size 2 --pp_schedule " + one_by_one},
      {"micro_batches_of_file", wrong,
       "--grad_acc_steps 3 --pp_size 2 --pp_schedule " + one_by_one},
      {"turns_of_file", wrong,
       "--num_layers 6 --dp_size 2 --pp_size 2 --zero_stage 3 --num_experts 4 --ep_size 2 "
       "--pp_schedule " +
           turns},
      {"even_dualpipe", wrong,
       "--num_layers 6 --pp_size 3 --pp_schedule dualpipe --grad_acc_steps 6"},
      {"full_dualpipe_v", hangs,
       "--num_layers 4 --pp_size 2 --pp_schedule dualpipe_v --grad_acc_steps 2"},
      {"chunks_of_schedule", wrong, "--num_layers 4 --pp_size 2 --pp_schedule 1f1b --pp_chunks 2"},
      {"schedule_of_flag", silent, "--pp_size 2 --pp_in_flight 3"},
      {"flag_of_latents", silent, "--dp_size 2 --kv_lora_rank 4"},
      {"copies_within_steps", silent, "--dp_size 2 --check_copies 30 --steps 20"},
      {"copies_to_compare", silent, "--dp_size 2 --zero_stage 1 --check_copies 1"},
      {"one_question", silent, "--dp_size 2 --prove 4 --estimate"},
      {"rows_of_fused_loss", silent, "--dp_size 2 --loss_rows 5"},
      {"search_has_a_cluster", silent, "--dp_size 2 --nodes 2"},
      {"search_has_a_batch", silent, "--dp_size 2 --cluster h100"},
      {"table_is_no_search", silent, "--dp_size 2 --cluster h100 --plan_rows a --require mfu>=1"},
      {"one_question", silent, "--dp_size 2 --cluster h100 --plan_rows a --plan_runs b"},
      {"why_or_what_if", silent,
       "--dp_size 2 --cluster h100 --plan 1024 --why 1;2 --what_if net=+1%"},
  };
  return all;
}

TrainConfig read_twin_config(const std::string& flags) {
  TrainConfig config;
  Args args("");
  read_without_advice(config, args, words_of_flags(flags), /*ranks=*/0);
  return config;
}

/// The refusal of these flags; nothing where they are accepted.
std::optional<Refusal> refusal_of(const std::string& flags) {
  try {
    read_twin_config(flags);
    return {};
  } catch (const Refusal& refusal) {
    return refusal;
  }
}

/// Whether the chapter has all of them.
bool has_flags(const std::string& flags) {
  TrainConfig config;
  Args args("");
  config.bind(args);
  return std::ranges::all_of(words_of_flags(flags), [&](const std::string& word) {
    return !word.starts_with("--") || !args.group_of(word.substr(2)).empty();
  });
}

/// How a run of these flags fails beside one process; "" where it does not.
std::string failure_of(const std::string& flags) {
  try {
    return run_twin({read_twin_config(flags), flags, {}}).failure;
  } catch (const Refusal& other) {
    FAIL_CHECK("also " << other.rule() << ": nothing is known of this one");
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST_CASE("what a rule refuses would be wrong, hang or say nothing, as the refusal is marked",
          "[not_sanitized]") {
  for (const Refused& refused : refused_flags()) {
    if (!has_flags(refused.flags)) continue;  // of a later chapter
    const std::string flags = with_flags(refused.flags, kTwinSizes);
    INFO(refused.rule << ": " << flags);
    const std::optional<Refusal> refusal = refusal_of(flags);
    CHECK((refusal ? refusal->rule() : "accepted") == refused.rule);
    if (!refusal || refusal->rule() != refused.rule) continue;
    CHECK(refusal->otherwise() == refused.otherwise);
    const LiftedRule lifted(refused.rule);
    const std::string failure = failure_of(flags);
    INFO(failure);
    CHECK((failure == "") == (refused.otherwise == Otherwise::silent));
    CHECK((failure.find("deadlock") != std::string::npos) ==
          (refused.otherwise == Otherwise::hangs));
  }
}

}  // namespace
}  // namespace usp::test
