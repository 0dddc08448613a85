#pragma once

#include <cstdint>
#include <string>

#include "base/args.h"

namespace usp {

/// The mixture of experts of a model: which layers have one, and how a token's experts are chosen.
/// Flags by Hugging Face's names. Of a model without one, num_experts is 0.
struct ExpertShape {
  int64_t num_experts = 0;          ///< E, beside the shared ones
  int64_t num_experts_per_tok = 2;  ///< k
  int64_t moe_ffn_hidden_size = 0;  ///< width of an expert; 0: ffn_hidden_size
  int64_t num_shared_experts = 0;   ///< so many experts' widths that every token goes through
  int64_t first_dense_layers = 0;   ///< layers at the beginning that have a plain MLP
  std::string router_score = "softmax";
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1;
  int64_t expert_nodes = 1;  ///< groups of experts in a row, among which a token chooses first
  int64_t route_nodes = 0;   ///< groups that a token may choose experts in; 0: all
  bool choice_bias = false;  ///< a directory has the routers' biases, which decide choices

  /// Whether layer `layer` has experts.
  bool at(int64_t layer) const { return num_experts > 0 && layer >= first_dense_layers; }
  /// Layers with experts, among this many from `first` on.
  int64_t layers(int64_t first, int64_t count) const;
  /// F of an expert, in a model whose MLPs have this width.
  int64_t width(int64_t ffn_hidden_size) const {
    return moe_ffn_hidden_size > 0 ? moe_ffn_hidden_size : ffn_hidden_size;
  }
  /// Weights of a layer's router and experts: all of them, or those that one token meets.
  int64_t weights(int64_t hidden_size, int64_t ffn_hidden_size, bool active) const;
  int64_t nodes_of_token() const { return route_nodes > 0 ? route_nodes : expert_nodes; }

  void bind(Args& args);
  /// Throws UsageError where the numbers do not go together.
  void validate(const Args& args, int64_t num_layers) const;
};

}  // namespace usp
