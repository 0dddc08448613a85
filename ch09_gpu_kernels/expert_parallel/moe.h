#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "expert_parallel/router.h"

/// A mixture of experts in the place of a block's MLP, as segments of the block: between the
/// one that starts an exchange and the one that waits for it, anything else may run. The two
/// exchanges cut a layer into five stages, as the field draws it:
///
/// | stage                | what happens                                  | code           |
/// |----------------------|-----------------------------------------------|----------------|
/// | attention and router | who goes to which expert                      | up to Dispatch |
/// | dispatch             | rows travel to the ranks of their experts     | an exchange    |
/// | experts              | each expert multiplies the rows that chose it | Experts        |
/// | combine              | rows travel back to the ranks of their tokens | an exchange    |
/// | aggregate            | each token adds up its rows, by their gates   | Combine        |
///
/// What the segments hand each other lies in the block's BlockSaved: who puts it, who
/// takes it. Decided is kept for a block that recomputes.
///
/// | in BlockSaved | what it is                | in forward        | in backward       |
/// |---------------|---------------------------|-------------------|-------------------|
/// | Routing       | choices, gates, RowCounts | Dispatch, stays   | taken by Dispatch |
/// | ToExperts     | rows on their way         | Dispatch, Experts | Combine, Experts  |
/// | FromExperts   | rows on their way back    | Experts, Combine  | Experts, Dispatch |
/// | SharedInput   | shared experts' input     | Dispatch, Experts | Experts, Dispatch |
/// | SharedOutput  | what they return          | Experts, Combine  |                   |
/// | GateGradient  | the gradient of gates     |                   | Combine, Dispatch |
/// | Saved         | for the same segment      | each, stays       | taken by each     |
/// | Decided       | choices of the first run  | Dispatch, again   |                   |
///
/// With dispatch=by_node, FanOut and FanIn (node_dispatch.h) stand between them: each takes rows
/// from one exchange and puts them under way in the next.
///
/// Dimensions: T tokens of this rank, H hidden_size, F the width of an expert, E num_experts, k
/// num_experts_per_tok, R = T k rows that this rank sends away, Q rows that arrive for its experts.
namespace usp {

// [mixture]
/// What the segments of a layer know of it.
struct Mixture {
  ExpertShape shape;
  int64_t hidden_size;  ///< H
  ExpertGroup experts;
  TensorRegion region;
  // [fused]
  bool fused = false;  ///< silu(gate) * up is not kept: backward makes it again
  // [fused]

  /// Whether the ranks of tp shard each expert, and so work on the same tokens.
  bool splits() const { return experts.config().expert_tp && region.size() > 1; }
  bool travels() const { return experts.size() > 1; }
  /// Groups of ranks in which rows travel with dispatch=by_node; nullptr: directly.
  const NodeGroups* nodes() const { return experts.nodes(); }
  /// Ranks to which Dispatch sends rows, and from which Combine has them back.
  const ExpertGroup& away() const;
  /// Ranks from which Experts have their rows.
  const ExpertGroup& at_experts() const;
};
// [mixture]

/// Bytes of a pass on paper, where every expert is chosen as often as any other.
struct MixtureBytes {
  MixtureBytes(const Mixture& mixture, const PassShape& shape);

  /// Rows [.., H] that a group of ranks exchanges; where it is one rank, both are the same tensor.
  struct Exchange {
    int64_t sent, received;
    bool travels;
  };

  int64_t own;          ///< [.., H]: this rank's rows of the residual stream
  int64_t tokens;       ///< [T, H]: what is routed here
  Exchange away;        ///< what Dispatch sends and Combine gets back
  Exchange at_experts;  ///< what comes to Experts; the same, unless rows go by node
  /// With dispatch=by_node: [R, k] of the copies that leave, [C, k] of those that come; else none.
  Exchange gates_by_node;
};

// [grouped_linear]
/// y = x Wᵀ with another W for the rows of each expert: one operation for all of them.
class GroupedLinear {
 public:
  struct Saved {
    Tensor x;  ///< [Q, I]
  };

  /// `weights`: each expert's [O, I] rows, side by side, the experts one after the other.
  GroupedLinear(std::vector<Parameter*> weights, int64_t experts, std::string_view output_name);

  /// Rows sorted by expert, counts[e] for expert e: [Q, I] -> [Q, O]
  Tensor forward(const Tensor& x, const std::vector<int64_t>& counts, Saved& saved) const;
  /// dy [Q, O] -> [Q, I]
  Tensor backward_input(const Tensor& dy, const std::vector<int64_t>& counts) const;
  /// The rest of backward, apart: it can run while the input's gradient travels. dy [Q, O]
  void backward_weight(const Tensor& dy, const std::vector<int64_t>& counts, const Saved& saved,
                       Grads& grads) const;
  int64_t outputs() const;  ///< O, of this rank

 private:
  Tensor of_experts(Tensor Parameter::*member) const;  ///< [experts, O, I]

  std::vector<Parameter*> weights_;
  int64_t experts_;
  std::string_view output_name_;
};
// [grouped_linear]

/// Rows on their way to the segment that computes.
struct ToExperts {
  Pending rows = Pending({});  ///< tokens in forward, gradients of expert outputs in backward
};
/// Rows on their way back.
struct FromExperts {
  Pending rows = Pending({});  ///< expert outputs in forward, gradients of tokens in backward
};

/// Left for Dispatch's backward by whoever applied the gates.
struct GateGradient {
  Tensor dgates;  ///< [T, k]
};

/// norm(x), the router's choice, and the rows on their way to the experts. x passes through.
class Dispatch : public Segment {
 public:
  Dispatch(RmsNorm norm, Router router, const Mixture& mixture);
  std::string_view name() const override { return "dispatch"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  void keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    RmsNorm::Saved norm;
    Router::Saved router;
  };
  /// So that a block that runs again sends every token where it went before.
  struct Decided {
    Routing routing;
    Tensor load;
  };

  RmsNorm norm_;
  Router router_;
  Mixture mixture_;
};

/// This rank's experts on the rows that have come for them; meanwhile, what every token goes
/// through. x and dy pass through.
class Experts : public Segment {
 public:
  /// `shared`: may be empty.
  Experts(GroupedLinear gate_up_proj, GroupedLinear down_proj, std::optional<FeedForward> shared,
          const Mixture& mixture);
  std::string_view name() const override { return "experts"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    GroupedLinear::Saved gate_up_proj, down_proj;
    Tensor gate_up;  ///< [Q, 2F]
    FeedForward::Saved shared;
  };

  GroupedLinear gate_up_proj_, down_proj_;
  std::optional<FeedForward> shared_;
  Mixture mixture_;
};

/// y = x + the sum over each token's choices of gate * expert output, + what is shared. Of rows
/// that nodes have summed, gates are part.
class Combine : public Segment {
 public:
  explicit Combine(const Mixture& mixture) : mixture_(mixture) {}
  std::string_view name() const override { return "combine"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    Tensor rows;  ///< [R, H]: expert outputs in the order in which the tokens were sent
  };

  Mixture mixture_;
};

}  // namespace usp
