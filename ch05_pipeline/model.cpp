#include "model.h"

#include <algorithm>
#include <cmath>

#include "context_parallel/attention.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

constexpr double kInitStd = 0.02;

/// Each block adds twice to the residual stream; smaller weights there keep its variance from
/// growing with depth. Radford et al. (2019), https://openai.com/blog/better-language-models.
double residual_init_std(const ModelConfig& config) {
  return kInitStd / std::sqrt(2.0 * double(config.num_layers));
}

std::string layer_name(int64_t layer, const char* rest) {
  return fmt::format("model.layers.{}.{}", layer, rest);
}

Probabilities probabilities(const TrainConfig& config) {
  if (config.attention == "blockwise") return Probabilities::never_whole;
  return config.recompute == "selective" ? Probabilities::recomputed : Probabilities::stored;
}

constexpr const char* kEmbedding = "model.embed_tokens.weight";

Tensor forward_block(const Block& block, Tensor x, BlockSaved& saved, const Pass& pass) {
  for (const auto& segment : block) {
    const TraceScope of_segment(segment->name());
    x = segment->forward(x, saved, pass);
  }
  return x;
}

const Head* as_head(const std::unique_ptr<Segment>& segment) {
  return dynamic_cast<const Head*>(segment.get());
}

}  // namespace

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

// [embedding]
std::unique_ptr<Segment> Llama::embedding(ParameterList& parameters) const {
  // [table]
  Parameter& table =
      config_.tie_word_embeddings
          ? tied_table(parameters)
          : parameters.add(kEmbedding, {config_.vocab_size, config_.hidden_size}, kInitStd);
  // [table]
  return std::make_unique<VocabParallelEmbedding>(table, options_.view.region);
}
// [embedding]

// [tied]
Parameter& Llama::tied_table(ParameterList& parameters) const {
  if (parameters.has(kEmbedding)) return parameters.find(kEmbedding);
  Parameter& table =
      parameters.add(kEmbedding, {config_.vocab_size, config_.hidden_size}, kInitStd);
  if (options_.view.blocks.ends_apart) table.grad_groups.push_back("embedding");
  return table;
}
// [tied]

// [attention]
std::unique_ptr<Segment> Llama::attention(int64_t layer, ParameterList& parameters) const {
  const int64_t H = config_.hidden_size, D = config_.head_dim();
  const int64_t N = config_.num_heads, G = config_.num_kv_heads;
  const auto weight = [&](const char* name, const Shape& shape, double init_std) -> Parameter& {
    return parameters.add(layer_name(layer, name), shape, init_std);
  };
  Parameter& norm = weight("input_layernorm.weight", {H}, 0);
  Parameter& q = weight("self_attn.q_proj.weight", {N * D, H}, kInitStd);
  Parameter& k = weight("self_attn.k_proj.weight", {G * D, H}, kInitStd);
  Parameter& v = weight("self_attn.v_proj.weight", {G * D, H}, kInitStd);
  Parameter& o = weight("self_attn.o_proj.weight", {H, N * D}, residual_init_std(config_));
  options_.view.region.replicate(norm);
  auto qkv_proj = make_qkv_parallel(q, k, v, G, options_.view.region);
  auto core = make_core_attention(options_.view.region.heads(N), options_.view.region.heads(G), D,
                                  options_.probabilities, options_.view.context);
  auto o_proj = make_row_parallel(o, options_.view.region);
  return std::make_unique<Attention>(RmsNorm(norm, config_.rms_norm_eps), std::move(qkv_proj),
                                     rope_, std::move(core), std::move(o_proj));
}
// [attention]

// [mlp]
std::unique_ptr<Segment> Llama::mlp(int64_t layer, ParameterList& parameters) const {
  const int64_t H = config_.hidden_size, F = config_.ffn_hidden_size;
  const auto weight = [&](const char* name, const Shape& shape, double init_std) -> Parameter& {
    return parameters.add(layer_name(layer, name), shape, init_std);
  };
  Parameter& norm = weight("post_attention_layernorm.weight", {H}, 0);
  Parameter& gate = weight("mlp.gate_proj.weight", {F, H}, kInitStd);
  Parameter& up = weight("mlp.up_proj.weight", {F, H}, kInitStd);
  Parameter& down = weight("mlp.down_proj.weight", {H, F}, residual_init_std(config_));
  options_.view.region.replicate(norm);
  auto gate_up_proj = make_column_parallel({&gate, &up}, "gate_up", options_.view.region);
  auto down_proj = make_row_parallel(down, options_.view.region, /*ends_block=*/true);
  return std::make_unique<Mlp>(RmsNorm(norm, config_.rms_norm_eps),
                               FeedForward(std::move(gate_up_proj), std::move(down_proj)));
}
// [mlp]

