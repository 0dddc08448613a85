#include "proof/classes.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/json_reader.h"
#include "proof/compositions.h"
#include "technique/case_cover.h"
#include "technique/layout_of_flags.h"
#include "testing.h"

namespace usp::test::of_classes {
namespace {

/// What a class is called without what it is one of: a unit of ZeRO, or two of the lengths.
std::string row_of(const std::string& name) {
  if (name.ends_with(" differ")) return "lengths differ";
  if (!name.starts_with("ZeRO, ")) return name;
  const size_t colon = name.find(": ");
  return colon == std::string::npos ? "ZeRO" : "ZeRO" + name.substr(colon);
}

std::set<std::string> rows_of(const std::vector<RemainderClass>& classes) {
  std::set<std::string> rows;
  for (const RemainderClass& of : classes) rows.insert(row_of(of.name));
  return rows;
}

/// A class, a layout that has it, and one that is as near as can be and has lost it. What both have
/// besides often leads to code that few other rows run: a mistake there shows in this row alone.
struct Row {
  std::string name, real, lost;
};

/// Everywhere, unless a row says otherwise.
const std::string kSizes =
    "--hidden_size 24 --num_heads 4 --num_kv_heads 4 --ffn_hidden_size 28 --vocab_size 36 "
    "--num_layers 2 --seq_len 16 --micro_batch_size 1 --grad_acc_steps 2 ";

Twin twin_of(const std::string& own) {
  const std::string flags = with_flags(own, kSizes) + " --dtype f64 --device cpu";
  Twin twin{layout_of_flags(flags), flags, {}};
  twin.classes = classes(twin.config);
  return twin;
}

const std::vector<Row> kOfMesh = {
    {"dp: used", "--dp_size 2", "--dp_size 1"},
    {"dp: a rank that is neither first nor last", "--dp_size 3", "--dp_size 2"},
    {"cp: used", "--cp_size 2", "--cp_size 1"},
    {"cp: a rank that is neither first nor last", "--cp_size 3 --cp_method all_gather --seq_len 12",
     "--cp_size 2 --cp_method all_gather --seq_len 12"},
    {"tp: used", "--tp_size 2", "--tp_size 1"},
    {"tp: a rank that is neither first nor last", "--tp_size 4", "--tp_size 2"},
    {"pp: used", "--pp_size 2", "--pp_size 1"},
    {"pp: a rank that is neither first nor last", "--pp_size 3 --num_layers 6",
     "--pp_size 2 --num_layers 6"},
    {"ulysses in cp",
     "--cp_size 4 --cp_method ring_ulysses --ulysses_size 2 --num_heads 2 --num_kv_heads 2 "
     "--seq_len 16",
     "--cp_size 2 --cp_method ulysses --num_heads 2 --num_kv_heads 2 --seq_len 16"},
    {"ring of ulysses groups",
     "--cp_size 6 --cp_method ring_ulysses --ulysses_size 2 --cp_layout contiguous --num_heads 2 "
     "--num_kv_heads 2 --seq_len 24",
     "--cp_size 4 --cp_method ring_ulysses --ulysses_size 2 --cp_layout contiguous --num_heads 2 "
     "--num_kv_heads 2 --seq_len 24"},
    {"ulysses ranks", "--cp_size 3 --cp_method ulysses --num_heads 3 --num_kv_heads 3 --seq_len 12",
     "--cp_size 2 --cp_method ulysses --num_heads 2 --num_kv_heads 2 --seq_len 12"},
    {"heads of a rank over ulysses", "--cp_size 2 --cp_method ulysses --num_kv_heads 1",
     "--cp_size 2 --cp_method ulysses --num_kv_heads 1 --num_heads 2"},
    {"kv heads of a rank over ulysses",
     "--cp_size 2 --cp_method ulysses --num_heads 2 --num_kv_heads 1",
     "--cp_size 2 --cp_method ulysses --num_heads 2 --num_kv_heads 2"},
    {"ulysses ranks with one kv head",
     "--cp_size 4 --cp_method ulysses --cp_layout contiguous --num_kv_heads 2 --seq_len 16",
     "--cp_size 4 --cp_method ulysses --cp_layout contiguous --num_kv_heads 1 --seq_len 16"},
    {"ep: used", "--dp_size 2 --num_experts 4 --ep_size 2", "--dp_size 2 --num_experts 4"},
    {"ep: a rank that is neither first nor last",
     "--dp_size 4 --num_experts 4 --ep_size 4 --num_experts_per_tok 1",
     "--dp_size 4 --num_experts 2 --ep_size 2 --num_experts_per_tok 1"},
    {"edp = ranks with the same experts", "--dp_size 4 --num_experts 2 --ep_size 2",
     "--dp_size 2 --num_experts 2 --ep_size 2"},
    {"ep lies along",
     "--dp_size 2 --cp_size 2 --num_experts 2 --ep_size 2 --mesh_order pp,cp,dp,tp",
     "--dp_size 2 --cp_size 2 --num_experts 2 --ep_size 2"},
    {"edp lies along", "--dp_size 2 --cp_size 2 --num_experts 2 --ep_size 2",
     "--dp_size 4 --num_experts 2 --ep_size 2"},
    {"ranks of ep in a node",
     "--dp_size 4 --num_experts 4 --ep_size 4 --num_experts_per_tok 1 --dispatch by_node "
     "--node_size 2",
     "--dp_size 2 --num_experts 2 --ep_size 2 --num_experts_per_tok 1 --dispatch by_node "
     "--node_size 2"},
    {"ranks of ep in a node, size",
     "--dp_size 4 --num_experts 4 --ep_size 4 --dispatch by_node --node_size 2",
     "--dp_size 4 --num_experts 4 --ep_size 4 --dispatch by_node --node_size 1"},
    {"nodes of ep",
     "--dp_size 6 --num_experts 6 --ep_size 6 --num_experts_per_tok 1 --dispatch by_node "
     "--node_size 2",
     "--dp_size 4 --num_experts 4 --ep_size 4 --num_experts_per_tok 1 --dispatch by_node "
     "--node_size 2"},
    {"a node spans", "--dp_size 2 --tp_size 2 --node_size 2 --mesh_order pp,tp,cp,dp",
     "--dp_size 2 --tp_size 2 --node_size 2"},
    {"nodes", "--dp_size 6 --node_size 2", "--dp_size 4 --node_size 2"},
};

const std::vector<Row> kOfZero = {
    {"shard of ZeRO lies along",
     "--dp_size 2 --cp_size 2 --zero_stage 1 --shard_size 2 --mesh_order pp,cp,dp,tp",
     "--dp_size 2 --cp_size 2 --zero_stage 1 --shard_size 2"},
    {"replicas of shards lie along", "--dp_size 2 --cp_size 2 --zero_stage 2 --shard_size 2",
     "--dp_size 4 --zero_stage 2 --shard_size 2"},
    {"ZeRO ranks that shard a copy", "--dp_size 3 --zero_stage 1 --vocab_size 33",
     "--dp_size 2 --zero_stage 1 --vocab_size 33"},
    {"buckets of gradients", "--dp_size 2 --bucket_mb 0.01", "--dp_size 2"},
    {"ZeRO", "--dp_size 3 --zero_stage 1 --hidden_size 16",
     "--dp_size 3 --zero_stage 1 --hidden_size 24"},
    {"ZeRO: a rank with padding alone",
     "--dp_size 4 --zero_stage 3 --tie_word_embeddings --num_heads 1 --num_kv_heads 1 "
     "--hidden_size 2",
     "--dp_size 4 --zero_stage 3 --tie_word_embeddings --num_heads 1 --num_kv_heads 1 "
     "--hidden_size 10"},
    {"ZeRO: a part ends within a parameter",
     "--dp_size 2 --zero_stage 1 --tie_word_embeddings --num_heads 2 --num_kv_heads 2 "
     "--ffn_hidden_size 8 --hidden_size 4",
     "--dp_size 2 --zero_stage 1 --tie_word_embeddings --num_heads 2 --num_kv_heads 2 "
     "--ffn_hidden_size 8 --hidden_size 12"},
    {"ZeRO: several parameters in a part",
     "--dp_size 3 --zero_stage 1 --num_experts 4 --num_experts_per_tok 1",
     "--dp_size 3 --zero_stage 1 --num_experts 1 --num_experts_per_tok 1"},
    {"ZeRO: a parameter over three ranks", "--dp_size 3 --zero_stage 2",
     "--dp_size 2 --zero_stage 2"},
};

const std::vector<Row> kOfWidths = {
    {"kv heads over tp", "--dp_size 2 --tp_size 2 --num_heads 2 --num_kv_heads 1",
     "--dp_size 2 --tp_size 2 --num_heads 2 --num_kv_heads 2"},
    {"tp ranks with one kv head", "--tp_size 4 --num_kv_heads 2", "--tp_size 4 --num_kv_heads 1"},
    {"heads of a rank", "--tp_size 2 --num_kv_heads 1",
     "--tp_size 2 --num_kv_heads 1 --num_heads 2"},
    {"queries of a kv head", "--cp_size 2 --num_kv_heads 2", "--cp_size 2 --num_kv_heads 4"},
    {"kv heads", "--cp_size 2 --cp_method all_gather --num_kv_heads 2",
     "--cp_size 2 --cp_method all_gather --num_kv_heads 1"},
    {"vocabulary over tp", "--dp_size 2 --tp_size 2 --vocab_size 37", "--dp_size 2 --tp_size 2"},
    {"vocabulary over tp: the rest moves where a part begins",
     "--tp_size 3 --vocab_size 35 --num_heads 6 --num_kv_heads 6 --ffn_hidden_size 27",
     "--tp_size 3 --vocab_size 34 --num_heads 6 --num_kv_heads 6 --ffn_hidden_size 27"},
    {"heads together are as wide as the model", "--cp_size 2 --head_dim 4",
     "--cp_size 2 --head_dim 6"},
    {"MLP width over tp", "--tp_size 2 --ffn_hidden_size 27", "--tp_size 2"},
    {"expert width over tp",
     "--tp_size 2 --sequence_parallel --num_experts 4 --expert_tp --moe_ffn_hidden_size 7",
     "--tp_size 2 --sequence_parallel --num_experts 4 --expert_tp --moe_ffn_hidden_size 8"},
    {"rows of a piece of a sample", "--cp_size 2 --document_mask",
     "--cp_size 2 --document_mask --seq_len 4"},
    {"rows of a rank's share of a sample over tp",
     "--tp_size 2 --sequence_parallel --tp_overlap chunks",
     "--tp_size 2 --sequence_parallel --tp_overlap chunks --seq_len 2"},
    {"samples of a micro-batch",
     "--cp_size 2 --cp_method all_gather --num_kv_heads 1 --micro_batch_size 2",
     "--cp_size 2 --cp_method all_gather --num_kv_heads 1 --micro_batch_size 1"},
    {"a rank's rows over tp: end within a sample",
     "--tp_size 2 --sequence_parallel --dropout 0.2 --micro_batch_size 3",
     "--tp_size 2 --sequence_parallel --dropout 0.2 --micro_batch_size 4"},
    {"rows of a rank over 4 chunks", "--tp_size 2 --tp_overlap chunks --seq_len 18",
     "--tp_size 2 --tp_overlap chunks"},
    {"a tp rank's rows over pieces: end within one",
     "--tp_size 2 --cp_size 2 --sequence_parallel --num_experts 4 --balance sample "
     "--micro_batch_size 3 --cp_layout contiguous",
     "--tp_size 2 --cp_size 2 --sequence_parallel --num_experts 4 --balance sample "
     "--micro_batch_size 3"},
    {"lengths differ",
     "--attention_kind mla --kv_lora_rank 8 --qk_rope_head_dim 2 --qk_nope_head_dim 2 "
     "--v_head_dim 4",
     "--attention_kind mla --kv_lora_rank 8 --qk_rope_head_dim 2 --qk_nope_head_dim 4 "
     "--v_head_dim 6"},
};

const std::vector<Row> kOfPipeline = {
    {"micro-batches", "--dp_size 2 --zero_stage 2 --grad_acc_steps 3",
     "--dp_size 2 --zero_stage 2 --grad_acc_steps 2"},
    {"layers", "--tp_size 2 --recompute full --num_layers 2",
     "--tp_size 2 --recompute full --num_layers 1"},
    {"dense layers",
     "--tp_size 2 --sequence_parallel --num_experts 4 --balance sample --first_dense_layers 1",
     "--tp_size 2 --sequence_parallel --num_experts 4 --balance sample"},
    {"chunks of a rank", "--pp_size 2 --pp_schedule llama3 --pp_chunks 3 --num_layers 12",
     "--pp_size 2 --pp_schedule llama3 --pp_chunks 2 --num_layers 12"},
    {"micro-batches and stages", "--pp_size 3 --num_layers 3 --grad_acc_steps 1",
     "--pp_size 3 --num_layers 3 --grad_acc_steps 4"},
    {"micro-batches over runs",
     "--pp_size 4 --pp_schedule llama3 --pp_chunks 2 --num_layers 8 --pp_run_length 3 "
     "--grad_acc_steps 5",
     "--pp_size 4 --pp_schedule llama3 --pp_chunks 2 --num_layers 8 --pp_run_length 3 "
     "--grad_acc_steps 6"},
    {"a run and stages",
     "--pp_size 3 --pp_schedule llama3 --pp_chunks 2 --num_layers 6 --pp_run_length 1 "
     "--grad_acc_steps 6",
     "--pp_size 3 --pp_schedule llama3 --pp_chunks 2 --num_layers 6 --pp_run_length 3 "
     "--grad_acc_steps 6"},
    {"micro-batches and twice the stages",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 2 --grad_acc_steps 6",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 2 --grad_acc_steps 4"},
    {"pairs of mirrored stages",
     "--pp_size 4 --pp_schedule dualpipe --num_layers 4 --grad_acc_steps 8",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 2 --grad_acc_steps 4"},
    {"ranks between the tied ends", "--pp_size 3 --num_layers 3 --tie_word_embeddings",
     "--pp_size 2 --num_layers 2 --tie_word_embeddings"},
    {"in flight and stages",
     "--pp_size 3 --pp_schedule auto --pp_in_flight 2 --num_layers 3 --grad_acc_steps 4",
     "--pp_size 3 --pp_schedule auto --pp_in_flight 4 --num_layers 3 --grad_acc_steps 4"},
    {"layers over stages", "--pp_size 2 --num_layers 5", "--pp_size 2 --num_layers 4"},
    {"stages of more and of fewer layers",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 4 --pp_layers 1,3 --grad_acc_steps 4 "
     "--num_experts 4 --balance bias",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 4 --pp_layers 2,2 --grad_acc_steps 4 "
     "--num_experts 4 --balance bias"},
    {"a stage without a layer", "--pp_size 2 --num_layers 3 --pp_layers 0,3",
     "--pp_size 2 --num_layers 3 --pp_layers 1,2"},
    {"a stage with one layer",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 4 --grad_acc_steps 4 --num_experts 4 "
     "--balance bias",
     "--pp_size 2 --pp_schedule dualpipe --num_layers 2 --grad_acc_steps 4 --num_experts 4 "
     "--balance bias"},
    {"first stage", "--pp_size 3 --num_layers 5 --pp_layers 1,2,2",
     "--pp_size 3 --num_layers 6 --pp_layers 2,2,2"},
    {"last stage", "--pp_size 3 --num_layers 5 --pp_layers 2,2,1",
     "--pp_size 3 --num_layers 6 --pp_layers 2,2,2"},
    {"dense layers end",
     "--tp_size 2 --sequence_parallel --pp_size 2 --num_layers 4 --num_experts 4 "
     "--first_dense_layers 1",
     "--tp_size 2 --sequence_parallel --pp_size 2 --num_layers 4 --num_experts 4 "
     "--first_dense_layers 2"},
    {"dense layers lie in", "--pp_size 2 --num_layers 6 --num_experts 4 --first_dense_layers 4",
     "--pp_size 2 --num_layers 6 --num_experts 4 --first_dense_layers 2"},
};

const std::vector<Row> kOfExperts = {
    {"experts over ep", "--dp_size 2 --num_experts 4 --ep_size 2 --num_experts_per_tok 1",
     "--dp_size 2 --num_experts 2 --ep_size 2 --num_experts_per_tok 1"},
    {"experts of a token",
     "--dp_size 4 --num_experts 8 --ep_size 4 --num_experts_per_tok 2 --dispatch by_node "
     "--node_size 2",
     "--dp_size 4 --num_experts 8 --ep_size 4 --num_experts_per_tok 1 --dispatch by_node "
     "--node_size 2"},
    {"experts of a token and ranks of ep",
     "--dp_size 2 --num_experts 6 --ep_size 2 --num_experts_per_tok 3 --dispatch by_node "
     "--node_size 1",
     "--dp_size 2 --num_experts 6 --ep_size 2 --num_experts_per_tok 2 --dispatch by_node "
     "--node_size 1"},
    {"shared experts", "--tp_size 2 --sequence_parallel --num_experts 4 --num_shared_experts 1",
     "--tp_size 2 --sequence_parallel --num_experts 4"},
    {"experts can refuse tokens",
     "--cp_size 2 --num_experts 4 --num_experts_per_tok 1 --capacity_factor 1",
     "--cp_size 2 --num_experts 4 --num_experts_per_tok 1 --capacity_factor 4"},
    {"experts over groups of routing",
     "--tp_size 2 --sequence_parallel --num_experts 4 --num_experts_per_tok 1 --expert_nodes 2 "
     "--route_nodes 1",
     "--tp_size 2 --sequence_parallel --num_experts 2 --num_experts_per_tok 1 --expert_nodes 2 "
     "--route_nodes 1"},
    {"groups of a token",
     "--tp_size 2 --sequence_parallel --num_experts 6 --num_experts_per_tok 1 --expert_nodes 3 "
     "--route_nodes 2",
     "--tp_size 2 --sequence_parallel --num_experts 6 --num_experts_per_tok 1 --expert_nodes 3 "
     "--route_nodes 3"},
    {"experts of a token over its groups",
     "--tp_size 2 --sequence_parallel --num_experts 6 --num_experts_per_tok 3 --expert_nodes 3 "
     "--route_nodes 2",
     "--tp_size 2 --sequence_parallel --num_experts 6 --num_experts_per_tok 2 --expert_nodes 3 "
     "--route_nodes 2"},
    {"groups of routing and nodes",
     "--dp_size 4 --num_experts 8 --ep_size 4 --dispatch by_node --node_size 2 --expert_nodes 4 "
     "--route_nodes 4",
     "--dp_size 4 --num_experts 8 --ep_size 4 --dispatch by_node --node_size 2 --expert_nodes 2 "
     "--route_nodes 2"},
};

const std::vector<const std::vector<Row>*> kTables = {&kOfMesh, &kOfZero, &kOfWidths, &kOfPipeline,
                                                      &kOfExperts};

TEST_CASE("a class that a twin does not have is named") {
  for (const std::vector<Row>* table : kTables) {
    for (const Row& row : *table) {
      INFO(row.name << "\n" << row.real << "\n" << row.lost);
      const std::vector<RemainderClass> real = twin_of(row.real).classes;
      std::set<std::string> lost;
      for (const LostClass& of : lost_classes(real, twin_of(row.lost).classes)) {
        lost.insert(row_of(of.name));
      }
      REQUIRE(lost.contains(row.name));
      REQUIRE(lost_classes(real, real).empty());
    }
  }
}

TEST_CASE("no layout has a class that is in no table") {
  std::set<std::string> known, met;
  for (const std::vector<Row>* table : kTables) {
    for (const Row& row : *table) {
      REQUIRE(known.insert(row.name).second);
      met.merge(rows_of(twin_of(row.real).classes));
    }
  }
  for (uint64_t number = 0; number < 100; ++number) {
    met.merge(rows_of(CompositionDraw(number, /*most_ranks=*/16).draw().first.classes));
  }
  for (const std::string& name : met) CHECK(known.contains(name));
  for (const std::string& name : known) CHECK(met.contains(name));
}

/// What is wrong with a layout: that a rule refuses it, or its schedule, as well as what it
/// computes.
std::string failure_of(const std::string& own) {
  try {
    return run_twin(twin_of(own)).failure;
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Trains both layouts of each class. A mistake in what a class alone reaches shows in the one that
/// has it: tests/faults has one for every row.
void train(const std::vector<Row>& table) {
  for (const Row& row : table) {
    const std::string real = failure_of(row.real), lost = failure_of(row.lost);
    if (!real.empty() || !lost.empty()) {
      FAIL_CHECK("the class \"" << row.name << "\" "
                                << (lost.empty()   ? "alone differs"
                                    : real.empty() ? "is right where another one differs"
                                                   : "differs as another one does")
                                << "\n"
                                << real << lost);
    }
  }
  SUCCEED();
}

TEST_CASE("with and without each class of the mesh a layout computes what one process does") {
  train(kOfMesh);
}

TEST_CASE("with and without each class of ZeRO a layout computes what one process does") {
  train(kOfZero);
}

TEST_CASE("with and without each class of widths a layout computes what one process does") {
  train(kOfWidths);
}

TEST_CASE("with and without each class of stages a layout computes what one process does") {
  train(kOfPipeline);
}

TEST_CASE("with and without each class of experts a layout computes what one process does") {
  train(kOfExperts);
}

/// A published layout, a class that it has, and a twin as one makes it without thinking: all that
/// is more than 1 in the layout is 2 or another power of two.
struct Recipe {
  std::string file, own, naive;
};

const std::string kNaive =
    "--hidden_size 16 --ffn_hidden_size 32 --vocab_size 64 --seq_len 16 --micro_batch_size 1 ";

std::string flags_of_recipe(const std::string& file) {
  const std::filesystem::path root = std::filesystem::path(__FILE__).parent_path() / "../../..";
  const std::string path = (root / "ch07_5d/recipes" / (file + ".json")).string();
  const nlohmann::json recipe = parse_json(read_file(path), path);
  std::string flags;
  for (const auto& [flag, value] : recipe.at("flags").items()) {
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    flags += fmt::format("--{} {} ", flag, value.is_boolean() ? "" : text);
  }
  return flags;
}

/// Trains the twins of a recipe and the naive one: a mistake in what only its own class reaches
/// shows in those alone.
void train(const Recipe& recipe) {
  const TwinFamily family = shrink(layout_of_flags(flags_of_recipe(recipe.file)), 16);
  const auto has_own = [&](const std::vector<LostClass>& lost) {
    return std::ranges::find(lost, recipe.own, &LostClass::name) == lost.end();
  };
  const Twin naive = twin_of(kNaive + recipe.naive);
  REQUIRE(has_own(family.lost));
  REQUIRE_FALSE(has_own(lost_classes(family.real, naive.classes)));
  std::string differ;
  for (const Twin& twin : family.twins) differ += run_twin(twin).failure;
  const std::string of_naive = run_twin(naive).failure;
  if (differ.empty() && of_naive.empty()) return;
  FAIL(recipe.file << ": "
                   << (of_naive.empty() ? "only its twins differ, and the naive one does not"
                                        : "a naive twin differs as well")
                   << "\n"
                   << differ << of_naive);
}

TEST_CASE("twins of the laptop's layout keep all of its classes", "[not_sanitized]") {
  const TwinFamily family = shrink(layout_of_flags(flags_of_recipe("laptop")), 16);
  REQUIRE(family.lost.empty());
  for (const Twin& twin : family.twins) {
    INFO(twin.flags);
    REQUIRE(run_twin(twin).failure == "");
  }
}

TEST_CASE("twins of Llama 3 405B keep the stages between first and last", "[not_sanitized]") {
  train(Recipe{"llama3_405b", "pp: a rank that is neither first nor last",
               "--num_heads 4 --num_kv_heads 2 --num_layers 4 --tp_size 2 --sequence_parallel "
               "--pp_size 2 --dp_size 2 --zero_stage 2 --grad_acc_steps 2"});
}

TEST_CASE("twins of Llama 3 405B for long samples keep the ranks of cp between first and last",
          "[not_sanitized]") {
  train(Recipe{"llama3_405b_long", "cp: a rank that is neither first nor last",
               "--num_heads 4 --num_kv_heads 2 --num_layers 4 --tp_size 2 --sequence_parallel "
               "--pp_size 2 --dp_size 2 --zero_stage 2 --grad_acc_steps 2 --cp_size 2 --cp_method "
               "all_gather --document_mask"});
}

TEST_CASE("twins of DeepSeek-V3 keep several experts on a rank", "[not_sanitized]") {
  train(Recipe{"deepseek_v3", "experts over ep",
               "--num_heads 4 --num_kv_heads 4 --num_layers 4 --attention_kind mla --q_lora_rank 8 "
               "--kv_lora_rank 8 --qk_nope_head_dim 4 --qk_rope_head_dim 2 --v_head_dim 4 "
               "--num_experts 2 --num_experts_per_tok 2 --moe_ffn_hidden_size 16 "
               "--num_shared_experts 1 --first_dense_layers 2 --expert_nodes 2 --route_nodes 2 "
               "--balance bias --dispatch by_node --node_size 2 --pp_size 2 --ep_size 2 --dp_size "
               "2 --zero_stage 1 --pp_schedule dualpipe --overlap_dispatch --grad_acc_steps 4"});
}

TEST_CASE("twins of Megatron-Turing NLG keep a vocabulary with a rest", "[not_sanitized]") {
  train(Recipe{"mt_nlg_530b", "vocabulary over tp",
               "--num_heads 4 --num_kv_heads 4 --num_layers 4 --tp_size 2 --pp_size 2 --dp_size 2 "
               "--grad_acc_steps 4 --recompute full"});
}

TEST_CASE("twins of PaLM keep a rest of the vocabulary that moves parts", "[not_sanitized]") {
  train(Recipe{"palm_540b", "vocabulary over tp: the rest moves where a part begins",
               "--num_heads 4 --num_kv_heads 1 --num_layers 2 --tie_word_embeddings --tp_size 2 "
               "--dp_size 4 --zero_stage 3 --shard_size 2 --recompute full"});
}

TEST_CASE("twins of Mixtral keep several experts of a token that are not all", "[not_sanitized]") {
  train(Recipe{"mixtral_8x7b", "experts of a token",
               "--num_heads 4 --num_kv_heads 2 --num_layers 2 --num_experts 2 "
               "--num_experts_per_tok 2 --norm_topk_prob --balance batch --tp_size 2 "
               "--sequence_parallel --dp_size 2 --ep_size 2 --zero_stage 1 --grad_acc_steps 2 "
               "--node_size 2 --recompute full"});
}

}  // namespace
}  // namespace usp::test::of_classes
