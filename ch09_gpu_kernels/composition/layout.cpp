#include "composition/layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tensor/runtime.h"
#include "train_step.h"

namespace usp {

namespace {

constexpr int64_t kMostRanks = 4096, kShownRanks = 32;

/// The ledger's name: without context parallelism dp_cp is dp.
std::string name_of(const std::string& group, const MeshSizes& mesh) {
  return group == "dp_cp" && mesh.cp == 1 ? "dp" : group;
}

bool are_equal(const std::vector<Slice>& some, const std::vector<Slice>& other) {
  return std::ranges::equal(some, other, [](const Slice& a, const Slice& b) {
    return a.axis == b.axis && a.offset == b.offset && a.length == b.length;
  });
}

/// What rank after rank holds, by weight.
class Holders {
 public:
  /// Enters what this rank's trainer has.
  void add(const TrainConfig& config, int rank);
  /// The parts, with the groups by which they lie where they lie.
  std::vector<PlacedPart> parts(const MeshSizes& mesh) const;

 private:
  struct Held {
    std::vector<PlacedPart> parts;
    std::map<int, size_t> of_rank;  ///< which of the parts a rank holds
  };

  void add(const Parameter& parameter, int rank, const std::vector<std::string>& summed_over);
  void relate(PlacedPart& part, const Held& held, const MeshSizes& mesh) const;

  std::vector<std::string> names_;  ///< in the order in which they were met
  std::map<std::string, Held> held_;
};

void Holders::add(const TrainConfig& config, int rank) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const DryMesh dry(config.mesh(), config.engine(), rank, config.communication->node_size);
  Trainer trainer(config, {/*dataset=*/nullptr, dry.mesh});
  for (size_t i = 0; i < trainer.parameters().size(); ++i) {
    const Parameter& parameter = trainer.parameters()[i];
    add(parameter, rank, parameter.grad_groups);
  }
  for (const Parameter* buffer : trainer.expert_load().buffers()) add(*buffer, rank, {});
}

void Holders::add(const Parameter& parameter, int rank,
                  const std::vector<std::string>& summed_over) {
  const auto [found, is_new] = held_.try_emplace(parameter.name);
  if (is_new) names_.push_back(parameter.name);
  std::vector<PlacedPart>& parts = found->second.parts;
  auto part = std::ranges::find_if(
      parts, [&](const PlacedPart& it) { return are_equal(it.slices, parameter.slices); });
  if (part == parts.end()) {
    parts.push_back({parameter.name, parameter.global_shape, parameter.slices, {}, {}, {}, {}, {}});
    part = parts.end() - 1;
    part->summed_over = summed_over;
  }
  part->ranks.push_back(rank);
  found->second.of_rank[rank] = size_t(part - parts.begin());
  const Shard& shard = parameter.shard;
  if (shard.numel() > 0) part->owners.push_back({rank, shard.begin, shard.end, parameter.counted});
}

/// By comparing what the ranks of each group hold.
void Holders::relate(PlacedPart& part, const Held& held, const MeshSizes& mesh) const {
  const int rank = part.ranks.front();
  const auto holds_it = [&](int other) {
    const auto found = held.of_rank.find(other);
    return found != held.of_rank.end() && &held.parts[found->second] == &part;
  };
  std::erase_if(part.summed_over,
                [&](const auto& group) { return mesh.members(group, rank).size() == 1; });
  // [sharded]
  const auto holds_any = [&](int other) { return held.of_rank.contains(other); };
  const auto holds_another = [&](int other) { return holds_any(other) && !holds_it(other); };
  for (const char* group : {"pp", "ep"}) {
    if (!std::ranges::all_of(mesh.members(group, rank), holds_any)) {
      part.sharded_over.push_back(group);
    }
  }
  if (std::ranges::any_of(mesh.members("tp", rank), holds_another)) {
    part.sharded_over.push_back("tp");
  }
  // [sharded]
  std::vector<std::string> candidates = part.summed_over;  // by its own names first
  for (const char* group :
       {"world", "stage", "dp_cp", "edp", "dp", "cp", "tp", "tp_kv", "pp", "embedding", "mirror"}) {
    candidates.push_back(group);
  }
  std::ranges::stable_sort(candidates, std::greater(), [&](const std::string& group) {
    return mesh.members(group, rank).size();
  });
  std::vector<std::vector<int>> chosen;
  for (const std::string& group : candidates) {
    const std::vector<int> members = mesh.members(group, rank);
    const auto is_within = [&](const auto& other) { return std::ranges::includes(other, members); };
    if (members.size() == 1 || !std::ranges::all_of(members, holds_it) ||
        std::ranges::any_of(chosen, is_within)) {
      continue;
    }
    chosen.push_back(members);
    part.copied_over.push_back(name_of(group, mesh));
  }
  for (std::string& group : part.summed_over) group = name_of(group, mesh);
}

std::vector<PlacedPart> Holders::parts(const MeshSizes& mesh) const {
  std::vector<PlacedPart> parts;
  for (const std::string& name : names_) {
    Held held = held_.at(name);
    for (PlacedPart& part : held.parts) relate(part, held, mesh);
    std::ranges::move(held.parts, std::back_inserter(parts));
  }
  return parts;
}

/// Parts of each group, of this many ranks that are neighbors in it.
std::vector<std::vector<int>> each_cut(const std::vector<std::vector<int>>& groups, int64_t size) {
  std::vector<std::vector<int>> parts;
  for (const std::vector<int>& group : groups) {
    for (auto begin = group.begin(); begin != group.end(); begin += size) {
      parts.emplace_back(begin, begin + size);
    }
  }
  return parts;
}

}  // namespace

