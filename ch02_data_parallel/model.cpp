#include "model.h"

#include "runtime.h"

namespace usp {

// [model_init]
Model::Model(const ModelConfig& config, int64_t seq_len, DType dtype, bool store_probabilities,
             uint64_t seed) {
  const RopeTable rope(config, seq_len, dtype);
  Parameter& embedding =
      parameters_.add("model.embed_tokens.weight", {config.vocab_size, config.hidden_size}, 0.02);
  blocks_.emplace_back().push_back(std::make_unique<Embedding>(embedding));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    Block& block = blocks_.emplace_back();
    block.push_back(
        std::make_unique<Attention>(parameters_, config, layer, rope, store_probabilities));
    block.push_back(std::make_unique<Mlp>(parameters_, config, layer));
  }
  const RmsNorm norm(parameters_.add("model.norm.weight", {config.hidden_size}, 0),
                     config.rms_norm_eps);
  Parameter& lm_head =
      config.tie_word_embeddings
          ? embedding
          : parameters_.add("lm_head.weight", {config.vocab_size, config.hidden_size}, 0.02);
  blocks_.emplace_back().push_back(std::make_unique<Head>(norm, Linear({&lm_head})));
  parameters_.allocate(dtype, seed);
}
// [model_init]

// [model]
Model::Activations Model::forward(const Pass& pass) {
  const TraceScope trace("forward");
  Activations activations(blocks_.size());
  Tensor x;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    activations[b].resize(blocks_[b].size());
    for (size_t s = 0; s < blocks_[b].size(); ++s) {
      x = blocks_[b][s]->forward(x, activations[b][s], pass);
    }
  }
  return activations;
}

void Model::backward(Activations activations, Grads& grads, const Pass& pass) {
  const TraceScope trace("backward");
  Tensor dx;
  for (size_t b = blocks_.size(); b-- > 0;) {
    for (size_t s = blocks_[b].size(); s-- > 0;) {
      dx = blocks_[b][s]->backward(dx, activations[b][s], grads, pass);
      activations[b].pop_back();  // its memory serves the blocks still to come
    }
  }
}
// [model]

void Model::evaluate(const Pass& pass) {
  Tensor x;
  for (const Block& block : blocks_) {
    for (const auto& segment : block) {
      Saved dropped;
      x = segment->forward(x, dropped, pass);
    }
  }
}

Tensor Model::logits(const Pass& pass) {
  Tensor x;
  for (size_t b = 0; b + 1 < blocks_.size(); ++b) {
    for (const auto& segment : blocks_[b]) {
      Saved dropped;
      x = segment->forward(x, dropped, pass);
    }
  }
  return dynamic_cast<const Head&>(*blocks_.back().back()).logits(x);
}

double model_flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const double h = double(config.hidden_size), layers = double(config.num_layers);
  const double kv = double(config.num_kv_heads * config.head_dim());
  const double attention = 2 * h * h + 2 * h * kv;            // q and o; k and v
  const double mlp = 3 * h * double(config.ffn_hidden_size);  // gate, up and down
  const double lm_head = h * double(config.vocab_size);
  return 6 * (layers * (attention + mlp) + lm_head) + 12 * layers * h * double(seq_len);
}

}  // namespace usp
