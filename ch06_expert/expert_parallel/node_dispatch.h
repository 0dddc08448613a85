#pragma once

#include <span>

#include "expert_parallel/moe.h"

/// Tokens that reach their experts in two stages: a copy for each node, between ranks at the same
/// place in their nodes (a rail), and from there a copy for each expert. Outputs go back the same
/// way, summed in the node. What crosses nodes is one row for each node of a token, however many of
/// its experts lie there. DeepSeek-AI, DeepEP (2025), https://github.com/deepseek-ai/DeepEP.
///
/// Dimensions: as in moe.h, and n nodes of ep/n ranks, with E/n experts each; C copies of tokens
/// that have come to this rank from its rail.
namespace usp {

struct TrainConfig;

// [groups]
/// The ranks of ep as a grid. Between nodes, a node is to a token what an expert is otherwise.
struct NodeGroups {
  ExpertGroup between;  ///< "ep_rail": n ranks, each the one at this rank's place in its node
  ExpertGroup within;   ///< "ep_node": those of this rank's node, which shard its experts

  /// Throws Error where the ranks of a node, by Engine::node_size(), do not lie in a row, or where
  /// one has more of them than another. Collective over ep.
  NodeGroups(const ExpertConfig& config, const Communicator& ep);
};
// [groups]

/// Fills slots and rows for the copies that go from node to node, and `in_node` for what becomes of
/// those that come here. kept [T, k] i32: the choices that are not dropped, of E experts.
void route_by_node(Routing& routing, const Tensor& kept, int64_t E, const NodeGroups& nodes);

/// What this many tokens make a rank send and receive of copies where nodes are equally popular.
EvenRows even_copies(int64_t tokens, int64_t k, const NodeGroups& nodes);
/// And how many choices its node then serves for the copies that come to it.
int64_t choices_in_node(int64_t tokens, int64_t k, const NodeGroups& nodes);

/// What travels between FanOut and FanIn, from node to node.
struct GatesOnTheirWay {
  Pending gates = Pending({});  ///< [C, k] in forward; their gradients [R, k] in backward
};

/// Copies of tokens that have come to this node go to its experts, and their gates come after them.
/// x and dy pass through.
class FanOut : public Segment {
 public:
  explicit FanOut(const Mixture& mixture) : mixture_(mixture) {}
  std::string_view name() const override { return "fan_out"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;

 private:
  Mixture mixture_;
};

/// Sum of gate * output over each copy's experts in this node, which goes back to the token's
/// node. x and dy pass through.
class FanIn : public Segment {
 public:
  explicit FanIn(const Mixture& mixture) : mixture_(mixture) {}
  std::string_view name() const override { return "fan_in"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    Tensor rows;  ///< [rows of this rank's copies, H]: expert outputs
  };

  Mixture mixture_;
};

// [traffic]
/// Rows that leave their rank on the way to experts, once through a layer; as many come back.
struct DispatchRows {
  int64_t between_nodes = 0;
  int64_t in_nodes = 0;
};

/// Rows that the tokens of rank `rank` of ep cause, by the choices [T, k] of theirs that are kept
/// (-1: dropped), with `in_node` ranks of ep on every node.
DispatchRows rows_on_their_way(std::span<const int64_t> choices, int64_t k, int64_t E, int64_t rank,
                               int64_t ep, int64_t in_node, bool by_node);
// [traffic]

}  // namespace usp