std::vector<PlacedPart> place_parameters(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  if (mesh.ranks() > kMostRanks) {
    usage_error("mesh_show={}: there are {} ranks, and {} at most are shown; try a smaller {}",
                config.composition.mesh_show, mesh.ranks(), kMostRanks,
                mesh.dp > 1   ? "dp_size"
                : mesh.cp > 1 ? "cp_size"
                              : "pp_size");
  }
  Holders holders;
  for (int rank = 0; rank < mesh.ranks(); ++rank) holders.add(config, rank);
  return holders.parts(mesh);
}

bool has_copies(const std::vector<PlacedPart>& parts) {
  return std::ranges::any_of(parts, [](const PlacedPart& part) {
    std::set<std::pair<int64_t, int64_t>> seen;
    return std::ranges::any_of(part.owners, [&](const PlacedPart::Owner& owner) {
      return owner.end > owner.begin && !seen.insert({owner.begin, owner.end}).second;
    });
  });
}

std::vector<PlacedGroups> place_groups(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  const int64_t node_size = config.communication->node_size;
  std::vector<PlacedGroups> placed;
  const auto add = [&](const std::string& name, std::vector<std::vector<int>> groups) {
    std::erase_if(groups, [](const std::vector<int>& group) { return group.size() == 1; });
    if (groups.empty()) return;
    PlacedGroups kind{name, std::move(groups), 1};
    for (const std::vector<int>& group : kind.groups) {
      std::set<int64_t> nodes;
      for (int rank : group) nodes.insert(node_size == 0 ? 0 : rank / node_size);
      kind.most_nodes = std::max<int64_t>(kind.most_nodes, std::ssize(nodes));
    }
    placed.push_back(std::move(kind));
  };
  const auto of_mesh = [&](const std::string& name) {
    std::map<int64_t, std::vector<int>> by_colour;
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      by_colour[mesh.colour(name, rank)].push_back(rank);
    }
    std::vector<std::vector<int>> groups;
    for (auto& [colour, ranks] : by_colour) groups.push_back(std::move(ranks));
    return groups;
  };
  for (const char* name : {"tp", "tp_kv", "cp"}) add(name, of_mesh(name));
  add("cp_heads", each_cut(of_mesh("cp"), config.context_parallel.head_ranks()));
  for (const char* name : {"dp", "dp_cp"}) {
    if (name != std::string_view("dp_cp") || mesh.cp > 1) add(name, of_mesh(name));
  }
  if (const int64_t size = config.data_parallel.shard_size; size > 0) {
    add("shard", each_cut(of_mesh("dp_cp"), size));
  }
  add("pp", of_mesh("pp"));
  if (config.model.tie_word_embeddings && blocks_of_rank(config, 0).ends_apart) {
    add("embedding", of_mesh("embedding"));
  }
  if (config.pipeline.mirrors(config.grad_acc_steps)) add("mirror", of_mesh("mirror"));
  if (mesh.ep > 1) {
    for (const char* name : {"ep", "edp"}) add(name, of_mesh(name));
  }
  return placed;
}

namespace {

/// As "0-3, 8".
std::string list_ranks(const std::vector<int>& ranks) {
  std::vector<std::string> stretches;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    stretches.push_back(last == i ? fmt::format("{}", ranks[i])
                                  : fmt::format("{}-{}", ranks[i], ranks[last]));
    i = last + 1;
  }
  return fmt::format("{}", fmt::join(stretches, ", "));
}

/// Rows of cells as columns that are as wide as they need to be.
std::string to_columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

std::string list(const std::vector<std::string>& names) {
  return names.empty() ? "-" : fmt::format("{}", fmt::join(names, ", "));
}

