#pragma once

#include <memory>

#include "context_parallel/group.h"
#include "expert_parallel/load.h"
#include "layers.h"
#include "tensor/expert_ops.h"
#include "train/expert_shape.h"

namespace usp {

/// Where the tokens of one micro-batch go, and with which weight.
struct Routing {
  Tensor choices;  ///< [T, k] i32: each token's experts, the one of the highest score first
  Tensor gates;    ///< [T, k] acc dtype: factors of the experts' outputs
  Tensor slots;    ///< [T, k] i32: the row of each choice among those that are sent; -1: dropped
  RowCounts rows;
  /// With dispatch=by_node: of the copies that have come to this rank, which it sends on within
  /// its node. The slots and rows above are then of the copies that go from node to node.
  std::shared_ptr<Routing> in_node;

  /// Counts of the rows that reach experts.
  const RowCounts& at_experts() const { return in_node ? in_node->rows : rows; }
};

/// Fills slots and rows. destinations [T, k] i32: of each choice, one of the `number` places that
/// the ranks split; -1: none. `expected`: choices that go somewhere, where nobody has chosen.
void assign_rows(Routing& routing, const Tensor& destinations, int64_t number, int64_t expected,
                 const ExpertGroup& ranks);

/// Length of the stretches into which each rank cuts its rows to count choices by sample: on all
/// ranks of cp and tp the same, and so short that each is of one sample.
int64_t run_length(const ContextParallelConfig& context, int64_t rows, int64_t seq_len);

/// The logits of the experts [T, E], in acc dtype: rounded ones would make ties.
class RouterLinear : public Linear {
 public:
  explicit RouterLinear(Parameter& weight) : Linear({&weight}, "router") {}

 protected:
  Tensor output(const Saved& saved, const Tensor& residual) const override;
};

// [router]
/// Scores the experts for each token and chooses k of them. Shazeer et al. (2017),
/// https://arxiv.org/abs/1701.06538; Fedus et al., Switch Transformer (2022),
/// https://arxiv.org/abs/2101.03961; DeepSeek-AI, DeepSeek-V3 (2024),
/// https://arxiv.org/abs/2412.19437.
class Router {
 public:
  struct Saved {
    Linear::Saved linear;
    Tensor logits, scores;  ///< [T, E] acc dtype
    Tensor load;            ///< [runs, E] acc dtype: what the balance loss multiplies scores by
  };

  /// `ranks`: who shards a sample's tokens, and the experts.
  Router(const ExpertShape& shape, std::unique_ptr<Linear> linear, const ExpertGroup& experts,
         const TensorRegion& region, const ContextGroup& context, const LayerLoad& load);

  /// x [T, H], the norm's output. `routing` may hold the choices of an earlier forward pass, which
  /// then stand.
  void forward(const Tensor& x, Saved& saved, Routing& routing, const Pass& pass) const;
  /// dgates [T, k] -> dx [T, H], with what the losses of the balance ask for
  Tensor backward(const Tensor& dgates, Saved& saved, const Routing& routing, Grads& grads,
                  const Pass& pass) const;
  // [router]
  Footprint footprint(const PassShape& shape) const;
  RouterScore score() const {
    return shape_.router_score == "softmax" ? RouterScore::softmax : RouterScore::sigmoid;
  }

 private:
  /// How the choices of each sample fall on the experts, over all ranks that hold its tokens.
  struct SampleCounts {
    int64_t runs = 0;             ///< stretches of this rank's rows, of one sample each
    std::vector<int64_t> before;  ///< [runs, E]: of tokens ahead of the run
    std::vector<int64_t> all;     ///< [runs, E]: of the run's whole sample
  };
  SampleCounts count_samples(const Tensor& choices, const Pass& pass) const;
  /// The same numbers of all ranks with which this one shards a sample.
  Tensor gather_from_sample(Tensor numbers, const Pass& pass) const;

  /// Fills choices, slots and rows of `routing`.
  void choose(const Tensor& scores, Routing& routing, Saved& saved, const Pass& pass) const;
  /// The choices without those for which an expert has no room.
  Tensor drop(const Tensor& choices, const SampleCounts& samples, const Pass& pass) const;
  void record(const Tensor& choices, const Tensor& kept, const Tensor& scores) const;

  void add_losses(const Saved& saved, const Pass& pass) const;
  /// Load by which the balance loss multiplies scores: the sample's counts, or those of the batch
  /// before.
  Tensor load_of(const Saved& saved) const;
  double balance_scale(const Pass& pass) const;
  /// Whether this rank enters losses and counts: where all of tp route the same tokens, one does.
  bool enters_losses() const { return !experts_.config().expert_tp || region_.rank() == 0; }

  ExpertShape shape_;
  std::unique_ptr<Linear> linear_;
  ExpertGroup experts_;
  TensorRegion region_;
  ContextGroup context_;
  const LayerLoad* load_;
};

}  // namespace usp
