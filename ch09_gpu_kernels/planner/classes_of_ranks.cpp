#include "planner/classes_of_ranks.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "accounting/expert_accountant.h"
#include "accounting/zero_accountant.h"
#include "base/stretch.h"

namespace usp {

namespace {

using Key = std::vector<int64_t>;

/// Numbers for keys, in the order in which they first come.
template <class AnyKey>
std::vector<int> numbered(const std::vector<AnyKey>& keys) {
  std::map<AnyKey, int> known;
  std::vector<int> numbers;
  for (const AnyKey& key : keys) {
    numbers.push_back(known.emplace(key, static_cast<int>(known.size())).first->second);
  }
  return numbers;
}

/// All groups of one name: of each rank of the world which it is in, and who is in each, in order.
struct Groups {
  std::vector<int> of_rank;
  std::vector<std::vector<int>> members;
};

Groups make_groups(std::vector<int> of_rank) {
  Groups groups{std::move(of_rank), {}};
  for (size_t rank = 0; rank < groups.of_rank.size(); ++rank) {
    const size_t group = groups.of_rank[rank];
    if (group == groups.members.size()) groups.members.emplace_back();
    groups.members[group].push_back(static_cast<int>(rank));
  }
  return groups;
}

/// The parts of these groups with `size` neighbors each, and the groups across the parts.
void cut_groups(const Groups& groups, int64_t size, std::vector<Groups>& into) {
  std::vector<std::pair<int64_t, int64_t>> rows(groups.of_rank.size()), columns(rows);
  for (const std::vector<int>& members : groups.members) {
    for (int64_t i = 0; i < std::ssize(members); ++i) {
      rows[members[i]] = {groups.of_rank[members[i]], i / size};
      columns[members[i]] = {groups.of_rank[members[i]], i % size};
    }
  }
  into.push_back(make_groups(numbered(rows)));
  into.push_back(make_groups(numbered(columns)));
}

/// Every group in which a rank may exchange something in a step with another, but the world.
std::vector<Groups> groups_of(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  std::vector<std::string> names = {"dp", "pp", "cp", "tp", "tp_kv", "dp_cp", "stage", "ep", "edp"};
  if (mesh.pp > 1) names.insert(names.end(), {"embedding", "mirror"});
  std::vector<Groups> all;
  std::map<std::string, size_t> at;
  for (const std::string& name : names) {
    std::vector<int64_t> colours;
    for (int rank = 0; rank < mesh.ranks(); ++rank) colours.push_back(mesh.colour(name, rank));
    at[name] = all.size();
    all.push_back(make_groups(numbered(colours)));
  }
  const auto parts = [&](const std::string& name, int64_t size) {
    const Groups whole = all[at[name]];
    if (size > 1 && size < std::ssize(whole.members[0])) cut_groups(whole, size, all);
  };
  if (config.data_parallel.zero_stage > 0) {
    parts("dp_cp", shard_size(config, mesh.dp_cp()));
    if (mesh.ep > 1) parts("edp", shard_size(config, mesh.expert_ranks() / mesh.ep));
  }
  parts("cp", config.context_parallel.head_ranks());
  if (config.expert_parallel.by_node()) parts("ep", config.expert_parallel.ranks_in_node(config));
  std::vector<Groups> found;
  for (Groups& groups : all) {
    const bool is_known = std::ranges::find(found, groups.of_rank, &Groups::of_rank) != found.end();
    const bool is_alone = std::ssize(groups.members) == mesh.ranks();
    if (!is_known && !is_alone) found.push_back(std::move(groups));
  }
  return found;
}

/// What a rank computes follows from these.
Key work_of(const TrainConfig& config, const MeshPlace& at, const std::vector<RowsOfRank>& rows) {
  const MeshSizes mesh = config.mesh();
  Key key = {at.pp, at.cp, cut(config.model.vocab_size, at.tp, mesh.tp).count};
  if (tp_cuts_unevenly(config)) key.push_back(at.tp);
  if (!rows.empty()) {
    key.push_back(rows[at.ep].copies);
    key.push_back(rows[at.ep].choices);
  }
  return key;
}

}  // namespace

// [classes]
RankClasses classes_of_ranks(const TrainConfig& config, int64_t ranks_per_node) {
  const MeshSizes mesh = config.mesh();
  const std::vector<Groups> all = groups_of(config);
  const std::vector<RowsOfRank> rows = even_rows_of_ranks(config);
  std::vector<Key> keys;
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    keys.push_back(work_of(config, mesh.place_of(rank), rows));
  }
  std::vector<int> classes = numbered(keys);
  // Classes are cut until the groups of all ranks of a class look alike: who is in them, by class,
  // and which of these share a node.
  for (int before = 0, now = 1; before != now;) {
    before = 1 + *std::ranges::max_element(classes);
    std::vector<int> cut = classes;
    for (const Groups& groups : all) {
      std::vector<Key> looks;
      for (const std::vector<int>& members : groups.members) {
        Key& look = looks.emplace_back();
        for (size_t i = 0; i < members.size(); ++i) {
          const bool in_next =
              i > 0 && members[i] / ranks_per_node != members[i - 1] / ranks_per_node;
          if (in_next) look.push_back(-1);
          look.push_back(classes[members[i]]);
        }
      }
      const std::vector<int> look = numbered(looks);
      std::vector<std::pair<int, int>> pairs;
      for (size_t rank = 0; rank < cut.size(); ++rank) {
        pairs.emplace_back(cut[rank], look[groups.of_rank[rank]]);
      }
      cut = numbered(pairs);
    }
    classes = std::move(cut);
    now = 1 + *std::ranges::max_element(classes);
  }
  RankClasses result{std::move(classes), {}, {}};
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    if (result.of_rank[rank] == std::ssize(result.ranks)) {
      result.representative.push_back(rank);
      result.ranks.push_back(0);
    }
    ++result.ranks[result.of_rank[rank]];
  }
  return result;
}
// [classes]

RankClasses each_for_itself(const TrainConfig& config) {
  RankClasses classes;
  classes.of_rank.resize(config.mesh().ranks());
  std::iota(classes.of_rank.begin(), classes.of_rank.end(), 0);
  classes.representative = classes.of_rank;
  classes.ranks.assign(classes.of_rank.size(), 1);
  return classes;
}

std::vector<Program> record_classes(const TrainConfig& config, const RankClasses& classes) {
  std::vector<Program> programs;
  for (int rank : classes.representative) programs.push_back(record(config, rank));
  return programs;
}

}  // namespace usp