std::vector<std::string> coordinates_row(const MeshSizes& mesh, int64_t node_size, int rank) {
  std::vector<std::string> row = {fmt::format("{}", rank),
                                  fmt::format("{}", node_size == 0 ? 0 : rank / node_size)};
  const MeshCoordinates at = mesh.coordinates(rank);
  for (MeshAxis axis : mesh.order) row.push_back(fmt::format("{}", at[size_t(axis)]));
  return row;
}

std::string table_of_ranks(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  std::vector<std::vector<std::string>> rows = {{"rank", "node"}};
  for (MeshAxis axis : mesh.order) rows[0].emplace_back(kMeshAxes[size_t(axis)]);
  const int64_t shown = std::min(mesh.ranks(), kShownRanks);
  for (int rank = 0; rank < shown; ++rank) {
    rows.push_back(coordinates_row(mesh, config.communication->node_size, rank));
  }
  std::string text = to_columns(rows);
  if (shown < mesh.ranks()) text += fmt::format("and {} more\n", mesh.ranks() - shown);
  return text;
}

std::string table_of_groups(const TrainConfig& config) {
  std::vector<std::vector<std::string>> rows = {{"group", "ranks", "of them", "first", "nodes"}};
  std::string note;
  for (const PlacedGroups& kind : place_groups(config)) {
    rows.push_back({kind.name, fmt::format("{}", kind.groups.front().size()),
                    fmt::format("{}", kind.groups.size()), list_ranks(kind.groups.front()),
                    fmt::format("{}", kind.most_nodes)});
    if (kind.name == "tp" && kind.most_nodes > 1) {
      note = fmt::format("tp leaves the node: its {} ranks lie on {} nodes of {}\n",
                         config.tensor_parallel.tp_size, kind.most_nodes,
                         config.communication->node_size);
    }
  }
  return rows.size() == 1 ? "" : to_columns(rows) + note;
}

/// Without what every name has, and with `*` for the numbers of layers and experts.
std::string kind_of(const std::string& name) {
  std::istringstream words(name);
  std::vector<std::string> kept;
  for (std::string word; std::getline(words, word, '.');) {
    kept.push_back(word.find_first_not_of("0123456789") == std::string::npos ? "*" : word);
  }
  if (kept.front() == "model") kept.erase(kept.begin());
  if (kept.back() == "weight") kept.pop_back();
  return fmt::format("{}", fmt::join(kept, "."));
}

std::string table_of_parts(const std::vector<PlacedPart>& parts) {
  std::vector<std::vector<std::string>> rows = {{"parameter", "whole", "part", "sharded over",
                                                 "copied over", "summed over", "owned by",
                                                 "saved by"}};
  std::vector<std::set<int>> owners(1), savers(1);
  for (const PlacedPart& part : parts) {
    Shape shape = part.global_shape;
    for (const Slice& slice : part.slices) shape[slice.axis] = slice.length;
    std::vector<std::string> row = {kind_of(part.name),     part.global_shape.to_string(),
                                    shape.to_string(),      list(part.sharded_over),
                                    list(part.copied_over), list(part.summed_over)};
    const auto is_like = [&](const auto& other) {
      return std::equal(row.begin(), row.end(), other.begin());
    };
    const size_t at = std::ranges::find_if(rows, is_like) - rows.begin();
    if (at == rows.size()) {
      rows.push_back(std::move(row));
      owners.emplace_back();
      savers.emplace_back();
    }
    for (const auto& owner : part.owners) {
      owners[at].insert(owner.rank);
      if (owner.saves) savers[at].insert(owner.rank);
    }
  }
  for (size_t i = 1; i < rows.size(); ++i) {
    for (const auto& ranks : {owners[i], savers[i]}) {
      rows[i].push_back(list_ranks({ranks.begin(), ranks.end()}));
    }
  }
  return to_columns(rows);
}

nlohmann::ordered_json json_of(const PlacedPart& part) {
  nlohmann::ordered_json json = {
      {"name", part.name},
      {"shape", nlohmann::json(std::vector(part.global_shape.begin(), part.global_shape.end()))},
      {"slices", nlohmann::json::array()},
      {"ranks", part.ranks},
      {"sharded_over", part.sharded_over},
      {"copied_over", part.copied_over},
      {"gradient_summed_over", part.summed_over},
      {"owners", nlohmann::json::array()}};
  for (const Slice& slice : part.slices) {
    json["slices"].push_back({slice.axis, slice.offset, slice.length});
  }
  for (const auto& owner : part.owners) {
    json["owners"].push_back(
        {{"rank", owner.rank}, {"begin", owner.begin}, {"end", owner.end}, {"saves", owner.saves}});
  }
  return json;
}

