#include "accounting/distinct_ranks.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "accounting/expert_accountant.h"
#include "accounting/zero_walk.h"
#include "base/stretch.h"

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
  // [parts]
  // On a ring of contiguous shares, a place has its own keys, and receives those of places before
  // it: from the third on as many are there at a time.
  const ContextParallelConfig& cp = config.context_parallel;
  const bool places = cp.by_ring() && cp.ring_size() > 1 && cp.cp_layout == "contiguous";
  const auto place = [&](const MeshPlace& at) {
    return places ? std::min<int64_t>(at.cp / cp.head_ranks(), 2) : 0;
  };
  std::vector<bool> has_end;  // of the model: whether a stage reads words, or predicts them
  for (int stage = 0; stage < mesh.pp; ++stage) {
    has_end.push_back(
        std::ranges::any_of(blocks_of_rank(config, stage).chunks, [&](const BlockRange& chunk) {
          return chunk.contains(0) || chunk.contains(config.model.num_layers + 1);
        }));
  }
  const auto words = [&](const MeshPlace& at) {
    return has_end[at.pp] ? cut(config.model.vocab_size, at.tp, mesh.tp).count : 0;
  };
  // Where tp cuts what it does not divide, its ranks differ.
  const bool uneven = tp_cuts_unevenly(config);
  const std::vector<RowsOfRank> rows = even_rows_of_ranks(config);
  // [parts]
  using Key = std::vector<int64_t>;  // what shapes depend on
  std::map<Key, std::vector<UnitShape>> units;
  std::map<Key, RankClass> classes;
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const MeshPlace at = mesh.place_of(rank);
    // [key]
    Key key = {
        at.pp, place(at), words(at), uneven ? at.tp : 0, rows[at.ep].copies, rows[at.ep].choices};
    // [key]
    if (shards && !units.contains(key)) {
      DryRank dry(config, rank);
      units[key] = ZeroShapes(config, dry).units;
    }
    const int64_t updated = shards ? updated_at(at, units[key]) : 0;
    key.push_back(updated);
    RankClass& of_rank = classes[key];
    if (of_rank.ranks++ > 0) continue;
    std::vector<std::string> what;
    // [what]
    what.push_back(fmt::format("stage {}", at.pp));
    what.push_back(fmt::format("{} of the vocabulary", words(at)));
    if (uneven) what.push_back(fmt::format("tp rank {}", at.tp));
    if (const int64_t received = rows[at.ep].choices; received > 0) {
      what.push_back(fmt::format("{} rows for its experts", received));
    }
    if (places)
      what.push_back(fmt::format("ring place {}{}", place(at), place(at) == 2 ? "+" : ""));
    // [what]
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
    estimates.push_back({predict(config, rank), simulate(config, rank), ranks, what});
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
    Simulation simulation = simulate(config, of.rank);
    if (simulation.peak > fullest.peak) fullest = std::move(simulation);
  }
  return fullest;
}

}  // namespace usp
