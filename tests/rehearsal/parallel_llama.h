#pragma once

#include "comm/mesh.h"
#include "context_parallel/attention.h"
#include "model.h"
#include "quantised_linear.h"
#include "tensor_parallel/linears.h"

/// The model of chapter 1 with parts of its layers exchanged.
namespace usp::rehearsal {

struct Plan {
  bool sequence_parallel = false;
  Quantisation quantisation = Quantisation::none;  ///< others: no tensor parallelism
};

/// A Llama with exchanged layers: which rank holds which part of which weight, and over which ranks
/// its gradient is summed.
class ParallelLlama {
 public:
  ParallelLlama(const ModelConfig& config, int64_t seq_len, const Plan& plan, const Mesh& mesh)
      : config_(config),
        plan_(plan),
        mesh_(mesh),
        region_({.tp_size = mesh.tp().size(), .sequence_parallel = plan.sequence_parallel},
                mesh.tp()),
        context_({.cp_size = mesh.cp().size()}, mesh.cp()),
        rope_(config, seq_len, DType::f64) {}

  int64_t num_blocks() const { return config_.num_layers + 2; }

  std::unique_ptr<Segment> embedding(ParameterList& parameters) const {
    Parameter& table = parameters.add(kTable, table_shape(), 0.02);
    if (tied() && mesh_.pp().size() > 1) table.grad_groups.push_back("embedding");
    return std::make_unique<VocabParallelEmbedding>(table, region_);
  }

  std::unique_ptr<Segment> attention(int64_t layer, ParameterList& parameters) const {
    const int64_t H = config_.hidden_size, D = config_.head_dim();
    const int64_t N = config_.num_heads, G = config_.num_kv_heads, tp = region_.size();
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const RmsNorm norm = make_norm(prefix + "input_layernorm.weight", parameters);
    const auto weight = [&](const char* name, const Shape& shape) -> Parameter& {
      return parameters.add(prefix + name, shape, 0.02);
    };
    Parameter& q = weight("self_attn.q_proj.weight", {N * D, H});
    Parameter& k = weight("self_attn.k_proj.weight", {G * D, H});
    Parameter& v = weight("self_attn.v_proj.weight", {G * D, H});
    Parameter& o = weight("self_attn.o_proj.weight", {H, N * D});
    for (Parameter* parameter : {&k, &v}) region_.share_kv_heads(*parameter, G);
    auto core = make_core_attention(N / tp, std::max<int64_t>(1, G / tp), D,
                                    Probabilities::never_whole, context_);
    return std::make_unique<Attention>(norm, column({&q, &k, &v}), rope_, std::move(core), row(o));
  }

  std::unique_ptr<Segment> mlp(int64_t layer, ParameterList& parameters) const {
    const int64_t H = config_.hidden_size, F = config_.ffn_hidden_size;
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const RmsNorm norm = make_norm(prefix + "post_attention_layernorm.weight", parameters);
    Parameter& gate = parameters.add(prefix + "mlp.gate_proj.weight", {F, H}, 0.02);
    Parameter& up = parameters.add(prefix + "mlp.up_proj.weight", {F, H}, 0.02);
    Parameter& down = parameters.add(prefix + "mlp.down_proj.weight", {H, F}, 0.02);
    return std::make_unique<Mlp>(norm, FeedForward(column({&gate, &up}), row(down)));
  }

  std::unique_ptr<Segment> head(ParameterList& parameters) const {
    const RmsNorm norm = make_norm("model.norm.weight", parameters);
    const bool shared = tied() && mesh_.pp().size() == 1;
    Parameter& table =
        shared ? parameters.find(kTable)
               : parameters.add(tied() ? kTable : "lm_head.weight", table_shape(), 0.02);
    if (tied() && !shared) table.grad_groups.push_back("embedding");
    auto lm_head = column({&table});
    return std::make_unique<Head>(
        norm, std::move(lm_head),
        std::make_unique<VocabParallelCrossEntropy>(table.offset(0), region_));
  }

  const ContextGroup& context() const { return context_; }
  const TensorRegion& region() const { return region_; }
  /// A weight that every rank of tp has.
  void replicate(Parameter& parameter) const { region_.replicate(parameter); }

 private:
  static constexpr const char* kTable = "model.embed_tokens.weight";

  bool tied() const { return config_.tie_word_embeddings; }
  Shape table_shape() const { return {config_.vocab_size, config_.hidden_size}; }

  RmsNorm make_norm(const std::string& name, ParameterList& parameters) const {
    Parameter& weight = parameters.add(name, {config_.hidden_size}, 0);
    replicate(weight);
    return {weight, config_.rms_norm_eps};
  }

  bool quantised() const { return plan_.quantisation != Quantisation::none; }
  std::unique_ptr<Linear> make_quantised(std::vector<Parameter*> weights) const {
    return std::make_unique<QuantisedLinear>(std::move(weights),
                                             plan_.quantisation == Quantisation::cached);
  }

  std::unique_ptr<Linear> column(std::vector<Parameter*> weights) const {
    if (quantised()) return make_quantised(std::move(weights));
    return make_column_parallel(std::move(weights), "column", region_);
  }
  std::unique_ptr<Linear> row(Parameter& weight) const {
    if (quantised()) return make_quantised({&weight});
    return make_row_parallel(weight, region_);
  }

  ModelConfig config_;
  Plan plan_;
  const Mesh& mesh_;
  TensorRegion region_;
  ContextGroup context_;
  RopeTable rope_;
};

}  // namespace usp::rehearsal
