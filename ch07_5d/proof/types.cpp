#include "proof/types.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>

#include "accounting/dry_rank.h"
#include "pipeline_parallel/stages.h"
#include "run/sample.h"
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

}  // namespace

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

namespace {

/// The rank whose digits are all 0, or all 1, in a stage.
int rank_at(const MeshSizes& mesh, const std::vector<Factor>& factors, const TypedRank& of) {
  MeshCoordinates at{};
  for (const Factor& factor : factors) {
    if (of.place == TypedPlace::second) at[size_t(factor.axis)] += factor.stride;
  }
  at[size_t(MeshAxis::pp)] = of.stage;
  return mesh.rank_at(at);
}

/// The parts of weights that ranks hold, each asked once.
class Holdings {
 public:
  using Slices = std::map<std::string, std::vector<Slice>>;  ///< by name of the weight

  explicit Holdings(const TrainConfig& config) : config_(config) {}

  const Slices& of(int rank) {
    const auto [place, is_new] = known_.try_emplace(rank);
    if (!is_new) return place->second;
    DryRank dry(config_, rank);
    for (const Parameter* parameter : dry.model.parameters().by_name()) {
      place->second[parameter->name] = parameter->slices;
    }
    return place->second;
  }

 private:
  const TrainConfig& config_;
  std::map<int, Slices> known_;
};

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
std::map<std::string, types::Declared> declared_of(const MeshSizes& mesh, int rank,
                                                   const std::vector<Factor>& factors,
                                                   Holdings& holdings) {
  const MeshCoordinates own_place = mesh.coordinates(rank);
  const Holdings::Slices& own = holdings.of(rank);
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
      const Holdings::Slices& others = holdings.of(mesh.rank_at(at));
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
  for (size_t f = 0; f < setting.factors.size(); ++f) {
    const MeshAxis axis = setting.factors[f].axis;
    const bool is_pp = axis == MeshAxis::pp, is_tp = axis == MeshAxis::tp;
    setting.batch[f] = is_pp ? Kind::layers : is_tp ? Kind::replicated : Kind::rows;
    setting.boundary[f] = setting.batch[f];
    if (is_tp && config.tensor_parallel.row_shares() > 1) setting.boundary[f] = Kind::rows;
  }
  return setting;
}

using DeclaredTypes = std::map<std::string, types::Declared>;

/// What a run does besides its steps: a checkpoint is written, while what the last step has sent is
/// under way, and the loss is evaluated. Another run, which has sent nothing yet, reads the
/// checkpoint and continues a text until it outgrows seq_len.
void follow_other_passes(const TrainConfig& config, const Mesh& mesh, Trainer& before,
                         const DeclaredTypes& declared, types::Checker& checker) {
  checker.save(before.state());
  before.evaluate();
  checker.end_step();
  Trainer trainer(config, {/*dataset=*/nullptr, mesh});
  checker.declare(trainer.parameters(), declared);
  checker.load(trainer.state());
  checker.begin_decoding();
  SampleConfig greedy = config.sample;
  greedy.temperature = 0;
  greedy.sample_tokens = 3;
  const std::vector<int32_t> prompt(std::max<int64_t>(1, config.seq_len - 1));
  sample_tokens([&](const Pass& pass) { return trainer.logits(pass); }, greedy, config.seq_len,
                prompt, /*seed=*/0, [] { return false; });
}

TypeCheck check_rank(const TrainConfig& config, const TypedRank& of, Holdings& holdings,
                     std::map<int, int64_t>* sent, std::map<int, int64_t>* received) {
  constexpr int64_t kSteps = 2;  // the second begins with what the first has left
  const types::Setting setting = setting_of(config, of);
  const auto declared = declared_of(setting.mesh, setting.rank, setting.factors, holdings);
  TypeCheck result;
  result.ranks = 1;
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  types::MutatedChecker checker(setting, of.mutation);
  if (of.listener) {
    checker.on_typed([&](const types::TypedOp& op) { of.listener(checker, op); });
    if (of.keeps_history) checker.keep_history();
  }
  runtime.tell(&checker);
  try {
    const DryMesh dry(setting.mesh, config.engine(), setting.rank, config.communication->node_size);
    TrainConfig followed = config;
    followed.eval_samples = setting.mesh.dp * config.micro_batch_size;  // some on every rank
    followed.composition.check_copies = 0;                              // they have no values
    Trainer trainer(followed, {/*dataset=*/nullptr, dry.mesh});
    checker.declare(trainer.parameters(), declared);
    for (int64_t step = 0; step < kSteps; ++step) {
      trainer.train_step(step);
      trainer.report(step, /*peak_gflops=*/1);
      checker.end_step();
    }
    follow_other_passes(followed, dry.mesh, trainer, declared, checker);
  } catch (const types::TypeError& error) {
    result.error = fmt::format("rank {}: {}", setting.rank, error.what());
  }
  result.ops = checker.ops();
  result.messages = checker.messages();
  result.mutated = checker.mutated();
  result.mutated_untyped = checker.mutated_untyped();
  if (sent != nullptr) *sent = checker.sent();
  if (received != nullptr) *received = checker.received();
  return result;
}

}  // namespace

