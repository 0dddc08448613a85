#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "model.h"

/// A mixture of experts in the place of a block's MLP, with the experts shared out over ranks.
/// Shazeer et al. (2017); Fedus et al. (2022).
///
/// Dimensions: T tokens of this rank, H hidden_size, F ffn_hidden_size, E num_experts, k top_k,
/// R = T k rows that this rank sends away, Q rows that arrive for its experts.
namespace usp::rehearsal {

struct ExpertsConfig {
  int64_t num_experts = 4;  ///< E
  int64_t top_k = 2;        ///< k: experts that each token is sent to
};

/// Where the tokens of one micro-batch go. Rows on their way to the experts are ordered by
/// destination rank, expert and token; at their destination by source rank, expert and token.
struct Routing {
  Tensor probs;    ///< [T, E], acc dtype: softmax of the router's logits
  Tensor choices;  ///< [T, k] i32: each token's experts, the most probable first
  Tensor slots;    ///< [T, k] i32: the row of each choice among the R that are sent

  std::vector<int64_t> to_experts;    ///< [E]: rows for each expert
  std::vector<int64_t> from_ranks;    ///< [ep, E/ep]: rows from each rank for each expert here
  std::vector<int64_t> rows_to_rank;  ///< [ep]: sums of to_experts; of R
  std::vector<int64_t> rows_by_rank;  ///< [ep]: sums of from_ranks; of Q
};

/// Rows on their way. Between the segment that starts the exchange and the one that waits for it a
/// schedule may run anything else.
class InFlight {
 public:
  /// Sends `rows`, to[r] of them to rank r, and expects from[r] from it.
  void start(const Communicator& ep, const Tensor& rows, const std::vector<int64_t>& to,
             const std::vector<int64_t>& from);
  Tensor wait();  ///< the rows that have arrived

 private:
  Tensor arriving_;
  Handle exchange_;
};
struct ToExperts : InFlight {};    ///< tokens in forward, gradients of expert outputs in backward
struct FromExperts : InFlight {};  ///< expert outputs in forward, gradients of tokens in backward

/// norm(x), the router's choice, and the rows on their way to the experts. x passes through.
///
/// Exchanges E counts and waits for them, since no buffer can be made without; then starts sending
/// R H elements. backward() waits for the gradients of these rows.
class Dispatch : public Segment {
 public:
  /// `counts`: the ranks of `ep`, on a channel of their own. Collectives of a communicator are
  /// carried out one after the other, and counts must not queue behind another micro-batch's rows.
  Dispatch(const ExpertsConfig& config, RmsNorm norm, std::unique_ptr<Linear> router,
           const Communicator& ep, const Communicator& counts);
  std::string_view name() const override { return "dispatch"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;

 private:
  struct Saved {
    RmsNorm::Saved norm;
    Linear::Saved router;
  };

  Routing route(const Tensor& logits) const;
  void exchange_counts(Routing& routing, const Tensor& to_experts) const;

  ExpertsConfig config_;
  RmsNorm norm_;
  std::unique_ptr<Linear> router_;
  Communicator ep_, counts_;
};

/// This rank's experts on the rows that have come for them. x and dy pass through.
///
/// |            | one GPU               | rank r of ep                                  |
/// |------------|-----------------------|-----------------------------------------------|
/// | experts    | all E                 | E/ep of them, from r E/ep onward              |
/// | tokens     | those that chose them | of all ranks, those that chose one of these   |
/// | gradients  | of all tokens         | complete within ep; summed over edp           |
class Experts : public Segment {
 public:
  Experts(std::vector<FeedForward> experts, const Communicator& ep);
  std::string_view name() const override { return "experts"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;

 private:
  struct Saved {
    std::vector<FeedForward::Saved> experts;
  };

  /// Rows sorted by expert -> the same, run(expert, its rows) each.
  template <class Run>
  Tensor each_expert(const Tensor& rows, const Routing& routing, const Run& run) const;

  std::vector<FeedForward> experts_;
  Communicator ep_;
};

/// y = x + the sum over each token's choices of gate * expert output. A gate is the probability of
/// the expert; those of a token need not add up to 1.
class Combine : public Segment {
 public:
  explicit Combine(const Communicator& ep);
  std::string_view name() const override { return "combine"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  /// Leaves the gradient of the probabilities to Dispatch.
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;

 private:
  struct Saved {
    Tensor rows;  ///< [R, H]: expert outputs in the order in which the tokens were sent
  };

  Communicator ep_;
};

/// The segments that take the place of a layer's Mlp: Dispatch, Experts, Combine. A rank adds the
/// parameters of its own experts only. Collective over `ep`; throws UsageError where its size does
/// not divide the experts.
std::vector<std::unique_ptr<Segment>> make_experts(const ExpertsConfig& config,
                                                   const ModelConfig& model, int64_t layer,
                                                   ParameterList& parameters,
                                                   const Communicator& ep);

}  // namespace usp::rehearsal
