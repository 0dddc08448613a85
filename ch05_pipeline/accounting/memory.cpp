#include "accounting/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "accounting/context_accountant.h"
#include "accounting/dry_rank.h"
#include "accounting/pipeline_accountant.h"
#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"
#include "train/fold.h"

namespace usp {

namespace {

/// Weights of one layer that multiply activations.
int64_t layer_matmul_weights(const ModelConfig& m) {
  const int64_t qkv = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim();
  return m.hidden_size * (qkv + m.num_heads * m.head_dim() + 3 * m.ffn_hidden_size);
}

}  // namespace

// [states]
int64_t num_parameters(const ModelConfig& m) {
  const int64_t embeddings = (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size;
  const int64_t norms = (2 * m.num_layers + 1) * m.hidden_size;
  return embeddings + norms + m.num_layers * layer_matmul_weights(m);
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
/// for, as fold_blocks() finds.
// [model]
static void add_activations(const TrainConfig& config, DryRank& rank, Prediction& prediction) {
  Model& model = rank.model;
  const std::vector<BlockRange> chunks = model.ranges();
  // [model]
  const DType dtype = parse_dtype(config.dtype);
  Pass pass;
  pass.num_samples = config.micro_batch_size;
  pass.seq_len = config.seq_len;
  pass.loss = Tensor::empty({1}, DType::f64);
  // [shape]
  const PassShape shape{config.micro_batch_size, config.seq_len / config.context_parallel.cp_size,
                        dtype, config.tensor_parallel.row_shares()};
  // [shape]
  // [rows]
  const std::vector<int32_t> any(config.micro_batch_size * config.seq_len);
  rank.view.context.take_rows(any, any, pass);
  // [rows]
  std::vector<BlockFootprint> blocks = model.footprints(shape);
  model.part_blocks();
  model.parameters().allocate(dtype, /*seed=*/0);
  const auto folded = fold_blocks(model, shape, config.model.hidden_size, pass);
  const int64_t ids = shape.tokens() * bytes_of(DType::i32);
  prediction.saved = {{-1, "tokens", ids}, {-1, "targets", ids}};
  // [stage]
  const Schedule schedule = config.pipeline.schedule(config.grad_acc_steps);
  const BlockRange& first =
      chunks[schedule.actions[rank.stage_rank()].front().chunk];  // of the first pass
  std::erase_if(blocks, [&](const BlockFootprint& it) { return !first.contains(it.block); });
  // [stage]
  // [documents]
  const ContextParallelConfig& cp = config.context_parallel;
  const int64_t begins = cp.document_mask ? ids * cp.head_ranks() : 0;  // of all rows that meet
  if (cp.document_mask) prediction.saved.push_back({-1, "documents", begins});
  // [documents]
  for (const LiveBytes& part : kept_bytes(blocks)) prediction.saved.push_back(part);
  // [peak]
  const StageBytes bytes{2 * ids + begins, shape.rows() * config.model.hidden_size * shape.own()};
  add_bytes_from_stages(schedule, rank.stage_rank(), bytes, prediction.saved);
  prediction.peak_activations =
      peak_bytes_of_schedule(schedule, rank.stage_rank(), by_chunk(folded, chunks), bytes);
  // [peak]
}
// [activations]

// [flops]
double model_flops_per_token(const ModelConfig& m, double keys) {
  const double weights =
      double(m.num_layers * layer_matmul_weights(m) + m.hidden_size * m.vocab_size);
  return 6 * weights + 12 * double(m.num_layers * m.num_heads * m.head_dim()) * keys;
}

/// Adds the operations of the model, or of a part of it.
static void add_flops(const TrainConfig& config, const ModelConfig& m, Prediction& prediction) {
  const double S = double(config.seq_len);
  // [share]
  const ContextParallelConfig& cp = config.context_parallel;
  const Stages stages = config.pipeline.schedule(config.grad_acc_steps).stages;
  const int64_t passes = stages.share_of(config.grad_acc_steps);
  const double tokens = double(config.micro_batch_size * passes) * S /
                        double(cp.cp_size * config.tensor_parallel.tp_size);
  const int64_t ring_place = config.mesh().place_of(prediction.rank).cp / cp.head_ranks();
  const Positions attended = cp.of_ring_place(config.seq_len, ring_place);
  const double keys =
      double(causal_pairs(attended, {0, config.seq_len})) / double(attended.count());
  // [share]
  prediction.flops += tokens * model_flops_per_token(m, keys);
  prediction.book_flops += tokens * model_flops_per_token(m, S);
  const double layers = 2 * double(m.num_layers * layer_matmul_weights(m)) * tokens;
  // One product of the (query, key) pairs with all heads' channels.
  const double product = double(m.num_layers * m.num_heads * m.head_dim()) * tokens * 2 * keys;
  double& again = prediction.recomputed_flops;
  if (config.attention == "blockwise") again += product;  // q by k, for the rows' probabilities
  if (config.attention == "naive" && config.recompute == "selective") again += 2 * product;
  // [again]
  const bool keeps = cp.cp_recompute == "keep" && cp.cp_size > 1;
  if (config.recompute == "full") again += layers + (keeps ? 0 : 2 * product);
  // [again]
}
// [flops]

// [predict]
// [rank]
Prediction predict(const TrainConfig& config, int rank) {
  DryRank dry(config, rank);
  Prediction prediction;
  prediction.rank = rank;
  // [rank]
  prediction.parameters = num_parameters(config.model);
  // [states_of_a_rank]
  const ZeroShapes shapes(config, dry);
  prediction.states = sharded_states(config, shapes);
  prediction.book_states = book_sharded_states(config);
  prediction.buffers = zero_buffers(config, shapes);
  add_tensor_scratch(config, dry.view.region, prediction.buffers);
  prediction.book_activations = book_sharded_activations(config);
  add_activations(config, dry, prediction);
  // [states_of_a_rank]
  // [of_stage]
  for (const ModelConfig& chunk : chunk_models(config, dry.stage_rank())) {
    add_flops(config, chunk, prediction);
  }
  // [of_stage]
  prediction.execution =
      fmt::format("{} attention, recompute {}", config.attention, config.recompute);
  return prediction;
}
// [predict]

}  // namespace usp
