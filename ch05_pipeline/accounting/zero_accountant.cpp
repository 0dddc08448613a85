#include "accounting/zero_accountant.h"

#include <algorithm>
#include <map>
#include <string>

#include "tensor/runtime.h"

namespace usp {

namespace {

/// Scratch of all-reduces that are under way at once. Those of a group share it: only one that
/// needs more than all before it has its own.
int64_t scratch_of_buckets(const TrainConfig& config, const Mesh& mesh,
                           const std::vector<GradientShape>& buckets) {
  int64_t bytes = 0;
  std::map<std::string, int64_t> largest;
  for (const auto& [group, numel] : buckets) {
    const Communicator& ranks = mesh.group(group);
    const int64_t needed = device_scratch(config.engine(), ranks.size(), ranks.rank(), numel,
                                          dtype_of_reduction(config));
    if (needed > largest[group]) bytes += largest[group] = needed;
  }
  return bytes;
}

/// The buckets of plain data parallelism, in the order in which they leave. They are cut from the
/// end of the flat gradients, and where other ranks sum what lies before.
std::vector<GradientShape> buckets(const TrainConfig& config, const ZeroShapes& shapes) {
  const DataParallelConfig& dp = config.data_parallel;
  int64_t size = shapes.held;
  if (dp.grad_sync == "bucketed") {
    const auto bytes = static_cast<int64_t>(dp.bucket_mb * (1 << 20));
    size = std::max<int64_t>(1, bytes / bytes_of(dtype_of_reduction(config)));
  }
  std::vector<GradientShape> buckets;
  int64_t room = 0;  // before the next cut
  for (auto last = shapes.parameters.rbegin(); last != shapes.parameters.rend(); ++last) {
    bool begins =
        dp.grad_sync == "overlapped" || buckets.empty() || buckets.back().group != last->group;
    for (int64_t rest = last->numel; rest > 0; begins = false) {
      begins = begins || room == 0;
      if (room == 0) room = size;
      if (begins) buckets.push_back({last->group, 0});
      const int64_t taken = std::min(rest, room);
      buckets.back().numel += taken;
      rest -= taken;
      room -= taken;
    }
  }
  return buckets;
}

}  // namespace

int64_t shard_size(const TrainConfig& config, int64_t copies) {
  const DataParallelConfig& dp = config.data_parallel;
  return dp.shard_size > 0 && dp.zero_stage > 0 ? dp.shard_size : copies;
}

int64_t shard_size(const TrainConfig& config) { return shard_size(config, config.mesh().dp_cp()); }

void shard_states(const TrainConfig& config, DryRank& dry, Prediction& prediction) {
  const ZeroShapes shapes(config, dry);
  prediction.states = sharded_states(config, shapes);
  prediction.book_states = book_sharded_states(config);
  prediction.buffers = zero_buffers(config, shapes);
}

StateBytes sharded_states(const TrainConfig& config, const ZeroShapes& shapes) {
  const int64_t stage = config.data_parallel.zero_stage;
  if (stage == 0) return whole_states(shapes.held, config);
  // [states]
  const KeptByStage& kept = kKept[stage];
  const DType dtype = parse_dtype(config.dtype);
  const int64_t weight = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const int64_t whole = shapes.all(), shard = shapes.shards();
  const auto elements = [&](Kept part) { return part == Kept::whole ? whole : shard; };
  StateBytes states{};
  states.weights = elements(kept.weights) * weight;
  states.gradients = elements(kept.gradients) * bytes_of(dtype_of_gradient_sum(config));
  if (kept.gradients == Kept::whole && config.grad_accumulation == "both") {
    states.gradients += shapes.held * weight;
  }
  states.optimizer = shard * (weight == acc ? 0 : acc) + shapes.updated() * 2 * acc;
  // [states]
  return states;
}

std::vector<LiveBytes> zero_buffers(const TrainConfig& config, const ZeroShapes& shapes) {
  const int64_t stage = config.data_parallel.zero_stage;
  const bool alone = config.mesh().dp_cp() == 1;
  std::vector<LiveBytes> buffers;
  const auto add = [&](std::string_view name, int64_t bytes) {
    if (bytes > 0) buffers.push_back({-1, name, bytes});
  };
  if (stage == 0) {
    const int64_t scratch = scratch_of_buckets(config, shapes.rank.mesh(), buckets(config, shapes));
    if (!alone) add("scratch of reductions", scratch);
    return buffers;
  }
  // [buffers]
  const ZeroWalk walk(config, shapes);
  const int64_t weight = bytes_of(parse_dtype(config.dtype));
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  if (kKept[stage].weights == Kept::shard) add("gathered weights", walk.most_gathered * weight);
  if (kKept[stage].gradients == Kept::shard) {
    add("gradients to reduce", walk.most_written * gradient);
    if (adds_up_before_reduction(config)) {
      add("gradients to add up", walk.most_written_unpadded * weight);
    }
    if (walk.most_added > 0) add("reduced gradients", walk.most_added * gradient);
  }
  if (!alone) add("scratch of reductions", walk.scratch);
  // [buffers]
  return buffers;
}

double book_sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const double Z = double(shard_size(config));
  const double gradients = config.grad_accumulation == "both" ? 6 : 2;
  const double bytes =
      2 / (stage == 3 ? Z : 1) + gradients / (stage >= 2 ? Z : 1) + 12 / (stage >= 1 ? Z : 1);
  return bytes * double(num_parameters(config.model));
}

ZeroTraffic predict_traffic(const TrainConfig& config, int rank) {
  const DataParallelConfig& dp = config.data_parallel;
  const int64_t weight = bytes_of(parse_dtype(config.dtype));
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  DryRank dry(config, rank);
  const ZeroShapes shapes(config, dry);
  const int64_t copies = config.mesh().dp_cp();
  // What one of n ranks sends to have a sum on all of them.
  const auto sent_to_sum = [&](int64_t numel, int64_t n) {
    return 2 * (n - 1) * numel * copies / n;
  };
  ZeroTraffic traffic;
  for (const auto& [group, numel] : shapes.parameters) {
    traffic.all_reduce += sent_to_sum(numel, dry.mesh().group(group).size()) * gradient;
  }
  if (dp.zero_stage == 0) return traffic;
  // [traffic]
  const ZeroWalk walk(config, shapes);
  traffic = {.reduce_scatter = copies * walk.sent_to_reduce * gradient,
             .all_gather = copies * walk.sent_to_gather * weight};
  for (const UnitShape& unit : shapes.units) {
    traffic.all_reduce += sent_to_sum(unit.shard(), unit.copies / unit.ranks) *
                          bytes_of(dtype_of_gradient_sum(config));
  }
  return traffic;
  // [traffic]
}

Traffic data_parallel_traffic(const TrainConfig& config, const DataParallelStrategy& strategy) {
  Traffic traffic{.what = "gradients, weights sent", .counted = strategy.operations()};
  traffic.formula = double(predict_traffic(config).total()) / double(config.mesh().dp_cp());
  if (config.data_parallel.zero_stage == 0) {
    traffic.what = "gradients sent";
    traffic.beside = fmt::format(", buckets: {}; by formula", strategy.num_buckets());
  }
  return traffic;
}

}  // namespace usp
