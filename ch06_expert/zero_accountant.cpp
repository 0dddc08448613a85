#include "zero_accountant.h"

#include <algorithm>

#include "comm/algorithms.h"
#include "tensor/runtime.h"
#include "zero_walk.h"

namespace usp {

namespace {

/// Scratch of all-reductions of so many elements that are under way at once. They share it: only
/// one that needs more than all before it has its own.
int64_t scratch_of_buckets(const TrainConfig& config, const std::vector<int64_t>& buckets) {
  int64_t bytes = 0, largest = 0;
  for (int64_t numel : buckets) {
    const int64_t needed =
        algorithms::reduction_scratch(static_cast<int>(config.mesh().dp_cp()), /*rank=*/0, numel,
                                      dtype_of_reduction(config), Engine::kScratchLimit);
    if (needed > largest) bytes += largest = needed;
  }
  return bytes;
}

/// Elements of each bucket of plain data parallelism, in the order in which they leave.
std::vector<int64_t> buckets(const TrainConfig& config, const ZeroShapes& shapes) {
  const DataParallelConfig& dp = config.data_parallel;
  if (dp.grad_sync == "overlapped") return {shapes.parameters.rbegin(), shapes.parameters.rend()};
  int64_t rest = shapes.held, size = rest;
  if (dp.grad_sync == "bucketed") {
    const auto bytes = static_cast<int64_t>(dp.bucket_mb * (1 << 20));
    size = std::max<int64_t>(1, bytes / bytes_of(dtype_of_reduction(config)));
  }
  std::vector<int64_t> sizes;
  for (; rest > 0; rest -= size) sizes.push_back(std::min(rest, size));
  return sizes;
}

}  // namespace

int64_t shard_size(const TrainConfig& config) {
  const DataParallelConfig& dp = config.data_parallel;
  return dp.shard_size > 0 && dp.zero_stage > 0 ? dp.shard_size : config.mesh().dp_cp();
}

StateBytes sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const ZeroShapes shapes(config);
  if (stage == 0) return whole_states(shapes.held, config);
  // [states]
  const KeptByStage& kept = kKept[stage];
  const DType dtype = parse_dtype(config.dtype);
  const int64_t weight = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const int64_t whole = shapes.all(), shard = whole / shard_size(config);
  const auto elements = [&](Kept part) { return part == Kept::whole ? whole : shard; };
  StateBytes states{};
  states.weights = elements(kept.weights) * weight;
  states.gradients = elements(kept.gradients) * bytes_of(dtype_of_gradient_sum(config));
  if (kept.gradients == Kept::whole && config.grad_accumulation == "both") {
    states.gradients += shapes.held * weight;
  }
  states.optimizer = elements(kept.optimizer) * ((weight == acc ? 0 : acc) + 2 * acc);
  // [states]
  return states;
}

std::vector<LiveBytes> zero_buffers(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const bool alone = config.mesh().dp_cp() == 1;
  const ZeroShapes shapes(config);
  std::vector<LiveBytes> buffers;
  const auto add = [&](std::string_view name, int64_t bytes) {
    buffers.push_back({-1, name, bytes});
  };
  if (stage == 0) {
    if (!alone) add("scratch of reductions", scratch_of_buckets(config, buckets(config, shapes)));
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
  // [book_states]
  return bytes * double(num_parameters(config.model)) / double(config.tensor_parallel.tp_size);
  // [book_states]
}

ZeroTraffic predict_traffic(const TrainConfig& config) {
  const DataParallelConfig& dp = config.data_parallel;
  const int64_t weight = bytes_of(parse_dtype(config.dtype));
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  const ZeroShapes shapes(config);
  const int64_t copies = config.mesh().dp_cp();
  if (dp.zero_stage == 0) return {.all_reduce = 2 * (copies - 1) * shapes.held * gradient};
  const int64_t Z = shard_size(config), R = copies / Z;
  // [traffic]
  const ZeroWalk walk(config, shapes);
  return {.reduce_scatter = (Z - 1) * R * walk.reduced * gradient,
          .all_gather = (Z - 1) * R * walk.gathered * weight,
          .all_reduce = 2 * (R - 1) * shapes.all() * bytes_of(dtype_of_gradient_sum(config))};
  // [traffic]
}

}  // namespace usp