// [head]
std::unique_ptr<Segment> Llama::head(ParameterList& parameters) const {
  const int64_t V = config_.vocab_size, H = config_.hidden_size;
  Parameter& norm = parameters.add("model.norm.weight", {H}, 0);
  // [head_table]
  Parameter& table = config_.tie_word_embeddings
                         ? tied_table(parameters)
                         : parameters.add("lm_head.weight", {V, H}, kInitStd);
  // [head_table]
  options_.view.region.replicate(norm);
  auto lm_head = make_column_parallel({&table}, "logits", options_.view.region);
  auto loss = std::make_unique<VocabParallelCrossEntropy>(table.offset(0), options_.view.region);
  return std::make_unique<Head>(RmsNorm(norm, config_.rms_norm_eps), std::move(lm_head),
                                std::move(loss));
}
// [head]

Model::Model(const BuildBlock& build, const std::vector<BlockRange>& chunks) {
  build_chunks(build, chunks);
}

void Model::build_chunks(const BuildBlock& build, const std::vector<BlockRange>& chunks) {
  ranges_ = chunks;
  for (const BlockRange& range : chunks) {
    std::vector<Block>& blocks = chunks_.emplace_back();
    for (int64_t block = range.begin; block < range.end; ++block) {
      blocks.push_back(build(block, parameters_));
      parameters_.end_block(block);
    }
  }
}

// [model]
Model::Model(const TrainConfig& config, const RankView& view) {
  LlamaOptions options{config.seq_len, parse_dtype(config.dtype), probabilities(config)};
  options.view = view;
  const Llama llama(config.model, options);
  build_chunks([&](int64_t block, ParameterList& list) { return llama.build(block, list); },
               view.blocks.chunks);
  // [model]
  // The embedding keeps nothing but its tokens, and what the head keeps is needed at once.
  if (config.recompute == "full") recompute({1, config.model.num_layers + 1});
}

Tensor Model::forward_chunk(int64_t chunk, Tensor x, Activations* activations, const Pass& pass) {
  const TraceScope trace("forward", {.micro_batch = pass.micro_batch});
  const std::vector<Block>& blocks = chunks_[chunk];
  for (size_t b = 0; b < blocks.size(); ++b) {
    const int64_t block = ranges_[chunk].begin + int64_t(b);
    const BlockAtWork at_work(block);
    const bool input_only = activations != nullptr && recomputes(block);
    BlockSaved saved, input;
    if (input_only) input.emplace<BlockInput>().x = x;
    x = forward_block(blocks[b], x, saved, pass);
    // [keep]
    if (input_only) {
      for (const auto& segment : blocks[b]) segment->keep_through_recompute(saved, input);
    }
    // [keep]
    if (activations != nullptr) activations->push_back(std::move(input_only ? input : saved));
  }
  return x;
}

// [recompute]
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

void Model::run_again(const Block& block, BlockSaved& saved, Pass pass) {
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

Tensor Model::logits(const Pass& pass) {
  USP_CHECK(
      chunks_.size() == 1 && ranges_[0].begin == 0 &&
          std::ranges::any_of(chunks_[0].back(), as_head),
      "logits need one chunk from the embedding to the head; here are {}, the first of blocks "
      "{} to {}",
      chunks_.size(), ranges_[0].begin, ranges_[0].end - 1);
  return logits_of_chunk(0, {}, pass);
}

Tensor Model::logits_of_chunk(int64_t chunk, Tensor x, const Pass& pass) {
  for (const Block& block : chunks_[chunk]) {
    BlockSaved dropped;
    for (const auto& segment : block) {  // also those that others put around the model's own
      const Head* head = as_head(segment);
      if (head && pass.mode == Pass::Mode::decode) x = last_positions(x, pass);
      x = head ? head->logits(x, pass) : segment->forward(x, dropped, pass);
    }
  }
  return x;
}

void Model::part_blocks() {
  std::vector<BlockRange> ranges;
  std::vector<std::vector<Block>> chunks;
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    int64_t number = ranges_[chunk].begin;
    for (Block& block : chunks_[chunk]) {
      chunks.emplace_back().push_back(std::move(block));
      ranges.push_back({number, number + 1});
      ++number;
    }
  }
  ranges_ = std::move(ranges);
  chunks_ = std::move(chunks);
}

std::vector<BlockFootprint> Model::footprints(const PassShape& shape) const {
  std::vector<BlockFootprint> footprints;
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    int64_t number = ranges_[chunk].begin;
    for (const Block& block : chunks_[chunk]) {
      footprints.push_back({number, recomputes(number), footprints_of(block, shape)});
      ++number;
    }
  }
  return footprints;
}

}  // namespace usp