TypeCheck check_types_of(const TrainConfig& config, const TypedRank& of,
                         std::map<int, int64_t>* sent, std::map<int, int64_t>* received) {
  Holdings holdings(config);
  return check_rank(config, of, holdings, sent, received);
}

TypeCheck check_types(const TrainConfig& config, const types::Mutation& mutation) {
  const MeshSizes mesh = config.mesh();
  const std::vector<Factor> factors = factors_of(config);
  Holdings holdings(config);
  TypeCheck all;
  std::set<int> seen;
  for (TypedPlace place : {TypedPlace::first, TypedPlace::second}) {
    std::map<int, std::map<int, int64_t>> sent, received;  // by rank and peer
    for (int64_t stage = 0; stage < mesh.pp; ++stage) {
      const TypedRank of{place, stage, mutation, {}};
      const int rank = rank_at(mesh, factors, of);
      if (!seen.insert(rank).second) continue;  // along factors of 1 both are one
      const TypeCheck found = check_rank(config, of, holdings, &sent[rank], &received[rank]);
      all.ranks += found.ranks;
      all.ops += found.ops;
      all.messages += found.messages;
      if (!found.mutated.empty()) all.mutated = found.mutated;
      all.mutated_untyped = all.mutated_untyped || found.mutated_untyped;
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

/// Transformer layers of a stage, by their MLP.
struct StageLayers {
  int64_t dense = 0, with_experts = 0;
  bool operator==(const StageLayers&) const = default;
};

/// Layers of each stage that are kept: of each kind the first and the last.
std::vector<StageLayers> kept_layers(const TrainConfig& config) {
  const int64_t count = config.pipeline.schedule(config.grad_acc_steps).stages.count();
  std::vector<StageLayers> stages;
  for (const BlockRange& blocks : blocks_of_stages(config.pipeline, config.model, count)) {
    StageLayers& stage = stages.emplace_back();
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      if (block == 0 || block > config.model.num_layers) continue;  // the embedding and the head
      int64_t& kind = config.model.experts.at(block - 1) ? stage.with_experts : stage.dense;
      kind = std::min<int64_t>(2, kind + 1);
    }
  }
  return stages;
}

/// Without `count` stages between others that have the same layers; nothing where there are fewer.
std::optional<std::vector<StageLayers>> without(std::vector<StageLayers> stages, int64_t count) {
  for (size_t i = 2; count > 0 && i + 2 < stages.size();) {
    if (stages[i] == stages[i - 1] && stages[i] == stages[i + 1]) {
      stages.erase(stages.begin() + int64_t(i));
      --count;
    } else {
      ++i;
    }
  }
  if (count > 0) return {};
  return stages;
}

/// The layout with these layers on so many ranks of pp.
TrainConfig with_stages(TrainConfig config, const std::vector<StageLayers>& stages, int64_t ranks) {
  std::vector<int64_t> layers;
  int64_t dense = 0, all = 0;
  for (const StageLayers& stage : stages) {
    layers.push_back(stage.dense + stage.with_experts);
    dense += stage.dense;
    all += layers.back();
  }
  config.model.num_layers = all;
  if (config.model.experts.num_experts > 0) config.model.experts.first_dense_layers = dense;
  config.pipeline.pp_size = ranks;
  config.communication->ranks = 0;  // as many as the mesh has
  if (layers.size() > 1) config.pipeline.pp_layers = fmt::format("{}", fmt::join(layers, ","));
  return config;
}

bool is_accepted(TrainConfig& config) {
  try {
    config.each_part([&](const auto& part) { part.check(config); });
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

/// Whether groups cut the other axes of both meshes at the same places.
bool has_same_factors(const std::vector<Factor>& one, const std::vector<Factor>& two) {
  return std::ranges::equal(one, two, [](const Factor& a, const Factor& b) {
    const bool is_pp = a.axis == MeshAxis::pp;
    return a.axis == b.axis && (is_pp || (a.stride == b.stride && a.size == b.size));
  });
}

}  // namespace

TrainConfig reduced_for_types(const TrainConfig& config) {
  constexpr int64_t kMicroBatches = 3;
  // The first, the last and between. DualPipe's first rank puts off p/2 - 1 products of weights'
  // gradients, and only from the second one on do they add to what is there.
  const int64_t fewest_stages = config.pipeline.pp_schedule == "dualpipe" ? 6 : 4;
  const std::vector<Factor> factors = factors_of(config);
  const std::vector<StageLayers> stages = kept_layers(config);
  const int64_t pp = config.pipeline.pp_size, chunks = std::ssize(stages) / pp;
  for (int64_t ranks = std::min(pp, fewest_stages); ranks <= pp; ++ranks) {
    const auto kept = without(stages, std::ssize(stages) - ranks * chunks);
    if (!kept) continue;
    TrainConfig reduced = with_stages(config, *kept, ranks);
    const int64_t fewest = std::min(config.grad_acc_steps, kMicroBatches);
    for (int64_t count = fewest; count <= config.grad_acc_steps; ++count) {
      reduced.grad_acc_steps = count;
      if (!is_accepted(reduced)) continue;
      if (has_same_factors(factors_of(reduced), factors)) return reduced;
      break;
    }
  }
  return config;
}

TypeCheck check_types_reduced(const TrainConfig& config, const types::Mutation& mutation) {
  const TypeCheck found = check_types(reduced_for_types(config), mutation);
  return found.error.empty() ? found : check_types(config, mutation);
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

using TypesRow = std::array<std::string, 5>;

/// Rows in columns, a line each.
std::string aligned(const std::vector<TypesRow>& rows) {
  std::array<size_t, 4> widths{};
  for (const TypesRow& row : rows) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const TypesRow& row : rows) {
    std::string line = fmt::format("{:<{}}  {:<{}}  {:<{}}  {:<{}}  {}", row[0], widths[0], row[1],
                                   widths[1], row[2], widths[2], row[3], widths[3], row[4]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::vector<std::string> words_in(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

/// As "self_attn.o_proj".
std::string weight_of(const types::TypedOp& op) {
  std::string name = op.parameter;
  const std::string layer = fmt::format("model.layers.{}.", op.block - 1), end = ".weight";
  if (name.starts_with(layer)) name.erase(0, layer.size());
  if (name.ends_with(end)) name.erase(name.size() - end.size());
  return name;
}

/// The operations of one decoder layer in the first micro-batch, as rows.
class LayerTable {
 public:
  LayerTable(const std::vector<Factor>& factors, int block) : factors_(factors), block_(block) {}

  /// Returns whether the operation has a row.
  bool add(const types::TypedOp& op) {
    if (op.block != block_ || op.micro_batch != 0 || op.phase.empty()) return false;
    ends_ = ends_ || (op.phase == "forward" && was_backward_);  // in the second step
    if (ends_) return false;
    was_backward_ = was_backward_ || op.phase == "backward";
    std::vector<std::string> operands;
    for (const types::Type& type : op.operands) {
      const std::string text = noted(type);
      if (std::ranges::count(operands, text) == 0) operands.push_back(text);
    }
    rows_.push_back({op.phase, op.name, weight_of(op), op.result ? noted(*op.result) : "",
                     fmt::format("{}", fmt::join(operands, ", "))});
    return true;
  }
  /// How many rows are messages so far.
  int64_t messages() const {
    return std::ranges::count_if(
        rows_, [](const TypesRow& row) { return row[1].find(" over ") != std::string::npos; });
  }
  /// Whether the last row has all of these words, or ends of them such as "o_proj".
  bool last_row_has(const std::vector<std::string>& words) const {
    const std::vector<std::string> own =
        words_in(fmt::format("{} {} {}", rows_.back()[0], rows_.back()[1], rows_.back()[2]));
    return std::ranges::all_of(words, [&](const std::string& word) {
      return std::ranges::any_of(
          own, [&](const std::string& text) { return text == word || text.ends_with("." + word); });
    });
  }

  void print_all() const {
    print("{}\n", aligned(rows_));
    for (Kind kind : seen_) print("{}  {}\n", types::letter(kind), types::words(kind));
    print("\n");
  }

 private:
  std::string noted(const types::Type& type) {
    for (size_t f = 0; f < factors_.size(); ++f) seen_.insert(type[f]);
    return letters(type, factors_);
  }
  const std::vector<Factor>& factors_;
  int block_;
  bool was_backward_ = false, ends_ = false;
  std::vector<TypesRow> rows_ = {{"", "operation", "weight", "makes", "of"}};
  std::set<Kind> seen_;
};

/// How a tensor came to its type along one factor: from the last operation to the first, the
/// operations that gave it another letter, and between these which ones kept it.
class Chain {
 public:
  /// Chain of a tensor of this type, which the last operation of the history has written.
  Chain(const std::vector<types::Link>& history, int factor, const types::Type& type)
      : history_(history), f_(factor), letter_(letter_of(type)) {}

  std::vector<TypesRow> rows() {
    for (int64_t at = std::ssize(history_) - 1; at >= 0;) at = add(history_[at]);
    say_kept();
    return rows_;
  }

 private:
  /// Returns the link before this one, along the operand that decides; -1: there is none.
  int64_t add(const types::Link& link) {
    const std::optional<size_t> from = decisive(link);
    const char before = from ? letter_of(link.of[*from].type) : letter_;
    if (from && before == letter_) {
      kept_.push_back(link.op.name);
    } else {
      say_kept();
      put(letter_, link.op.name, weight_of(link.op), place_of(link.op), operands_of(link));
    }
    if (!from) return -1;
    letter_ = before;
    const types::Region& region = link.of[*from];
    if (region.link < 0) {
      say_kept();
      const std::string name = region.parameter ? region.parameter->name : "";
      put(before, std::string(region.origin), name, "", "");
    }
    return region.link;
  }
  /// The operand with the letter of the result, or the first that is no weight.
  std::optional<size_t> decisive(const types::Link& link) const {
    std::optional<size_t> first;
    for (size_t i = 0; i < link.of.size(); ++i) {
      const types::Region& region = link.of[i];
      const bool is_weight = region.link < 0 && region.parameter != nullptr;
      if (is_weight || types::is_neutral(region.type[f_])) continue;
      if (letter_of(region.type) == letter_) return i;
      if (!first) first = i;
    }
    if (!first && !link.of.empty()) first = 0;
    return first;
  }
  std::string operands_of(const types::Link& link) const {
    std::vector<std::string> letters;
    for (const types::Region& region : link.of) {
      const std::string letter(1, letter_of(region.type));
      if (std::ranges::count(letters, letter) == 0) letters.push_back(letter);
    }
    return letters.empty() ? "" : fmt::format("of {}", fmt::join(letters, " and "));
  }
  static std::string place_of(const types::TypedOp& op) {
    std::string text = op.phase;
    if (op.micro_batch >= 0) text += fmt::format(" of micro-batch {}", op.micro_batch);
    if (op.block >= 0) text += fmt::format(", block {}", op.block);
    return text;
  }
  char letter_of(const types::Type& type) const { return types::letter(type[f_]); }
  void put(char letter, const std::string& name, const std::string& weight,
           const std::string& place, const std::string& of) {
    rows_.push_back({fmt::format("  {}", letter), name, weight, place, of});
  }
  void say_kept() {
    if (kept_.empty()) return;
    constexpr size_t kNamed = 3;
    put(letter_,
        kept_.size() > kNamed
            ? fmt::format("kept by {} operations, from {} on", kept_.size(), kept_.back())
            : fmt::format("kept by {}", fmt::join(kept_, ", ")),
        "", "", "");
    kept_.clear();
  }

  const std::vector<types::Link>& history_;
  const int f_;
  char letter_;  ///< of what the next link has written
  std::vector<std::string> kept_;
  std::vector<TypesRow> rows_;
};

}  // namespace

std::string why_typed(const TrainConfig& config, const std::string& words) {
  const std::vector<Factor> factors = factors_of(config);
  LayerTable table(factors, /*block=*/1);
  std::string text;
  TypedRank first;
  first.keeps_history = true;
  first.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
    if (!table.add(op) || !op.result || !table.last_row_has(words_in(words))) return;
    text = fmt::format("{} {}: {}\n", op.name, weight_of(op), letters(*op.result, factors));
    std::string before;
    for (size_t f = 0; f < factors.size(); ++f) {
      const std::string chain = aligned(Chain(checker.history(), int(f), *op.result).rows());
      const bool is_new = f == 0 || factors[f].axis != factors[f - 1].axis || chain != before;
      if (is_new) text += fmt::format("\nalong {}\n{}", factors[f].name(), chain);
      before = chain;
    }
  };
  check_types_of(reduced_for_types(config), first);
  if (text.empty()) {
    usage_error(
        "mesh_why={}: no operation of a layer has all of these words; try words of a row of "
        "--mesh_show types, such as \"linear_forward o_proj\"",
        words);
  }
  return text;
}

int64_t message_of_row(const TrainConfig& config, int64_t place) {
  const std::vector<Factor> factors = factors_of(config);
  LayerTable table(factors, /*block=*/1);
  int64_t number = -1;
  TypedRank first;
  first.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
    const int64_t before = table.messages();
    if (table.add(op) && table.messages() == place && before < place) {
      number = checker.messages() - 1;
    }
  };
  check_types_of(reduced_for_types(config), first);
  if (number < 0) {
    usage_error("mesh_left_out={}: the layer has {} messages; try one of them", place,
                table.messages());
  }
  return number;
}

bool say_types(const TrainConfig& config, const types::Mutation& mutation) {
  const TypeCheck found = check_types_reduced(config, mutation);
  if (!found.error.empty()) {
    print("NOT TYPED\n  {}\n", found.error);
    return false;
  }
  const TrainConfig reduced = reduced_for_types(config);
  std::string text = fmt::format("typed: {} ops and {} messages of {} ranks (of {})", found.ops,
                                 found.messages, found.ranks, config.mesh().ranks());
  const auto add = [&](const char* what, int64_t kept, int64_t all) {
    if (kept < all) text += fmt::format(", {} {} (of {})", kept, what, all);
  };
  add("micro-batches", reduced.grad_acc_steps, config.grad_acc_steps);
  add("layers", reduced.model.num_layers, config.model.num_layers);
  add("stages", reduced.pipeline.pp_size, config.pipeline.pp_size);
  print("{}\n", text);
  return true;
}

int show_types(const TrainConfig& config) {
  if (config.composition.mesh_left_out > 0) {
    const int64_t number = message_of_row(config, config.composition.mesh_left_out);
    const TypeCheck found =
        check_types(reduced_for_types(config), {types::Mutation::What::left_out, number});
    print("{}\n", found.error.empty() ? "all types fit without the message" : found.error);
    return found.error.empty() ? 0 : 1;
  }
  if (!config.composition.mesh_why.empty()) {
    print("{}\n", why_typed(config, config.composition.mesh_why));
    return say_types(config) ? 0 : 1;
  }
  const std::vector<Factor> factors = factors_of(config);
  const TrainConfig reduced = reduced_for_types(config);
  LayerTable table(factors, /*block=*/1);  // behind the embedding
  TypedRank first;
  first.listener = [&](const types::Checker&, const types::TypedOp& op) { table.add(op); };
  check_types_of(reduced, first);
  table.print_all();
  return say_types(config) ? 0 : 1;
}

}  // namespace usp
