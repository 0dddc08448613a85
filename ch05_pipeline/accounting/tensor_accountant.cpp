#include "accounting/tensor_accountant.h"

#include "accounting/zero_accountant.h"
#include "base/stretch.h"
#include "data_parallel/zero_layout.h"

namespace usp {

TensorTraffic predict_tensor_traffic(const TrainConfig& config) {
  const TensorParallelConfig& tp = config.tensor_parallel;
  const int64_t t = tp.tp_size, dp = config.data_parallel.dp_size;
  const int64_t L = config.model.num_layers, H = config.model.hidden_size;
  const DType dtype = parse_dtype(config.dtype);
  const int64_t T = config.micro_batch_size * config.seq_len;
  const int64_t x = (t - 1) * T * H * bytes_of(dtype);  // an all-gather or a reduce-scatter of x
  const int64_t rows = 2 * (t - 1) * T * bytes_of(accumulate_dtype(dtype));
  const int64_t again = config.recompute == "full" ? L : 0;  // blocks that run forward once more
  const int64_t passes = dp * config.grad_acc_steps;
  TensorTraffic sent{.all_reduce = passes * 3 * rows};
  // [sent]
  if (!tp.sequence_parallel) {
    const int64_t edges = 4 * L + 2 + again;  // two exits and two entries; embedding and head
    sent.all_reduce += passes * edges * 2 * x;
    return sent;
  }
  const int64_t entries = 2 * L + 1, exits = 2 * L + 1;
  const int64_t gathered_again = tp.gathered_input == "again" ? entries : 0;
  sent.all_gather = passes * (entries + exits + gathered_again + 2 * again) * x;
  sent.reduce_scatter = passes * (entries + exits + again) * x;
  // [sent]
  // The norms' gradients, of which each copy of the model has one.
  const int64_t ranks = config.mesh().dp_cp();
  const int64_t copies = config.data_parallel.zero_stage == 0 ? ranks : ranks / shard_size(config);
  const int64_t norms = (2 * L + 1) * H * bytes_of(dtype_of_gradient_sum(config));
  sent.all_reduce += copies * 2 * (t - 1) * norms;
  // [mirrored]
  if (config.pipeline.mirrors(config.grad_acc_steps))
    sent.all_reduce += copies * 2 * (t - 1) * norms;
  // [mirrored]
  return sent;
}

Traffic traffic_of(const TensorParallelConfig&, const TrainConfig& config, const DryRank& dry) {
  const Communicator& tp = dry.mesh().tp();
  Operations counted(tp, CommKind::all_reduce);
  counted.add(tp, CommKind::all_gather).add(tp, CommKind::reduce_scatter);
  const MeshSizes sizes = config.mesh();
  return {.what = "activations sent over tp",
          .counted = counted,
          .formula = double(predict_tensor_traffic(config).total()) /
                     double(sizes.dp_cp() * sizes.tp * sizes.pp),
          .note = sizes.pp > 1 ? ", mean of all stages" : ""};
}

/// Adds the scratch of the reductions over tp.
static void add_tensor_scratch(const TrainConfig& config, const TensorRegion& region,
                               std::vector<LiveBytes>& buffers) {
  if (region.size() == 1) return;
  const int64_t rows = config.samples_of_pass() * config.seq_len / config.mesh().cp;
  const int64_t numel = rows * config.model.hidden_size;
  const int64_t bytes = device_scratch(config.engine(), region.size(), region.rank(), numel,
                                       parse_dtype(config.dtype));
  if (bytes == 0) return;
  if (buffers.empty() || buffers.back().name != "scratch of reductions") {
    buffers.push_back({-1, "scratch of reductions", 0});
  }
  buffers.back().bytes += bytes;
}

RankTrait vocabulary_trait(const TrainConfig& config) {
  const int64_t words = config.model.vocab_size, ranks = config.mesh().tp;
  return {[=](const MeshPlace& at) { return cut(words, at.tp, ranks).count; },
          [](int64_t here) { return fmt::format("{} of the vocabulary", here); }};
}

RankTrait cut_trait(const TrainConfig& config) {
  const bool uneven = config.model.ffn_hidden_size % config.mesh().tp != 0;
  return {[=](const MeshPlace& at) { return uneven ? at.tp : 0; },
          [=](int64_t rank) { return uneven ? fmt::format("tp rank {}", rank) : ""; }};
}

void shard_layers(const TrainConfig& config, const TensorRegion& region, Prediction& prediction) {
  prediction.book_states /= double(config.tensor_parallel.tp_size);
  prediction.book_activations = book_sharded_activations(config);
  add_tensor_scratch(config, region, prediction.buffers);
}

// [book]
double book_sharded_activations(const TrainConfig& config) {
  const double t = double(config.tensor_parallel.tp_size);
  const double h = double(config.model.hidden_size), s = double(config.seq_len);
  const bool shares_rows = config.tensor_parallel.sequence_parallel;
  double bytes = shares_rows ? 34 / t : 10 + 24 / t;
  if (config.recompute == "none") bytes += 5 * double(config.model.num_heads) * s / h / t;
  if (config.recompute == "full") bytes = shares_rows ? 2 / t : 2;
  const double rows = s / double(config.context_parallel.cp_size);
  return double(config.model.num_layers * config.micro_batch_size) * rows * h * bytes;
}
// [book]

}  // namespace usp
