#pragma once

#include <sstream>

#include "planner/cluster.h"
#include "planner/replay.h"
#include "technique/case_cover.h"
#include "technique/layout_of_flags.h"
#include "testing.h"

/// Small runs of every kind, and clusters whose numbers one can calculate with.
namespace usp::test {

/// Flags of which later ones take the place of earlier ones, each with one value.
inline std::string instead(const std::string& flags, const std::string& later) {
  std::istringstream stream(flags);
  std::string kept, flag, value;
  while (stream >> flag >> value) {
    if (later.find(flag + " ") == std::string::npos) kept += flag + " " + value + " ";
  }
  return kept + later;
}

inline constexpr const char* kSmall =
    "--hidden_size 24 --num_heads 4 --num_kv_heads 2 --ffn_hidden_size 36 --vocab_size 31 "
    "--num_layers 4 --seq_len 16 --micro_batch_size 2 --warmup_steps 0 ";

/// So many layouts of at most 16 ranks that the rules accept, drawn by this seed.
inline std::vector<std::string> random_layouts(int count, uint64_t seed) {
  const std::vector<std::pair<const char*, std::vector<const char*>>> choices = {
      {"dp_size", {"1", "2", "2", "4"}},
      {"tp_size", {"1", "2", "4"}},
      {"pp_size", {"1", "2", "4"}},
      {"cp_size", {"1", "1", "2"}},
      {"zero_stage", {"0", "1", "2", "3"}},
      {"grad_acc_steps", {"4", "8"}},
      {"pp_schedule", {"1f1b", "1f1b", "afab", "zb_h1", "interleaved", "dualpipe", "zb_v"}},
      {"pp_chunks", {"1", "1", "2"}},
      {"recompute", {"none", "full"}},
      {"tp_overlap", {"weight_grad", "none", "chunks"}},
      {"cp_layout", {"zigzag", "contiguous"}},
      {"gather_overlap", {"forward", "none"}},
      {"reduce_after", {"micro_batch", "step"}},
      {"reshard_after", {"block", "chunk"}},
      {"shard_size", {"0", "0", "2"}},
      {"num_experts", {"0", "0", "4"}},
      {"ep_size", {"1", "2"}}};
  Random random(seed);
  std::vector<std::string> layouts;
  while (std::ssize(layouts) < count) {
    std::string flags;
    for (const auto& [flag, values] : choices) {
      const std::string value = values[random.integer(0, std::ssize(values) - 1)];
      if (value != "0" && value != values[0]) flags += fmt::format("--{} {} ", flag, value);
    }
    if (random.integer(0, 1) == 1) flags += "--sequence_parallel ";
    try {
      flags = instead(kSmall, flags);
      TrainConfig config;
      Args args("");
      read_without_advice(config, args, words_of_flags(flags), /*ranks=*/0);  // most are refused
      if (config.mesh().ranks() <= 16) layouts.push_back(flags);
    } catch (const UsageError&) {
    }
  }
  return layouts;
}

/// A cluster of round numbers: a product takes its operations in ns, memory its bytes in ns.
inline Cluster round_cluster(int64_t ranks_per_node) {
  const auto is = [](double value) { return Sourced{value, Origin::assumed, "a test"}; };
  Cluster cluster;
  cluster.name = "round";
  cluster.ranks_per_node = is(double(ranks_per_node));
  cluster.nics_per_node = is(1);
  cluster.memory_gib = is(1);
  for (DType dtype : {DType::f32, DType::bf16, DType::f64}) cluster.peak_tflops[dtype] = is(0.001);
  cluster.memory_gbs = is(1);
  cluster.matmul = cluster.attention = cluster.memory = is(1);
  cluster.half_width = cluster.half_depth = is(0);
  cluster.launch_us = is(0);
  cluster.node = {is(1), is(1)};
  cluster.net = {is(10), is(0.5)};
  return cluster;
}

}  // namespace usp::test
