#include "model.h"

#include <cmath>

#include "pretrained.h"
#include "runtime.h"

namespace usp {

namespace {

constexpr double kInitStd = 0.02;

/// Each block adds twice to the residual stream; smaller weights there keep its variance from
/// growing with depth. Radford et al. (2019).
double residual_init_std(const ModelConfig& config) {
  return kInitStd / std::sqrt(2.0 * double(config.num_layers));
}

std::string layer_name(int64_t layer, const char* rest) {
  return fmt::format("model.layers.{}.{}", layer, rest);
}

/// Of x [T, H], the last row of every sample: [B, H].
Tensor last_positions(const Tensor& x, const Pass& pass) {
  const int64_t B = pass.num_samples, S = pass.positions.count(), H = x.size(1);
  return x.view({B, S, H}).narrow(1, S - 1, 1).to_contiguous().view({B, H});
}

constexpr const char* kEmbedding = "model.embed_tokens.weight";

}  // namespace

Llama::Llama(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities)
    : config_(config), probabilities_(probabilities), rope_(config, seq_len, dtype) {}

Block Llama::build(int64_t block, ParameterList& parameters) const {
  Block segments;
  if (block == 0) {
    segments.push_back(embedding(parameters));
  } else if (block == num_blocks() - 1) {
    segments.push_back(head(parameters));
  } else {
    segments.push_back(attention(block - 1, parameters));
    segments.push_back(mlp(block - 1, parameters));
  }
  return segments;
}

// [llama]
std::unique_ptr<Segment> Llama::embedding(ParameterList& parameters) const {
  return std::make_unique<Embedding>(
      parameters.add(kEmbedding, {config_.vocab_size, config_.hidden_size}, kInitStd));
}

std::unique_ptr<Segment> Llama::attention(int64_t layer, ParameterList& parameters) const {
  const int64_t H = config_.hidden_size, D = config_.head_dim();
  const int64_t N = config_.num_heads, G = config_.num_kv_heads;
  const auto weight = [&](const char* name, const Shape& shape, double init_std) -> Parameter& {
    return parameters.add(layer_name(layer, name), shape, init_std);
  };
  const RmsNorm norm(weight("input_layernorm.weight", {H}, 0), config_.rms_norm_eps);
  Parameter& q = weight("self_attn.q_proj.weight", {N * D, H}, kInitStd);
  Parameter& k = weight("self_attn.k_proj.weight", {G * D, H}, kInitStd);
  Parameter& v = weight("self_attn.v_proj.weight", {G * D, H}, kInitStd);
  Parameter& o = weight("self_attn.o_proj.weight", {H, N * D}, residual_init_std(config_));
  return std::make_unique<Attention>(norm, std::make_unique<Linear>(std::vector{&q, &k, &v}, "qkv"),
                                     rope_,
                                     std::make_unique<CoreAttention>(N, G, D, probabilities_),
                                     std::make_unique<Linear>(std::vector{&o}, "residual"));
}

std::unique_ptr<Segment> Llama::mlp(int64_t layer, ParameterList& parameters) const {
  const int64_t H = config_.hidden_size, F = config_.ffn_hidden_size;
  const auto weight = [&](const char* name, const Shape& shape, double init_std) -> Parameter& {
    return parameters.add(layer_name(layer, name), shape, init_std);
  };
  const RmsNorm norm(weight("post_attention_layernorm.weight", {H}, 0), config_.rms_norm_eps);
  Parameter& gate = weight("mlp.gate_proj.weight", {F, H}, kInitStd);
  Parameter& up = weight("mlp.up_proj.weight", {F, H}, kInitStd);
  Parameter& down = weight("mlp.down_proj.weight", {H, F}, residual_init_std(config_));
  return std::make_unique<Mlp>(
      norm, FeedForward(std::make_unique<Linear>(std::vector{&gate, &up}, "gate_up"),
                        std::make_unique<Linear>(std::vector{&down}, "residual")));
}

std::unique_ptr<Segment> Llama::head(ParameterList& parameters) const {
  const RmsNorm norm(parameters.add("model.norm.weight", {config_.hidden_size}, 0),
                     config_.rms_norm_eps);
  Parameter& lm_head =
      config_.tie_word_embeddings
          ? parameters.find(kEmbedding)
          : parameters.add("lm_head.weight", {config_.vocab_size, config_.hidden_size}, kInitStd);
  return std::make_unique<Head>(norm, std::make_unique<Linear>(std::vector{&lm_head}, "logits"),
                                std::make_unique<CrossEntropy>(/*vocab_offset=*/0));
}
// [llama]

Model::Model(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities,
             uint64_t seed, GradAccumulation accumulation)
    : Model(config, seq_len, dtype, probabilities) {
  parameters_.allocate(dtype, seed, accumulation);
  if (config.pretrained) load_pretrained(parameters_, config.model);
}

Model::Model(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities)
    : Model(
          [llama = Llama(config, seq_len, dtype, probabilities)](
              int64_t block, ParameterList& parameters) { return llama.build(block, parameters); },
          {{0, config.num_layers + 2}}) {}

Model::Model(const BuildBlock& build, const std::vector<BlockRange>& chunks) : ranges_(chunks) {
  for (const BlockRange& range : chunks) {
    std::vector<Block>& blocks = chunks_.emplace_back();
    for (int64_t block = range.begin; block < range.end; ++block) {
      const size_t first = parameters_.size();
      blocks.push_back(build(block, parameters_));
      for (size_t i = first; i < parameters_.size(); ++i) parameters_[i].block = block;
    }
  }
}

namespace {

/// What is made and traced while it lives belongs to a block.
struct BlockAtWork {
  explicit BlockAtWork(int64_t block) : memory(block), trace("block", {.number = block}) {}

