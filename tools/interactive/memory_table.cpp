// Prints the formulas of the memory accountant as a table, for the page that computes with them in
// a browser. They are not written down here: the accountant of the newest chapter is asked at many
// sizes, and its answers determine its polynomials.

#include <fmt/format.h>

#include "accounting/memory.h"
#include "accounting/zero_accountant.h"
#include "block_table.h"
#include "core_table.h"
#include "data_parallel/zero_layout.h"

namespace usp {
namespace {

constexpr int64_t kStages = std::size(kKept);

/// A model whose parameters are so many that no padding is needed, sharded by two ranks.
TrainConfig two_ranks(const char* dtype, const char* accumulation, int64_t stage) {
  TrainConfig config = config_of({2, 2, 8, 2, 2, 4, 8, 8, 1}, dtype);
  config.grad_accumulation = accumulation;
  config.data_parallel.dp_size = 2;
  config.data_parallel.zero_stage = stage;
  return config;
}

/// Bytes an element, where a rank keeps `kept` of them.
int64_t an_element(int64_t bytes, int64_t elements) {
  USP_CHECK(bytes % elements == 0, "{} bytes of {} elements", bytes, elements);
  return bytes / elements;
}

/// Bytes a parameter of weights, gradients and optimizer states, of gradients that are not sharded
/// in any case, and of those that travel.
Json states_of(const char* dtype, const char* accumulation, int64_t stage) {
  const TrainConfig config = two_ranks(dtype, accumulation, stage);
  const StateBytes states = predict(config).states;
  const int64_t all = num_parameters(config.model);
  const auto kept = [&](Kept part) { return part == Kept::whole ? all : all / 2; };
  const int64_t sum = bytes_of(dtype_of_gradient_sum(config));
  const int64_t summed = kept(kKept[stage].gradients) * sum;
  return {{"dtype", dtype},
          {"accumulation", accumulation},
          {"stage", stage},
          {"weights", an_element(states.weights, kept(kKept[stage].weights))},
          {"sums", sum},
          {"gradients", an_element(states.gradients - summed, all)},
          {"optimizer", an_element(states.optimizer, kept(kKept[stage].optimizer))},
          {"reduced", bytes_of(dtype_of_reduction(config))}};
}

Json states() {
  Json rows = Json::array();
  for (int64_t stage = 0; stage < kStages; ++stage) {
    for (const char* accumulation : {"f32", "bf16", "both"}) {
      for (const char* dtype : kDTypeNames) {
        // Where weights are no bf16 there is nothing to choose.
        if (accumulation == std::string("f32") || dtype == std::string("bf16")) {
          rows.push_back(states_of(dtype, accumulation, stage));
        }
      }
    }
  }
  return rows;
}

Json kept() {
  Json stages = Json::array();
  const auto name = [](Kept part) { return part == Kept::whole ? "whole" : "shard"; };
  for (const KeptByStage& stage : kKept) {
    stages.push_back({{"weights", name(stage.weights)},
                      {"gradients", name(stage.gradients)},
                      {"optimizer", name(stage.optimizer)}});
  }
  return stages;
}

Json widths() {
  Json json;
  for (const char* name : kDTypeNames) {
    const DType dtype = parse_dtype(name);
    json[name] = {{"own", bytes_of(dtype)}, {"acc", bytes_of(accumulate_dtype(dtype))}};
  }
  return json;
}

int print(int, char**) {
  check_exchanges();
  const Json table = {{"chapter", USP_CHAPTER},
                      {"widths", widths()},
                      {"blocks", block_table()},
                      {"core", core_table()},
                      {"parameters", parameter_table()},
                      {"kept", kept()},
                      {"states", states()},
                      {"scratch_limit", Engine::kScratchLimit},
                      {"bucket_mb", DataParallelConfig().bucket_mb}};
  fmt::print("{}\n", table.dump(1));
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::print, argc, argv); }
