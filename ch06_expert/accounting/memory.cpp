#include "accounting/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "accounting/context_accountant.h"
#include "accounting/dry_rank.h"
#include "accounting/pipeline_accountant.h"
#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"
#include "latent_attention/ring.h"
#include "run/book_formulas.h"
#include "train/fold.h"

namespace usp {

namespace {

// [layers]
/// Weights of all layers that multiply activations; of experts all, or those that one token meets.
int64_t layer_weights(const ModelConfig& m, bool active) {
  int64_t weights = 0;
  for (int64_t layer = 0; layer < m.num_layers; ++layer) weights += m.layer_weights(layer, active);
  return weights;
}
// [layers]

}  // namespace

// [states]
int64_t num_parameters(const ModelConfig& m) {
  const int64_t embeddings = (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size;
  // [norms]
  const int64_t of_latents = m.mla.on() ? m.mla.norm_weights() : 0;
  const int64_t norms = (2 * m.num_layers + 1) * m.hidden_size + m.num_layers * of_latents;
  // [norms]
  // [parameters]
  return embeddings + norms + layer_weights(m, /*active=*/false);
  // [parameters]
}

StateBytes whole_states(int64_t parameters, const TrainConfig& config) {
  const DType dtype = parse_dtype(config.dtype);
  const int64_t n = parameters, own = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  int64_t gradient = acc;
  if (config.grad_accumulation == "bf16") gradient = own;
  if (config.grad_accumulation == "both") gradient = own + acc;
  const int64_t master = own == acc ? 0 : acc;
  return {n * own, n * gradient, n * (master + 2 * acc)};
}
// [states]

// [activations]
/// What the model that the run would build keeps, by its segments' formulas, and what else it asks
/// for, as fold_blocks() finds. It lies on meta, and its parameters have no memory yet. Returns
/// what its chunks ask for.
// [model]
static std::vector<PassBytes> add_activations(const TrainConfig& config, DryRank& dry,
                                              Prediction& prediction) {
  Model& model = dry.model;
  // [model]
  const DType dtype = parse_dtype(config.dtype);
  Pass pass;
  pass.num_samples = config.micro_batch_size;
  pass.seq_len = config.seq_len;
  pass.loss = Tensor::empty({1}, DType::f64);
  // [rows]
  const std::vector<int32_t> any(pass.num_samples * pass.seq_len);
  dry.view.context.take_rows(any, any, pass);
  // [rows]
  PassShape shape{pass.num_samples, pass.positions.count(), dtype};
  // [shape]
  shape.row_shares = config.tensor_parallel.row_shares();
  // [shape]
  std::vector<BlockFootprint> blocks = model.footprints(shape);
  const std::vector<BlockRange> chunks = model.ranges();
  model.part_blocks();
  model.parameters().allocate(dtype, /*seed=*/0);
  const auto folded = by_chunk(fold_blocks(model, shape, config.model.hidden_size, pass), chunks);
  const int64_t ids = shape.tokens() * bytes_of(DType::i32);
  prediction.saved = {{-1, "tokens", ids}, {-1, "targets", ids}};
  // [stage]
  const Schedule schedule = config.pipeline.schedule(config.grad_acc_steps);
  const BlockRange& first =
      chunks[schedule.actions[dry.stage_rank()].front().chunk];  // of the first pass
  std::erase_if(blocks, [&](const BlockFootprint& it) { return !first.contains(it.block); });
  // [stage]
  // [documents]
  const ContextParallelConfig& cp = config.context_parallel;  // documents of all rows that meet
  if (cp.document_mask) prediction.saved.push_back({-1, "documents", ids * cp.head_ranks()});
  // [documents]
  const int64_t batch = prediction.saved_bytes();
  for (const LiveBytes& part : kept_bytes(blocks)) prediction.saved.push_back(part);
  // [peak]
  const StageBytes bytes{batch, shape.rows() * config.model.hidden_size * shape.own()};
  add_bytes_from_stages(schedule, dry.stage_rank(), bytes, prediction.saved);
  prediction.peak_activations = peak_bytes_of_schedule(schedule, dry.stage_rank(), folded, bytes);
  // [peak]
  return folded;
}
// [activations]

// [flops]
double model_flops_per_token(const ModelConfig& m, double keys) {
  // [active]
  const double weights = double(layer_weights(m, /*active=*/true) + m.hidden_size * m.vocab_size);
  // [active]
  return 6 * weights + 12 * double(m.num_layers * m.num_heads * m.head_dim()) * keys;
}

/// Adds the operations of the model, or of a part of it.
static void add_flops(const TrainConfig& config, const ModelConfig& m, Prediction& prediction) {
  const double S = double(config.seq_len);
  // [share]
  const double keys = keys_of_a_query(config, prediction.rank);
  const double tokens = tokens_of_a_chunk(config);
  // [share]
  prediction.flops += tokens * model_flops_per_token(m, keys);
  prediction.book_flops += tokens * model_flops_per_token(m, S);
  // [recomputed]
  const double layers = 2 * double(layer_weights(m, /*active=*/true)) * tokens;
  // [recomputed]
  // One product of the (query, key) pairs with all heads' channels.
  const double product = double(m.num_layers * m.num_heads * m.head_dim()) * tokens * 2 * keys;
  double& again = prediction.recomputed_flops;
  if (config.attention == "blockwise") again += product;  // q by k, for the rows' probabilities
  if (config.attention == "naive" && config.recompute == "selective") again += 2 * product;
  // [again]
  const bool keeps = config.context_parallel.keeps_attention();
  if (config.recompute == "full") again += layers + (keeps ? 0 : 2 * product);
  // [again]
  // [expansions]
  again += double(m.num_layers) * tokens * expansion_flops_again(config);
  // [expansions]
}
// [flops]

// [rank]
Prediction predict(const TrainConfig& config, int rank) {
  DryRank dry(config, rank);
  Prediction prediction;
  prediction.rank = rank;
  // [rank]
  prediction.parameters = num_parameters(config.model);
  prediction.states = whole_states(prediction.parameters, config);
  prediction.book_states =
      book_whole_states(prediction.parameters, config.grad_accumulation == "both");
  prediction.book_activations = book_activations(config, config.recompute);
  // [sharded]
  shard_states(config, dry, add_activations(config, dry, prediction), prediction);
  shard_layers(config, dry.view.region, prediction);
  // [sharded]
  // [of_stage]
  for (const ModelConfig& chunk : chunk_models(config, dry.stage_rank())) {
    add_flops(config, chunk, prediction);
  }
  // [of_stage]
  prediction.execution =
      fmt::format("{} attention, recompute {}", config.attention, config.recompute);
  return prediction;
}

}  // namespace usp
