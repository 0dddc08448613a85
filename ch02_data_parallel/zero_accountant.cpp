#include "zero_accountant.h"

#include <algorithm>

namespace usp {

namespace {

/// Elements of the model's units, as they are padded to a multiple of S.
struct UnitSizes {
  int64_t root, block, blocks;

  explicit UnitSizes(const TrainConfig& config) : blocks(config.model.num_layers) {
    const ModelConfig& m = config.model;
    const int64_t S = shard_size(config.data_parallel);
    const auto padded = [S](int64_t numel) { return (numel + S - 1) / S * S; };
    const int64_t outside =
        (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size + m.hidden_size;
    root = padded(outside);
    block = padded((num_parameters(m) - outside) / blocks);
  }

  int64_t all() const { return root + blocks * block; }
  int64_t larger() const { return std::max(root, block); }
  /// The root, and as many blocks as are there at a time.
  int64_t in_work() const { return root + std::min<int64_t>(2, blocks) * block; }
};

/// Scratch of the all-reduces of shards over R copies, which lasts until the end of the step.
int64_t scratch_of_copies(const TrainConfig& config, int64_t units_numel) {
  const int64_t S = shard_size(config.data_parallel), R = config.data_parallel.dp_size / S;
  return (R - 1) * ((units_numel / S + R - 1) / R) * bytes_of(dtype_of_gradient_sum(config));
}

/// Of reductions: the largest of what is there when block 1's gradients are on their way, when the
/// root's are, and when all are.
int64_t scratch(const TrainConfig& config, const UnitSizes& sizes) {
  const int64_t S = shard_size(config.data_parallel);
  const auto reduce_scatter = [&](int64_t numel) {
    return (S - 1) * (numel / S) * bytes_of(dtype_of_reduction(config));
  };
  const int64_t of_block = scratch_of_copies(config, sizes.block);
  const int64_t blocks = sizes.blocks * of_block;
  return std::max({reduce_scatter(sizes.block) + blocks - of_block,
                   reduce_scatter(sizes.root) + blocks,
                   blocks + scratch_of_copies(config, sizes.root)});
}

}  // namespace

int64_t shard_size(const DataParallelConfig& config) {
  return config.shard_size > 0 ? config.shard_size : config.dp_size;
}

DType dtype_of_reduction(const TrainConfig& config) {
  const GradAccumulation accumulation = parse_grad_accumulation(config.grad_accumulation);
  // From stage 2 on a micro-batch's gradients travel before they are added to anything.
  const bool weights_dtype =
      accumulation == GradAccumulation::bf16 ||
      (accumulation == GradAccumulation::both && config.data_parallel.zero_stage >= 2);
  const DType dtype = parse_dtype(config.dtype);
  return weights_dtype ? dtype : accumulate_dtype(dtype);
}

DType dtype_of_gradient_sum(const TrainConfig& config) {
  const DType dtype = parse_dtype(config.dtype);
  const bool weights_dtype =
      parse_grad_accumulation(config.grad_accumulation) == GradAccumulation::bf16;
  return weights_dtype ? dtype : accumulate_dtype(dtype);
}

// [accountant]
StateBytes sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  if (stage == 0) return whole_states(config);
  const DType dtype = parse_dtype(config.dtype);
  const int64_t weight = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const int64_t whole = UnitSizes(config).all(), shard = whole / shard_size(config.data_parallel);
  StateBytes states{};
  states.weights = (stage == 3 ? shard : whole) * weight;
  states.gradients = (stage >= 2 ? shard : whole) * bytes_of(dtype_of_gradient_sum(config));
  if (stage == 1 && config.grad_accumulation == "both") {
    states.gradients += num_parameters(config.model) * weight;
  }
  states.optimizer = shard * ((weight == acc ? 0 : acc) + 2 * acc);
  return states;
}

std::vector<LiveBytes> zero_buffers(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage, ranks = config.data_parallel.dp_size;
  std::vector<LiveBytes> buffers;
  if (stage == 0) return buffers;
  const UnitSizes sizes(config);
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  if (stage == 3) {
    const int64_t weight = bytes_of(parse_dtype(config.dtype));
    buffers.push_back({-1, "gathered weights", sizes.in_work() * weight});
  }
  if (stage >= 2) buffers.push_back({-1, "gradients to reduce", sizes.in_work() * gradient});
  const bool added =
      config.grad_acc_steps > 1 || dtype_of_reduction(config) != dtype_of_gradient_sum(config);
  if (stage >= 2 && added) {
    const int64_t length = sizes.larger() / shard_size(config.data_parallel);
    buffers.push_back({-1, "reduced gradients", length * gradient});
  }
  if (ranks > 1) buffers.push_back({-1, "scratch of reductions", scratch(config, sizes)});
  return buffers;
}
// [accountant]

double book_sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const double S = double(shard_size(config.data_parallel));
  const double gradients = config.grad_accumulation == "both" ? 6 : 2;
  const double bytes =
      2 / (stage == 3 ? S : 1) + gradients / (stage >= 2 ? S : 1) + 12 / (stage >= 1 ? S : 1);
  return bytes * double(num_parameters(config.model));
}

// [traffic]
ZeroTraffic predict_traffic(const TrainConfig& config) {
  const DataParallelConfig& dp = config.data_parallel;
  const int64_t weight = bytes_of(parse_dtype(config.dtype));
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  if (dp.zero_stage == 0) {
    return {.all_reduce = 2 * (dp.dp_size - 1) * num_parameters(config.model) * gradient};
  }
  const UnitSizes sizes(config);
  const int64_t S = shard_size(dp), R = dp.dp_size / S, G = config.grad_acc_steps;
  const int64_t P = sizes.all();
  const int64_t reductions = dp.zero_stage == 1 ? 1 : G;
  // Forward and backward gather every block, but for the last one, which stays, and the root.
  const int64_t gathered = dp.zero_stage < 3 ? P : G * (2 * P - sizes.root - sizes.block);
  return {.reduce_scatter = (S - 1) * R * reductions * P * gradient,
          .all_gather = (S - 1) * R * gathered * weight,
          .all_reduce = 2 * (R - 1) * P * bytes_of(dtype_of_gradient_sum(config))};
}
// [traffic]

}  // namespace usp
