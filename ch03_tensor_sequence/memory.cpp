#include "memory.h"

#include <fmt/format.h>

#include "model.h"
#include "tensor/runtime.h"
#include "tensor_accountant.h"
#include "zero_accountant.h"

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
/// What the segments of the model that the run would build say of themselves.
static void add_activations(TrainConfig config, Prediction& prediction) {
  Runtime meta(Device::meta);
  const Runtime::Use use(meta);
  const DType dtype = parse_dtype(config.dtype);
  // [shape]
  const PassShape shape{config.micro_batch_size, config.seq_len, dtype,
                        config.tensor_parallel.row_shares()};
  // [shape]
  config.seq_len = 1;  // a short table of rotations will do
  const std::vector<BlockFootprint> blocks = Model(config).footprints(shape);
  const int64_t ids = shape.tokens() * bytes_of(DType::i32);
  prediction.saved = {{-1, "tokens", ids}, {-1, "targets", ids}};
  for (const LiveBytes& part : kept_bytes(blocks)) prediction.saved.push_back(part);
  prediction.peak_activations = 2 * ids + peak_bytes(blocks);
}
// [activations]

// [flops]
double model_flops_per_token(const ModelConfig& m, double keys) {
  const double weights =
      double(m.num_layers * layer_matmul_weights(m) + m.hidden_size * m.vocab_size);
  return 6 * weights + 12 * double(m.num_layers * m.num_heads * m.head_dim()) * keys;
}

static void add_flops(const TrainConfig& config, Prediction& prediction) {
  const ModelConfig& m = config.model;
  const double S = double(config.seq_len);
  // [share]
  const double keys = (S + 1) / 2;  // that a query sees, on average
  const double tokens = double(config.micro_batch_size * config.grad_acc_steps) * S /
                        double(config.tensor_parallel.tp_size);  // a rank does 1/t of their work
  // [share]
  prediction.flops = tokens * model_flops_per_token(m, keys);
  prediction.book_flops = tokens * model_flops_per_token(m, S);
  const double layers = 2 * double(m.num_layers * layer_matmul_weights(m)) * tokens;
  // One product of the (query, key) pairs with all heads' channels.
  const double product = double(m.num_layers * m.num_heads * m.head_dim()) * tokens * 2 * keys;
  double& again = prediction.recomputed_flops;
  if (config.attention == "blockwise") again += product;  // q by k, for the rows' probabilities
  if (config.attention == "naive" && config.recompute == "selective") again += 2 * product;
  // [again]
  if (config.recompute == "full") again += layers + 2 * product;
  // [again]
}
// [flops]

// [predict]
Prediction predict(const TrainConfig& config) {
  Prediction prediction;
  prediction.parameters = num_parameters(config.model);
  // [states_of_a_rank]
  prediction.states = sharded_states(config);
  prediction.book_states = book_sharded_states(config);
  prediction.buffers = zero_buffers(config);
  add_tensor_scratch(config, prediction.buffers);
  prediction.book_activations = book_sharded_activations(config);
  // [states_of_a_rank]
  add_activations(config, prediction);
  add_flops(config, prediction);
  prediction.execution =
      fmt::format("{} attention, recompute {}", config.attention, config.recompute);
  return prediction;
}
// [predict]

}  // namespace usp