/// What each rank takes of the first step's batch: samples, tokens of each of them, and rows of a
/// micro-batch between the linears. Stretches [begin, end).
nlohmann::ordered_json json_of_batch(const TrainConfig& config) {
  using Json = nlohmann::ordered_json;
  const MeshSizes mesh = config.mesh();
  const int64_t size = config.micro_batch_size, shares = config.tensor_parallel.row_shares();
  const int64_t of_pass = config.samples_of_pass() * config.seq_len / mesh.cp;  // halves apart
  const int64_t rows = size * config.seq_len / mesh.cp;
  const auto add = [](Json& stretches, int64_t begin, int64_t length) {
    if (!stretches.empty() && stretches.back()[1] == begin) {
      stretches.back()[1] = begin + length;
    } else {
      stretches.push_back(Json::array({begin, begin + length}));
    }
  };
  Json ranks = Json::array();
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const MeshCoordinates at = mesh.coordinates(rank);
    const auto place = [&](MeshAxis axis) { return at[size_t(axis)]; };
    Json samples = Json::array(), tokens = Json::array(), own_rows = Json::array();
    for (int64_t micro_step = 0; micro_step < config.grad_acc_steps; ++micro_step) {
      add(samples, (micro_step * mesh.dp + place(MeshAxis::dp)) * size, size);
    }
    const Positions own = config.context_parallel.of_rank(config.seq_len, place(MeshAxis::cp));
    for (int64_t row = 0; row < own.count(); row += own.run_from(row)) {
      add(tokens, own[row], own.run_from(row));
    }
    for (int64_t pass = 0; pass < rows; pass += of_pass) {
      const int64_t share = of_pass / shares;
      add(own_rows, pass + (shares == 1 ? 0 : place(MeshAxis::tp) * share), share);
    }
    ranks.push_back({{"samples", samples}, {"tokens", tokens}, {"rows", own_rows}});
  }
  return {{"samples", config.global_batch_size()},
          {"tokens", config.seq_len},
          {"rows", rows},
          {"ranks", ranks}};
}

std::string json_of(const TrainConfig& config, const std::vector<PlacedPart>& parts) {
  const MeshSizes mesh = config.mesh();
  nlohmann::ordered_json json = {{"order", mesh.order.text()},
                                 {"node_size", config.communication->node_size}};
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const MeshCoordinates at = mesh.coordinates(rank);
    nlohmann::ordered_json coordinates;
    for (size_t axis = 0; axis < at.size(); ++axis) coordinates[kMeshAxes[axis]] = at[axis];
    json["ranks"].push_back(std::move(coordinates));
  }
  json["groups"] = nlohmann::ordered_json::array();
  for (const PlacedGroups& kind : place_groups(config)) {
    json["groups"].push_back(
        {{"name", kind.name}, {"nodes", kind.most_nodes}, {"ranks", kind.groups}});
  }
  json["batch"] = json_of_batch(config);
  for (const PlacedPart& part : parts) json["parameters"].push_back(json_of(part));
  return json.dump() + '\n';
}

/// JSON of flags, ranks and each stage's layers: its blocks but for the embedding and the head.
std::string json_of_flags(const TrainConfig& config, const std::string& flags) {
  const int64_t stages = config.pipeline.schedule(config.grad_acc_steps).stages.count();
  nlohmann::ordered_json json = {{"flags", nlohmann::ordered_json::parse(flags)},
                                 {"ranks", config.mesh().ranks()},
                                 {"layers_of_stages", nlohmann::json::array()}};
  for (const BlockRange& blocks : blocks_of_stages(config.pipeline, config.model, stages)) {
    const int64_t first = std::max<int64_t>(1, blocks.begin);
    json["layers_of_stages"].push_back(std::min(config.model.num_layers + 1, blocks.end) - first);
  }
  return json.dump() + '\n';
}

}  // namespace

std::string show_layout(const TrainConfig& config, const std::string& flags) {
  if (config.composition.mesh_show == "flags") return json_of_flags(config, flags);
  const std::vector<PlacedPart> parts = place_parameters(config);
  if (config.composition.mesh_show == "json") return json_of(config, parts);
  const MeshSizes mesh = config.mesh();
  std::string text = fmt::format("{} ranks: {}; from the slowest axis to the fastest: {}\n\n",
                                 mesh.ranks(), describe(mesh), mesh.order.text());
  text += table_of_ranks(config) + '\n';
  if (const std::string groups = table_of_groups(config); !groups.empty()) text += groups + '\n';
  return text + table_of_parts(parts);
}

}  // namespace usp
