#include "proof/types.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "accounting/dry_rank.h"
#include "tensor/console.h"

namespace usp {

namespace {

using types::Factor;
using types::Kind;

/// Axes of the mesh among these, the fastest first.
std::vector<MeshAxis> fastest_first(const MeshSizes& mesh, const std::vector<MeshAxis>& among) {
  std::vector<MeshAxis> axes;
  for (MeshAxis axis : mesh.order) {
    if (std::ranges::count(among, axis) > 0) axes.insert(axes.begin(), axis);
  }
  return axes;
}

/// Where the groups of a run cut the axes of its mesh.
std::vector<Factor> factors_of(const TrainConfig& config) {
  using enum MeshAxis;
  const MeshSizes mesh = config.mesh();
  types::Cuts cuts = {{tp, mesh.tp_kv}, {cp, config.context_parallel.head_ranks()}};
  const auto take = [&](const std::vector<MeshAxis>& among, int64_t ranks) {
    for (const auto& cut : types::cuts_of(mesh, fastest_first(mesh, among), ranks)) {
      cuts.push_back(cut);
    }
  };
  const bool of_tp = mesh.ep_over_tp && mesh.ep > 1;
  const std::vector<MeshAxis> of_experts = of_tp ? std::vector{dp, cp, tp} : std::vector{dp, cp};
  if (mesh.ep > 1) take(of_experts, mesh.ep);
  if (config.expert_parallel.by_node()) {
    take(of_experts, config.expert_parallel.ranks_in_node(config));
  }
  const int64_t shards = config.data_parallel.shard_size;
  if (shards > 0) take({dp, cp}, shards);
  if (shards > 0 && mesh.ep > 1) take(of_experts, mesh.ep * shards);
  return types::factors_of(mesh, cuts);
}

/// The rank whose digits are all 0, or all 1, in a stage.
int rank_at(const MeshSizes& mesh, const std::vector<Factor>& factors, const TypedRank& of) {
  MeshCoordinates at{};
  for (const Factor& factor : factors) {
    if (of.place == TypedPlace::second) at[size_t(factor.axis)] += factor.stride;
  }
  at[size_t(MeshAxis::pp)] = of.stage;
  return mesh.rank_at(at);
}

/// The parts of weights that a rank holds.
std::map<std::string, std::vector<Slice>> slices_of(const TrainConfig& config, int rank) {
  DryRank dry(config, rank);
  std::map<std::string, std::vector<Slice>> slices;
  for (const Parameter* parameter : dry.model.parameters().by_name()) {
    slices[parameter->name] = parameter->slices;
  }
  return slices;
}

/// Along a factor, by what the neighbor has of the same weight.
Kind kind_beside(const std::vector<Slice>& own, const std::vector<Slice>* neighbors) {
  if (neighbors == nullptr) return Kind::experts;
  for (size_t i = 0; i < own.size() && i < neighbors->size(); ++i) {
    const Slice &slice = own[i], &other = (*neighbors)[i];
    if (slice.offset == other.offset && slice.length == other.length) continue;
    return slice.axis == 0 ? Kind::outputs : Kind::inputs;
  }
  return Kind::replicated;
}

/// The types of a rank's weights, from what its neighbors hold: what is done with their gradients
/// is to be checked, so it is not asked.
std::map<std::string, types::Declared> declared_of(const TrainConfig& config, int rank,
                                                   const std::vector<Factor>& factors) {
  const MeshSizes mesh = config.mesh();
  const MeshCoordinates own_place = mesh.coordinates(rank);
  const auto own = slices_of(config, rank);
  std::map<std::string, types::Declared> declared;
  for (size_t f = 0; f < factors.size(); ++f) {
    const Factor& factor = factors[f];
    const auto axis = size_t(factor.axis);
    const bool is_pp = factor.axis == MeshAxis::pp;
    for (const auto& [name, slices] : own) {
      declared[name].type[f] = is_pp ? Kind::layers : Kind::replicated;
    }
    for (int64_t digit = 0; digit < factor.size; ++digit) {
      MeshCoordinates at = own_place;
      const int64_t own_digit = at[axis] / factor.stride % factor.size;
      if (digit == own_digit || (!is_pp && digit != (own_digit + 1) % factor.size)) continue;
      at[axis] += (digit - own_digit) * factor.stride;
      const auto others = slices_of(config, mesh.rank_at(at));
      for (auto& [name, of_name] : declared) {
        const auto found = others.find(name);
        const bool is_there = found != others.end();
        if (!is_pp) {
          of_name.type[f] = kind_beside(own.at(name), is_there ? &found->second : nullptr);
        } else if (is_there) {
          of_name.type[f] = Kind::replicated;
          of_name.is_first_holder = of_name.is_first_holder && digit > own_digit;
        }
      }
    }
  }
  if (factors.empty()) {
    for (const auto& [name, slices] : own) declared[name];
  }
  return declared;
}

types::Setting setting_of(const TrainConfig& config, const TypedRank& of) {
  types::Setting setting;
  setting.mesh = config.mesh();
  setting.factors = factors_of(config);
  setting.rank = rank_at(setting.mesh, setting.factors, of);
  setting.mutation = of.mutation;
  setting.stages_update_apart = config.pipeline.updates_each_micro_batch();
  for (size_t f = 0; f < setting.factors.size(); ++f) {
    const MeshAxis axis = setting.factors[f].axis;
    const bool is_pp = axis == MeshAxis::pp, is_tp = axis == MeshAxis::tp;
    setting.batch[f] = is_pp ? Kind::layers : is_tp ? Kind::replicated : Kind::rows;
    setting.boundary[f] = setting.batch[f];
    if (is_tp && config.tensor_parallel.row_shares() > 1) setting.boundary[f] = Kind::rows;
  }
  return setting;
}

}  // namespace

TypeCheck check_types_of(const TrainConfig& config, const TypedRank& of,
                         std::map<int, int64_t>* sent, std::map<int, int64_t>* received) {
  constexpr int64_t kSteps = 2;  // the second begins with what the first has left
  const types::Setting setting = setting_of(config, of);
  const auto declared = declared_of(config, setting.rank, setting.factors);
  TypeCheck result;
  result.ranks = 1;
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  types::Checker checker(setting);
  if (of.listener) {
    checker.on_typed([&](const types::TypedOp& op) { of.listener(checker, op); });
  }
  runtime.tell(&checker);
  try {
    const DryMesh dry(setting.mesh, config.engine(), setting.rank, config.communication->node_size);
    Trainer trainer(config, /*dataset=*/nullptr, dry.mesh);
    checker.declare(trainer.parameters(), declared);
    for (int64_t step = 0; step < kSteps; ++step) {
      trainer.train_step(step);
      checker.end_step();
    }
  } catch (const types::TypeError& error) {
    result.error = fmt::format("rank {}: {}", setting.rank, error.what());
  }
  result.ops = checker.ops();
  result.messages = checker.messages();
  result.mutated = checker.mutated();
  result.mutated_integers = checker.mutated_integers();
  if (sent != nullptr) *sent = checker.sent();
  if (received != nullptr) *received = checker.received();
  return result;
}

TypeCheck check_types(const TrainConfig& config, const types::Mutation& mutation) {
  const MeshSizes mesh = config.mesh();
  const std::vector<Factor> factors = factors_of(config);
  TypeCheck all;
  std::set<int> seen;
  for (TypedPlace place : {TypedPlace::first, TypedPlace::second}) {
    std::map<int, std::map<int, int64_t>> sent, received;  // by rank and peer
    for (int64_t stage = 0; stage < mesh.pp; ++stage) {
      const TypedRank of{place, stage, mutation, {}};
      const int rank = rank_at(mesh, factors, of);
      if (!seen.insert(rank).second) continue;  // along factors of 1 both are one
      const TypeCheck found = check_types_of(config, of, &sent[rank], &received[rank]);
      all.ranks += found.ranks;
      all.ops += found.ops;
      all.messages += found.messages;
      if (!found.mutated.empty()) all.mutated = found.mutated;
      all.mutated_integers = all.mutated_integers || found.mutated_integers;
      if (!found.error.empty()) {
        all.error = found.error;
        return all;
      }
    }
    for (const auto& [from, peers] : sent) {
      for (const auto& [to, messages] : peers) {
        if (!received.contains(to) || received[to][from] == messages) continue;
        all.error = fmt::format("rank {} sends rank {} {} messages over pp, which receives {}",
                                from, to, messages, received[to][from]);
        return all;
      }
    }
    for (const auto& [to, peers] : received) {
      for (const auto& [from, messages] : peers) {
        if (!sent.contains(from) || sent[from].contains(to)) continue;
        all.error = fmt::format("rank {} receives {} messages of rank {} over pp, which sends none",
                                to, messages, from);
        return all;
      }
    }
  }
  return all;
}

namespace {

/// The letters of a type: one for each axis, several where its factors differ.
std::string letters(const types::Type& type, const std::vector<Factor>& factors) {
  std::string text;
  for (size_t f = 0; f < factors.size(); ++f) {
    const bool is_new = f == 0 || factors[f].axis != factors[f - 1].axis;
    if (is_new) text += fmt::format("{}{}:", text.empty() ? "" : " ", factors[f].name());
    const char letter = types::letter(type[f]);
    if (is_new || text.back() != letter) text += letter;
  }
  return text;
}

/// The operations of one decoder layer in the first micro-batch, as rows.
class LayerTable {
 public:
  LayerTable(const std::vector<Factor>& factors, int block) : factors_(factors), block_(block) {}

