#include "accounting/distinct_ranks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "accounting/context_accountant.h"
#include "accounting/expert_accountant.h"
#include "accounting/pipeline_accountant.h"
#include "accounting/rank_trait.h"
#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"

namespace usp {

namespace {

/// Elements of these units that the optimizer updates in another place of the mesh.
int64_t updated_at(const MeshPlace& at, const std::vector<UnitShape>& units) {
  int64_t numel = 0;
  for (const UnitShape& unit : units) {
    numel += unit.updated_by(unit.group == "edp" ? at.edp : at.dp_cp);
  }
  return numel;
}

}  // namespace

std::vector<RankClass> distinct_ranks(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  const bool shards = config.data_parallel.zero_stage > 0;
  // Ranks that hold copies of one model differ in what they update, and in nothing else.
  std::vector<RankTrait> traits;
  // [traits]
  traits.push_back(stage_trait());
  traits.push_back(at_ends(config, vocabulary_trait(config)));
  traits.push_back(cut_trait(config));
  for (RankTrait& trait : expert_traits(config)) traits.push_back(std::move(trait));
  traits.push_back(ring_trait(config));
  // [traits]
  using Key = std::vector<int64_t>;  // what shapes depend on
  std::map<Key, std::vector<UnitShape>> units;
  std::map<Key, RankClass> classes;
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const MeshPlace at = mesh.place_of(rank);
    Key key;
    for (const RankTrait& trait : traits) key.push_back(trait.value(at));
    if (shards && !units.contains(key)) {
      DryRank dry(config, rank);
      units[key] = unit_shapes(config, dry);
    }
    const int64_t updated = shards ? updated_at(at, units[key]) : 0;
    key.push_back(updated);
    RankClass& of_rank = classes[key];
    if (of_rank.ranks++ > 0) continue;
    std::vector<std::string> what;
    for (size_t i = 0; i < traits.size(); ++i) {
      if (std::string text = traits[i].text(key[i]); !text.empty()) what.push_back(std::move(text));
    }
    if (shards) what.push_back(fmt::format("{} parameters to update", updated));
    of_rank.rank = rank;
    of_rank.what = fmt::format("{}", fmt::join(what, ", "));
  }
  std::vector<RankClass> distinct;
  for (const auto& [key, of_key] : classes) distinct.push_back(of_key);
  std::ranges::sort(distinct, {}, &RankClass::rank);
  return distinct;
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