  BlockScope memory;
  TraceScope trace;
};

Tensor forward_block(const Block& block, Tensor x, Saved& saved, const Pass& pass) {
  for (const auto& segment : block) {
    const TraceScope of_segment(segment->name());
    x = segment->forward(x, saved, pass);
  }
  return x;
}

}  // namespace

// [model]
Tensor Model::forward_chunk(int64_t chunk, Tensor x, Activations* activations, const Pass& pass) {
  const TraceScope trace("forward", {.micro_batch = pass.micro_batch});
  const std::vector<Block>& blocks = chunks_[chunk];
  for (size_t b = 0; b < blocks.size(); ++b) {
    const int64_t block = ranges_[chunk].begin + int64_t(b);
    const BlockAtWork at_work(block);
    const bool input_only = activations != nullptr && recomputes(block);
    Saved saved, input;
    if (input_only) input.emplace<BlockInput>().x = x;
    x = forward_block(blocks[b], x, saved, pass);
    if (activations != nullptr) activations->push_back(std::move(input_only ? input : saved));
  }
  return x;
}

Tensor Model::backward_chunk(int64_t chunk, Tensor dy, Activations activations, Grads& grads,
                             const Pass& pass) {
  const TraceScope trace("backward", {.micro_batch = pass.micro_batch});
  const std::vector<Block>& blocks = chunks_[chunk];
  USP_CHECK(activations.size() == blocks.size(), "activations of {} blocks, for a chunk of {}",
            activations.size(), blocks.size());
  for (size_t b = blocks.size(); b-- > 0;) {
    const int64_t block = ranges_[chunk].begin + int64_t(b);
    const BlockAtWork at_work(block);
    if (recomputes(block)) run_again(blocks[b], activations[b], pass);
    for (size_t s = blocks[b].size(); s-- > 0;) {
      const TraceScope of_segment(blocks[b][s]->name());
      dy = blocks[b][s]->backward(dy, activations[b], grads, pass);
    }
  }
  return dy;
}

// [model]

// [recompute]
bool Model::recomputes(int64_t block) const {
  return recomputed_.begin <= block && block < recomputed_.end;
}

void Model::run_again(const Block& block, Saved& saved, Pass pass) {
  const TraceScope trace("recompute");
  const RecomputeScope again;
  pass.mode = Pass::Mode::recompute;
  forward_block(block, saved.take<BlockInput>().x, saved, pass);
}
// [recompute]

Model::Activations Model::forward(const Pass& pass) {
  Activations activations;
  forward_chunk(0, {}, &activations, pass);
  return activations;
}

void Model::backward(Activations activations, Grads& grads, const Pass& pass) {
  backward_chunk(0, {}, std::move(activations), grads, pass);
}

void Model::evaluate(const Pass& pass) { forward_chunk(0, {}, nullptr, pass); }

Tensor Model::logits(const Pass& pass) {
  Tensor x;
  const std::vector<Block>& blocks = chunks_[0];
  for (size_t b = 0; b + 1 < blocks.size(); ++b) {
    Saved dropped;
    for (const auto& segment : blocks[b]) x = segment->forward(x, dropped, pass);
  }
  if (pass.mode == Pass::Mode::decode) x = last_positions(x, pass);
  return dynamic_cast<const Head&>(*blocks.back().back()).logits(x);
}

double model_flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const double h = double(config.hidden_size), layers = double(config.num_layers);
  const double q = double(config.num_heads * config.head_dim());
  const double kv = double(config.num_kv_heads * config.head_dim());
  const double attention = 2 * h * q + 2 * h * kv;            // q and o; k and v
  const double mlp = 3 * h * double(config.ffn_hidden_size);  // gate, up and down
  const double lm_head = h * double(config.vocab_size);
  return 6 * (layers * (attention + mlp) + lm_head) + 12 * layers * q * double(seq_len);
}

}  // namespace usp
