#include "accounting/traffic.h"

#include <map>

#include "technique/layout_of_flags.h"
#include "technique/tiny_llama.h"

/// What a report says that each technique sends.
namespace usp::test {
namespace {

constexpr const char* kModel =
    "--hidden_size 16 --ffn_hidden_size 24 --num_layers 3 --num_heads 4 --num_kv_heads 2 "
    "--vocab_size 64 --seq_len 16 --grad_acc_steps 2 --dp_size 2 ";

/// The model over two ranks of every axis that the chapter has, but three of the pipeline, of which
/// one is neither the first nor the last.
std::string over_every_axis() {
  std::string flags = kModel;
#if __has_include("tensor_parallel/region.h")
  flags += "--tp_size 2 --sequence_parallel ";
#endif
#if __has_include("context_parallel/group.h")
  flags += "--cp_size 2 ";
#endif
#if __has_include("pipeline_parallel/executor.h")
  flags += "--pp_size 3 ";
#endif
#if __has_include("expert_parallel/group.h")
  flags += "--num_experts 4 --moe_ffn_hidden_size 8 --ep_size 4 ";
#endif
  return flags;
}

std::vector<std::string> techniques(bool shards) {
  std::vector<std::string> all = {shards ? "gradients, weights sent" : "gradients sent"};
#if __has_include("tensor_parallel/region.h")
  all.push_back("activations sent over tp");
#endif
#if __has_include("context_parallel/group.h")
  all.push_back("attention sent over cp");
#endif
#if __has_include("pipeline_parallel/executor.h")
  all.push_back("activations sent over pp");
#endif
#if __has_include("expert_parallel/group.h")
  all.push_back("rows sent over ep");
#endif
  return all;
}

/// Bytes of a step that all ranks send together: by a technique's formula, and in a dry run.
struct OfAll {
  double formula = 0, sent = 0;
};

std::map<std::string, OfAll> of_all_ranks(const TrainConfig& config, bool shards) {
  std::map<std::string, OfAll> all;
  for (int rank = 0; rank < config.mesh().ranks(); ++rank) {
    const Simulation dry = simulate<Trainer>(config, rank);
    std::vector<std::string> names;
    for (const Traffic& row : step_traffic(config, rank)) {
      names.push_back(row.what);
      all[row.what].formula += row.formula;
      all[row.what].sent += double(row.counted.wire_bytes(dry.sent)) / double(dry.steps);
    }
    CAPTURE(rank);
    CHECK(names == techniques(shards));
  }
  return all;
}

TEST_CASE("each technique has a row, whose formula is what all ranks send in a dry step") {
  std::vector<std::string> layouts = {"--zero_stage 0", "--zero_stage 3"};
#if __has_include("expert_parallel/node_dispatch.h")
  layouts.push_back("--zero_stage 0 --dispatch by_node --node_size 4");
#endif
  for (const std::string& layout : layouts) {
    const TrainConfig config = layout_of_flags(over_every_axis() + layout);
    for (const auto& [what, bytes] : of_all_ranks(config, config.data_parallel.zero_stage > 0)) {
      INFO(layout << ": " << what << ", by formula " << bytes.formula << ", dry " << bytes.sent);
      CHECK(bytes.sent > 0);
      CHECK(bytes.formula == Approx(bytes.sent).epsilon(1e-12));
    }
  }
}

}  // namespace
}  // namespace usp::test
