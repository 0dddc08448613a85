#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "accounting/zero_accountant.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/data_parallel_parity.h"

/// Training with sharded states next to training on one rank, for any engine.
namespace usp::test {

struct ZeroCase {
  int64_t stage, shard_size, grad_acc_steps;
  const char* recompute;
  bool tied;
  const char* gather_overlap = "forward";
  const char *reduce_after = "micro_batch", *reshard_after = "block";

  std::string name(int ranks) const {
    return fmt::format(
        "dp {} stage {} shard_size {} x{} recompute {} tied {} gathers {} reduces after {} "
        "reshards "
        "after {}",
        ranks, stage, shard_size, grad_acc_steps, recompute, tied, gather_overlap, reduce_after,
        reshard_after);
  }
};

/// The case on so many ranks; 72 samples a step, whatever the layout.
inline TrainConfig zero_config(const ZeroCase& c, int ranks) {
  TrainConfig config = parity_config();
  config.model.tie_word_embeddings = c.tied;
  config.attention = "naive";
  config.recompute = c.recompute;
  config.data_parallel.dp_size = ranks;
  config.grad_acc_steps = c.grad_acc_steps;
  config.micro_batch_size = 72 / (ranks * c.grad_acc_steps);
  if (ranks == 1) return config;
  config.data_parallel.zero_stage = c.stage;
  config.data_parallel.shard_size = c.shard_size;
  config.data_parallel.gather_overlap = c.gather_overlap;
  config.data_parallel.reduce_after = c.reduce_after;
  config.data_parallel.reshard_after = c.reshard_after;
  return config;
}

/// Bytes of each kind of buffer.
inline std::map<std::string, int64_t> by_name(const std::vector<LiveBytes>& buffers) {
  std::map<std::string, int64_t> bytes;
  for (const LiveBytes& buffer : buffers) bytes[std::string(buffer.name)] = buffer.bytes;
  return bytes;
}

/// Every combination of stage, accumulation, recomputation, ties, way of gathering, and of how long
/// gradients and weights stay whole.
inline std::vector<ZeroCase> all_zero_cases() {
  std::vector<ZeroCase> cases;
  for (int64_t stage : {3, 2, 1, 0}) {
    for (int64_t grad_acc_steps : {1, 3}) {
      for (const char* recompute : {"none", "selective", "full"}) {
        for (bool tied : {false, true}) {
          for (const char* overlap : {"none", "optimizer", "forward"}) {
            if (stage % 3 == 0 && overlap != std::string_view("none")) continue;  // not for these
            for (const char* reduces : {"micro_batch", "step"}) {
              for (const char* reshards : {"block", "chunk", "step"}) {
                if (stage < 2 && reduces == std::string_view("step")) continue;
                if (stage < 3 && reshards != std::string_view("block")) continue;
                cases.push_back(
                    {stage, 0, grad_acc_steps, recompute, tied, overlap, reduces, reshards});
              }
            }
          }
        }
      }
    }
  }
  return cases;
}

/// Cases among which every pair of values that occurs in `all` occurs, each with the most pairs
/// that were still missing.
inline std::vector<ZeroCase> pairwise(const std::vector<ZeroCase>& all) {
  const auto pairs_of = [](const ZeroCase& c) {
    const std::vector<std::string> values = {fmt::format("stage {}", c.stage),
                                             fmt::format("x{}", c.grad_acc_steps),
                                             c.recompute,
                                             fmt::format("tied {}", c.tied),
                                             fmt::format("gathers {}", c.gather_overlap),
                                             fmt::format("reduces {}", c.reduce_after),
                                             fmt::format("reshards {}", c.reshard_after)};
    std::set<std::pair<std::string, std::string>> pairs;
    for (size_t i = 0; i < values.size(); ++i) {
      for (size_t j = i + 1; j < values.size(); ++j) pairs.insert({values[i], values[j]});
    }
    return pairs;
  };
  std::set<std::pair<std::string, std::string>> missing;
  for (const ZeroCase& c : all) missing.merge(pairs_of(c));
  std::vector<ZeroCase> chosen;
  while (!missing.empty()) {
    const auto gain = [&](const ZeroCase& c) {
      const auto pairs = pairs_of(c);
      return std::ranges::count_if(pairs, [&](const auto& pair) { return missing.contains(pair); });
    };
    chosen.push_back(*std::ranges::max_element(all, {}, gain));
    for (const auto& pair : pairs_of(chosen.back())) missing.erase(pair);
  }
  return chosen;
}

/// Every pair of values, or every combination of those whose turn it is, see is_full(); where pairs
/// of ranks are not all ranks, hybrid sharding over half of them too.
inline std::vector<ZeroCase> zero_cases(int ranks) {
  const std::vector<ZeroCase> all = all_zero_cases();
  std::vector<ZeroCase> cases = is_full() ? full_cases(all) : pairwise(all);
  if (ranks % 4 != 0) return cases;
  const size_t flat = cases.size();
  for (size_t i = 0; i < flat; ++i) {
    if (cases[i].stage == 0) continue;
    cases.push_back(cases[i]);
    cases.back().shard_size = ranks / 2;
  }
  cases.push_back({3, 2, 3, "full", true});
  for (int64_t stage : {1, 2, 3}) cases.push_back({stage, 1, 3, "none", false});  // all copies
  if (kSanitized) {
    size_t number = 0;
    std::erase_if(cases, [&](const ZeroCase&) { return number++ % 4 > 0; });
  }
  return cases;
}

/// Bytes that all ranks that count have sent, by the operations of predict_traffic().
inline ZeroTraffic sent_by_all(const Communicator& world, bool counts = true) {
  const auto all = [&](CommKind kind) {
    double bytes = 0;
    for (const char* group : {"dp", "dp_cp", "shard", "replica"}) {
      bytes += double(Runtime::current().ledger().get(group, kind).wire_bytes);
    }
    return static_cast<int64_t>(world.sum(counts ? bytes : 0));
  };
  return {.reduce_scatter = all(CommKind::reduce_scatter),
          .all_gather = all(CommKind::all_gather),
          .all_reduce = all(CommKind::all_reduce)};
}

/// Throws Error unless the ranks that count have sent what predict_traffic() says of so many steps.
inline void check_zero_traffic(const Communicator& world, const TrainConfig& config,
                               const ZeroTraffic& before, int64_t steps, const std::string& what,
                               bool counts = true) {
  const ZeroTraffic after = sent_by_all(world, counts), predicted = predict_traffic(config);
  const auto check = [&](int64_t ZeroTraffic::*kind, const char* operation) {
    const int64_t sent = after.*kind - before.*kind;
    USP_CHECK(sent == steps * predicted.*kind, "{}: {} bytes in {}, {} predicted", what, sent,
              operation, steps * predicted.*kind);
  };
  check(&ZeroTraffic::reduce_scatter, "reduce_scatter");
  check(&ZeroTraffic::all_gather, "all_gather");
  check(&ZeroTraffic::all_reduce, "all_reduce");
}

/// Trains over all ranks of `world` in every case, and on one rank. Throws Error on the first
/// difference, and where a step sends other than predict_traffic() bytes.
inline void check_zero_parity(const Communicator& world) {
  constexpr int64_t kSteps = 4;
  const TrainConfig parity = parity_config();
  const RandomTokens tokens(parity.model.vocab_size);
  const TokenFile file(tokens.path(), 2, parity.model.vocab_size);
  const Dataset dataset(file, parity.seq_len, 0.1, DataOrder::shuffled, parity.seed);
  const Mesh mesh(world, {.dp = world.size()});
  std::vector<TrainedState> expected;
  for (bool tied : {false, true}) {
    SoloTrainer solo(zero_config({0, 0, 1, "none", tied}, 1), &dataset);
    expected.push_back(train(solo, kSteps));
  }
  for (const ZeroCase& c : zero_cases(world.size())) {
    const std::string what = c.name(world.size());
    const TrainConfig config = zero_config(c, world.size());
    Trainer trainer(config, {&dataset, mesh});
    const ZeroTraffic before = sent_by_all(world);
    const TrainedState state = train(trainer, kSteps, &world);
    expect_close(state, expected[c.tied], 1e-10, what);
    check_zero_traffic(world, config, before, kSteps, what);
  }
}

}  // namespace usp::test
