#include "accounting/distinct_ranks.h"

#include <map>
#include <memory>

#include "accounting/context_accountant.h"
#include "accounting/expert_accountant.h"
#include "accounting/pipeline_accountant.h"
#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"

namespace usp {

namespace {

/// What a rank updates, of the ranks that hold copies of one model: those with the same values of
/// these traits.
RankTrait update_trait(const TrainConfig& config, const std::vector<RankTrait>& traits) {
  auto known = std::make_shared<std::map<std::vector<int64_t>, std::vector<UnitShape>>>();
  const auto updated = [=](const MeshPlace& at) {
    std::vector<UnitShape>& units = (*known)[trait_values(traits, at)];
    if (units.empty()) {
      DryRank dry(config, config.mesh().rank_at({at.dp, at.pp, at.cp, at.tp}));
      units = unit_shapes(config, dry);
    }
    int64_t numel = 0;
    for (const UnitShape& unit : units) {
      numel += unit.updated_by(unit.group == "edp" ? at.edp : at.dp_cp);
    }
    return numel;
  };
  return {updated, [](int64_t numel) { return fmt::format("{} parameters to update", numel); }};
}

}  // namespace

std::vector<RankClass> distinct_ranks(const TrainConfig& config) {
  std::vector<RankTrait> traits;
  // [traits]
  traits.push_back(stage_trait());
  traits.push_back(at_ends(config, vocabulary_trait(config)));
  traits.push_back(cut_trait(config));
  for (RankTrait& trait : expert_traits(config)) traits.push_back(std::move(trait));
  traits.push_back(ring_trait(config));
  // [traits]
  if (config.data_parallel.zero_stage > 0) traits.push_back(update_trait(config, traits));
  return classes_of_ranks(config.mesh(), traits);
}

std::vector<RankEstimate> estimate_ranks(const TrainConfig& config) {
  std::vector<RankEstimate> estimates;
  for (const auto& [rank, ranks, what] : distinct_ranks(config)) {
    estimates.push_back({predict(config, rank), simulate<Trainer>(config, rank), ranks, what});
  }
  return estimates;
}

Prediction predict_fullest(const TrainConfig& config) {
  Prediction fullest;
  for (const RankClass& of : distinct_ranks(config)) {
    Prediction prediction = predict(config, of.rank);
    if (prediction.needed() > fullest.needed()) fullest = std::move(prediction);
  }
  return fullest;
}

Simulation simulate_fullest(const TrainConfig& config) {
  Simulation fullest{};
  for (const RankClass& of : distinct_ranks(config)) {
    Simulation simulation = simulate<Trainer>(config, of.rank);
    if (simulation.peak > fullest.peak) fullest = std::move(simulation);
  }
  return fullest;
}

}  // namespace usp
