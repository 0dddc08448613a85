#pragma once

#include "comm/mesh.h"
#include "model.h"
#include "quantised_linear.h"
#include "ring_attention.h"
#include "tensor_parallel.h"

/// The model of chapter 1 with parts of its layers exchanged.
namespace usp::rehearsal {

struct Plan {
  bool sequence_parallel = false;
  Quantisation quantisation = Quantisation::none;  ///< others: no tensor parallelism
};

/// What chapters 3 to 5 will make of Llama: which rank holds which part of which weight, and over
/// which ranks its gradient is summed.
class ParallelLlama {
 public:
  /// Adds groups to the mesh: tp_kv, the ranks of tp that share a kv head, and embedding, the first
  /// and the last stage.
  ParallelLlama(const ModelConfig& config, int64_t seq_len, const Plan& plan, Mesh& mesh)
      : config_(config), plan_(plan), mesh_(mesh), rope_(config, seq_len, DType::f64) {
    const int tp = mesh.tp().size(), sharers = std::max<int>(1, tp / int(config.num_kv_heads));
    mesh.add_group("tp_kv", mesh.tp().split("tp_kv", [=](int r) { return r / sharers; }));
    const int last = mesh.pp().size() - 1;
    mesh.add_group("embedding", mesh.pp().split("embedding", [=](int r) {
      return r == 0 || r == last ? 0 : r;
    }));
  }

  int64_t num_blocks() const { return config_.num_layers + 2; }

  std::unique_ptr<Segment> embedding(ParameterList& parameters) const {
    Parameter& weight =
        parameters.add("model.embed_tokens.weight", {config_.vocab_size, config_.hidden_size}, 0.02,
                       {share(0, config_.vocab_size)});
    if (tied() && mesh_.pp().size() > 1) weight.grad_groups.push_back("embedding");
    return std::make_unique<VocabParallelEmbedding>(weight, mesh_.tp(), plan_.sequence_parallel);
  }

  std::unique_ptr<Segment> attention(int64_t layer, ParameterList& parameters) const {
    const int64_t H = config_.hidden_size, D = config_.head_dim();
    const int64_t N = config_.num_heads, G = config_.num_kv_heads, tp = mesh_.tp().size();
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const RmsNorm norm = make_norm(prefix + "input_layernorm.weight", parameters);
    const int64_t local_kv_heads = std::max<int64_t>(1, G / tp);
    const Slice heads = share(0, N * D);
    const Slice kv_heads{0, mesh_.tp().rank() * G / tp * D, local_kv_heads * D};
    const auto weight = [&](const char* name, const Shape& shape, Slice slice) -> Parameter& {
      return parameters.add(prefix + name, shape, 0.02, {slice});
    };
    Parameter& q = weight("self_attn.q_proj.weight", {N * D, H}, heads);
    Parameter& k = weight("self_attn.k_proj.weight", {G * D, H}, kv_heads);
    Parameter& v = weight("self_attn.v_proj.weight", {G * D, H}, kv_heads);
    Parameter& o = weight("self_attn.o_proj.weight", {H, N * D}, {1, heads.offset, heads.length});
    for (Parameter* parameter : {&k, &v}) {
      if (mesh_.group("tp_kv").size() == 1) continue;
      parameter->grad_groups.push_back("tp_kv");
      parameter->counted = mesh_.group("tp_kv").rank() == 0;
    }
    return std::make_unique<Attention>(
        norm, column({&q, &k, &v}), rope_,
        std::make_unique<RingAttention>(N / tp, local_kv_heads, D, mesh_.cp()), row({&o}));
  }

  std::unique_ptr<Segment> mlp(int64_t layer, ParameterList& parameters) const {
    const int64_t H = config_.hidden_size, F = config_.ffn_hidden_size;
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const RmsNorm norm = make_norm(prefix + "post_attention_layernorm.weight", parameters);
    const Slice rows = share(0, F), columns = share(1, F);
    Parameter& gate = parameters.add(prefix + "mlp.gate_proj.weight", {F, H}, 0.02, {rows});
    Parameter& up = parameters.add(prefix + "mlp.up_proj.weight", {F, H}, 0.02, {rows});
    Parameter& down = parameters.add(prefix + "mlp.down_proj.weight", {H, F}, 0.02, {columns});
    return std::make_unique<Mlp>(norm, FeedForward(column({&gate, &up}), row({&down})));
  }

  std::unique_ptr<Segment> head(ParameterList& parameters) const {
    const RmsNorm norm = make_norm("model.norm.weight", parameters);
    const bool shared = tied() && mesh_.pp().size() == 1;
    Parameter& weight =
        shared ? parameters.find("model.embed_tokens.weight")
               : parameters.add(tied() ? "model.embed_tokens.weight" : "lm_head.weight",
                                {config_.vocab_size, config_.hidden_size}, 0.02,
                                {share(0, config_.vocab_size)});
    if (tied() && !shared) {
      weight.grad_groups.push_back("embedding");
      weight.counted = false;  // the first stage's is
    }
    return std::make_unique<Head>(
        norm, column({&weight}),
        std::make_unique<VocabParallelCrossEntropy>(weight.offset(0), mesh_.tp()));
  }

  /// A weight that every rank of tp has: its gradient is whole where the rank sees all tokens.
  void replicate(Parameter& parameter) const {
    if (plan_.sequence_parallel) parameter.grad_groups.push_back("tp");
    parameter.counted = mesh_.tp().rank() == 0;
  }

 private:
  bool tied() const { return config_.tie_word_embeddings; }

  /// This rank's part of an axis; the parts may differ by one.
  Slice share(int axis, int64_t length) const {
    const int64_t r = mesh_.tp().rank(), n = mesh_.tp().size();
    const int64_t begin = length * r / n, end = length * (r + 1) / n;
    return {axis, begin, end - begin};
  }

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
    return std::make_unique<ColumnParallelLinear>(std::move(weights), mesh_.tp(),
                                                  plan_.sequence_parallel);
  }
  std::unique_ptr<Linear> row(std::vector<Parameter*> weights) const {
    if (quantised()) return make_quantised(std::move(weights));
    return std::make_unique<RowParallelLinear>(std::move(weights), mesh_.tp(),
                                               plan_.sequence_parallel);
  }

  ModelConfig config_;
  Plan plan_;
  const Mesh& mesh_;
  RopeTable rope_;
};

}  // namespace usp::rehearsal
