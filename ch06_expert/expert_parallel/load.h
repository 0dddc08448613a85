#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "expert_parallel/group.h"
#include "train/parameter.h"

namespace usp {

struct TrainConfig;

// [layer_load]
/// Where the tokens of one layer go.
struct LayerLoad {
  int64_t layer = 0;  ///< from 0
  Tensor counts;      ///< [E] acc dtype: choices of the running step, so far on this rank
  Tensor dropped;     ///< [1] acc dtype: of these, the ones that an expert had no room for
  Tensor before;   ///< [E] acc dtype: of the whole step before, over all ranks; 0 in the first one
  Tensor bias;     ///< [E] acc dtype: added to the scores for the choice alone; undefined: none
  Tensor loss;     ///< [1] f64, to which the router adds what it asks of the balance
  Tensor entropy;  ///< [1] f64, to which it adds that of each token's scores
};
// [layer_load]

/// What a step has shown of one layer.
struct SeenLoad {
  int64_t layer;
  std::vector<double> counts;  ///< [E]: of the global batch
  double dropped;
  double entropy;  ///< nats; the mean over tokens

  /// The fullest expert's load over the mean; 0 where nothing was chosen.
  double max_over_mean() const;
};

/// How many tokens have gone to each expert of a rank's layers, and what evens that out from step
/// to step. All that it knows is of the global batch: counts are summed over the ranks that work on
/// a layer, once a step, so that neither layout nor accumulation changes anything.
class ExpertLoad {
 public:
  /// `summed_over`: groups over which counts are summed, one after the other, to be those of all
  /// ranks that work on these layers.
  explicit ExpertLoad(const ExpertConfig& config, std::vector<Communicator> summed_over = {})
      : config_(config), summed_over_(std::move(summed_over)) {}

  /// The numbers of a layer, for its router; without memory.
  const LayerLoad& add_layer(int64_t layer);
  /// Gives the layers their memory.
  void allocate(int64_t num_experts, DType dtype);

  /// Sets the counts and what routers add up to 0.
  void begin_step();
  /// Sums the counts over the ranks that work on these layers, and moves the biases. The step's
  /// choices are `before` of the next one.
  void end_step();

  /// Load of the last step, which was over this many tokens; reads from the device. Collective.
  std::vector<SeenLoad> seen(int64_t tokens) const;
  /// The losses of this rank's routers in the last step.
  double loss() const { return layers_.empty() ? 0 : loss_.item(); }
  /// The losses of all ranks' routers; some ranks may have none. Collective.
  double loss(const Communicator& all) const;
  /// Biases and loads for a checkpoint: equal on all ranks of a stage, one of which counts them.
  std::vector<Parameter*> buffers() const;

 private:
  void sum(const Tensor& numbers) const;

  ExpertConfig config_;
  std::vector<Communicator> summed_over_;
  std::vector<std::unique_ptr<LayerLoad>> layers_;  ///< by number, once they have memory
  std::vector<std::unique_ptr<Parameter>> buffers_;
  Tensor counts_, before_;  ///< [layers, E + 1] acc dtype: behind the counts, what was dropped
  Tensor biases_;           ///< [layers, E] acc dtype
  Tensor loss_;             ///< [1] f64
  Tensor entropies_;        ///< [layers] f64
};

/// What a step has shown of all layers with experts, as members of its line in metrics.jsonl:
/// `expert_loss`, and `experts`, a list with tokens, drops and entropy of each layer. Empty where
/// there are none. Collective over `world`.
std::string expert_metrics(const ExpertLoad& load, const TrainConfig& config,
                           const Communicator& world);

/// Groups over which a sum is one over all ranks that work on a rank's layers: those of its stages,
/// and of their copies where a pipeline has two.
std::vector<Communicator> workers_of_stages(const TrainConfig& config, const Mesh& mesh);

}  // namespace usp
