#include "train/expert_shape.h"

#include <algorithm>

#include "base/rules.h"

namespace usp {

int64_t ExpertShape::layers(int64_t first, int64_t count) const {
  return num_experts == 0 ? 0
                          : first + count - std::clamp(first_dense_layers, first, first + count);
}

int64_t ExpertShape::weights(int64_t hidden_size, int64_t ffn_hidden_size, bool active) const {
  const int64_t experts = num_shared_experts + (active ? num_experts_per_tok : num_experts);
  return hidden_size * (num_experts + 3 * width(ffn_hidden_size) * experts);
}

void ExpertShape::bind(Args& args) {
  args.group("Experts");
  args.bind("num_experts", num_experts, "experts of a layer; 0: every MLP is dense");
  args.bind("num_experts_per_tok", num_experts_per_tok, "experts that each token is sent to");
  args.bind("moe_ffn_hidden_size", moe_ffn_hidden_size, "width of an expert; 0: ffn_hidden_size");
  args.bind("num_shared_experts", num_shared_experts, "experts that every token is sent to");
  args.bind("first_dense_layers", first_dense_layers,
            "layers at the beginning whose MLP stays dense");
  args.bind("router_score", router_score, {"softmax", "sigmoid"},
            "how the router's logits become scores: they add up to 1, or each stands for itself");
  args.bind("norm_topk_prob", norm_topk_prob, "divide a token's gates by their sum");
  args.bind("routed_scaling_factor", routed_scaling_factor, "factor of all gates");
  args.bind("expert_nodes", expert_nodes,
            "nodes that a layer's experts lie on, for route_nodes; where a run has others, the "
            "results are the same and less is saved");
  args.bind("route_nodes", route_nodes, "nodes that a token is sent to at most; 0: any number");
  // A program without experts has a model without them.
  args.decide_result([this] {
    return num_experts > 0 ? std::vector<std::string>{"num_experts"} : std::vector<std::string>{};
  });
}

void ExpertShape::validate(const Args& args, int64_t num_layers) const {
  check_range("num_experts", double(num_experts), 0, 1 << 16);
  if (num_experts == 0) {
    for (const char* flag : {"num_experts_per_tok", "moe_ffn_hidden_size", "num_shared_experts",
                             "first_dense_layers", "router_score", "norm_topk_prob",
                             "routed_scaling_factor", "expert_nodes", "route_nodes"}) {
      if (!args.given(flag)) continue;
      refuse_silent("flag_of_experts", {"--num_experts 8", fmt::format("leave out --{}", flag)},
                    "{} needs experts", flag);
    }
    return;
  }
  check_range("num_experts_per_tok", double(num_experts_per_tok), 1, double(num_experts));
  check_range("moe_ffn_hidden_size", double(moe_ffn_hidden_size), 0, 1 << 24);
  check_range("num_shared_experts", double(num_shared_experts), 0, 1 << 10);
  check_range("first_dense_layers", double(first_dense_layers), 0, double(num_layers - 1));
  check_range("routed_scaling_factor", routed_scaling_factor, 1e-6, 1e6);
  check_positive("expert_nodes", expert_nodes);
  if (num_experts % expert_nodes != 0) {
    refuse("nodes_of_experts", divisors_of("expert_nodes", num_experts),
           "expert_nodes={} must divide num_experts={}", expert_nodes, num_experts);
  }
  check_range("route_nodes", double(route_nodes), 0, double(num_experts));
  if (route_nodes > expert_nodes) {
    int64_t enough = route_nodes;
    while (num_experts % enough != 0) ++enough;
    refuse("routes_to_nodes", values_of("expert_nodes", {enough}),
           "route_nodes={} must be at most expert_nodes={}", route_nodes, expert_nodes);
  }
  const int64_t within_reach = nodes_of_token() * (num_experts / expert_nodes);
  if (within_reach < num_experts_per_tok) {
    const int64_t enough = (num_experts_per_tok * expert_nodes + num_experts - 1) / num_experts;
    refuse("routes_to_choices", values_of("route_nodes", {enough}),
           "route_nodes={} nodes of {} experts are fewer than num_experts_per_tok={}",
           nodes_of_token(), num_experts / expert_nodes, num_experts_per_tok);
  }
}

}  // namespace usp