  void add(const types::TypedOp& op) {
    if (op.block != block_ || op.micro_batch != 0 || op.phase.empty()) return;
    ends_ = ends_ || (op.phase == "forward" && was_backward_);  // in the second step
    if (ends_) return;
    was_backward_ = was_backward_ || op.phase == "backward";
    std::vector<std::string> operands;
    for (const types::Type& type : op.operands) {
      const std::string text = noted(type);
      if (std::ranges::count(operands, text) == 0) operands.push_back(text);
    }
    rows_.push_back({op.phase, op.name, weight_of(op), op.result ? noted(*op.result) : "",
                     fmt::format("{}", fmt::join(operands, ", "))});
  }

  void print_all() const {
    std::array<size_t, 4> widths{};
    for (const Row& row : rows_) {
      for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    for (const Row& row : rows_) {
      std::string line =
          fmt::format("{:<{}}  {:<{}}  {:<{}}  {:<{}}  {}", row[0], widths[0], row[1], widths[1],
                      row[2], widths[2], row[3], widths[3], row[4]);
      line.erase(line.find_last_not_of(' ') + 1);
      print("{}\n", line);
    }
    print("\n");
    for (Kind kind : seen_) print("{}  {}\n", types::letter(kind), types::words(kind));
    print("\n");
  }

 private:
  using Row = std::array<std::string, 5>;

  std::string noted(const types::Type& type) {
    for (size_t f = 0; f < factors_.size(); ++f) seen_.insert(type[f]);
    return letters(type, factors_);
  }
  /// As "self_attn.o_proj".
  static std::string weight_of(const types::TypedOp& op) {
    std::string name = op.parameter;
    const std::string layer = fmt::format("model.layers.{}.", op.block - 1), end = ".weight";
    if (name.starts_with(layer)) name.erase(0, layer.size());
    if (name.ends_with(end)) name.erase(name.size() - end.size());
    return name;
  }

  const std::vector<Factor>& factors_;
  int block_;
  bool was_backward_ = false, ends_ = false;
  std::vector<Row> rows_ = {{"", "operation", "weight", "makes", "of"}};
  std::set<Kind> seen_;
};

}  // namespace

int show_types(const TrainConfig& config) {
  const std::vector<Factor> factors = factors_of(config);
  LayerTable table(factors, /*block=*/1);  // behind the embedding
  TypedRank first;
  first.listener = [&](const types::Checker&, const types::TypedOp& op) { table.add(op); };
  check_types_of(config, first);
  table.print_all();
  const TypeCheck found = check_types(config);
  if (!found.error.empty()) {
    print("NOT TYPED\n  {}\n", found.error);
    return 1;
  }
  print("typed: {} ops and {} messages of {} ranks (of {})\n", found.ops, found.messages,
        found.ranks, config.mesh().ranks());
  return 0;
}

}  // namespace usp
