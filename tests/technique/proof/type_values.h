#pragma once

#include <map>
#include <set>

#include "base/rng.h"
#include "comm/launch.h"
#include "proof/compositions.h"
#include "proof/types.h"
#include "technique/tiny_llama.h"
#include "testing.h"
#include "train_step.h"

/// Whether the letters are true: what types say of an operation's result, beside its values on all
/// ranks of a run in f64, and on one process.
namespace usp::test::of_types {

using types::Factor;
using types::Kind;
using enum types::Kind;

/// An operation of the first step, which has the same name on every rank and in every layout.
struct Place {
  std::string name, phase;
  int block = -1;
  int64_t micro_batch = -1;
  auto operator<=>(const Place&) const = default;
};

/// One T for each of the operations at a place, in the order in which they run.
template <class T>
using AtPlaces = std::map<Place, std::vector<T>>;

/// Whether the op adds to what other micro-batches have left: then its result is what it has added.
inline bool sums_micro_batches(std::string_view name, bool flag) {
  const bool is_gradient = name.ends_with("backward_weight") || name == "embedding_backward";
  return name == "accumulate" || (flag && is_gradient);
}

/// Equal but for rounding, also that of a sum of which nothing is left.
inline bool are_close(const Values& a, const Values& b) {
  if (a.size() != b.size()) return false;
  double difference = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
    if (std::isnan(a[i]) || std::isnan(b[i])) return false;
  }
  return difference <= 1e-9 * scale + 1e-14;
}

/// Keeps the values that each operation makes.
class Watch : public Recorder {
 public:
  const AtPlaces<Values>& made_by() const { return made_by_; }

  void op(std::string_view name, int64_t, int64_t, std::span<const Tensor* const> operands,
          bool flag) override {
    keep();
    Running& running = running_[thread_turn()];
    const Phase& phase = phases_[thread_turn()].back();
    running.output = *operands.front();
    running.place = {std::string(name), phase.name, Runtime::current().block(), phase.micro_batch};
    if (sums_micro_batches(name, flag)) running.before = read(running.output);
  }
  int64_t post(const Posted&) override {
    keep();
    return 0;
  }
  void wait(int64_t) override { keep(); }
  void begin_phase(std::string_view name, int64_t, int64_t micro_batch) override {
    keep();
    Phase now = phases_[thread_turn()].back();
    if (name == "forward" || name == "backward" || name == "recompute") now.name = name;
    if (micro_batch >= 0) now.micro_batch = micro_batch;
    phases_[thread_turn()].push_back(now);
  }
  void end_phase() override {
    keep();
    if (phases_[thread_turn()].size() > 1) phases_[thread_turn()].pop_back();
  }

 private:
  struct Phase {
    std::string name;
    int64_t micro_batch = -1;
  };
  struct Running {
    Place place;
    Tensor output;
    Values before;
  };

  /// The op that ran last has ended.
  void keep() {
    Running done = std::exchange(running_[thread_turn()], {});
    if (done.place.name.empty()) return;
    Values values = read(done.output);
    for (size_t i = 0; i < done.before.size(); ++i) values[i] -= done.before[i];
    made_by_[done.place].push_back(std::move(values));
  }
  /// Tensor::items() may not be called in a step.
  static Values read(const Tensor& tensor) {
    if (!tensor.defined() || tensor.dtype() != DType::f64) return {};
    Values values(tensor.numel());
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      int64_t left = i, at = 0;
      for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
        at += left % tensor.size(axis) * tensor.stride(axis);
        left /= tensor.size(axis);
      }
      values[i] = tensor.data<double>()[at];
    }
    return values;
  }

  AtPlaces<Values> made_by_;
  Running running_[usp::kTurns];
  std::vector<Phase> phases_[usp::kTurns] = {{Phase{}}, {Phase{}}};
};

/// The first step of every rank of a layout.
inline std::vector<AtPlaces<Values>> values_of_step(const TrainConfig& config,
                                                    const Dataset& dataset) {
  std::vector<AtPlaces<Values>> ranks(config.mesh().ranks());
  run_threads(int(ranks.size()), [&](const Communicator& world) {
    world.engine().set_node_size(config.communication->node_size);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    Watch watch;
    Runtime::current().tell(&watch);
    trainer.train_step(0);
    Runtime::current().tell(nullptr);
    ranks[world.rank()] = watch.made_by();
  });
  return ranks;
}

/// What is the same on several ranks, or differs, joined along one factor after the other.
class Joined {
 public:
  /// What is at these digits of the factors.
  void add(const std::vector<int64_t>& digits, const Values& values) { parts_[digits] = values; }

  /// Along a factor; false where the values are not of the kind.
  bool join(size_t factor, Kind kind) {
    std::map<std::vector<int64_t>, std::vector<Values>> groups;
    for (auto& [digits, values] : parts_) {
      std::vector<int64_t> others = digits;
      others[factor] = 0;
      groups[others].push_back(std::move(values));
    }
    parts_.clear();
    for (auto& [others, values] : groups) {
      const std::optional<Values> whole = joined(values, kind);
      if (!whole) return false;
      parts_[others] = *whole;
    }
    return true;
  }
  /// All values in order, once they are joined along every factor.
  Values sorted() const {
    REQUIRE(parts_.size() == 1);
    Values values = parts_.begin()->second;
    std::ranges::sort(values);
    return values;
  }

 private:
  static std::optional<Values> joined(const std::vector<Values>& parts, Kind kind) {
    Values whole = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) {
      if (kind == replicated || kind == zero) {
        if (!are_close(parts[i], whole)) return {};
      } else if (kind == partial || kind == maximum) {
        if (parts[i].size() != whole.size()) return {};
        for (size_t j = 0; j < whole.size(); ++j) {
          const double other = parts[i][j];
          whole[j] = kind == partial ? whole[j] + other : std::max(whole[j], other);
        }
      } else {
        whole.insert(whole.end(), parts[i].begin(), parts[i].end());
      }
    }
    if (kind == zero && std::ranges::any_of(whole, [](double x) { return x != 0; })) return {};
    return whole;
  }

  std::map<std::vector<int64_t>, Values> parts_;
};

/// A type of an operation's result.
struct Typed {
  types::Type type{};
  bool is_mixed = false;
};

/// Kinds that this test can join: of the others nothing is known, or nothing that one process has.
inline bool can_join(Kind kind) {
  return kind != unwritten && kind != own_sums && kind != layers && kind != unknown;
}

/// In the order in which they are joined: parts that lie side by side come last, when none of them
/// is a term any more.
inline constexpr Kind kOrder[] = {replicated, zero,   partial, maximum, rows,
                                  columns,    inputs, outputs, experts, dispatched};

/// Ops that are not compared: numbers that every rank enters into a sum after the step, of which
/// term() has a test of its own; what fills or moves buffers that one process may not have; and
/// dropout, which goes by runs of rows, and a layout has other runs.
inline const std::set<std::string> kLeftOut = {"cross_entropy_loss",
                                               "balance_loss_forward",
                                               "z_loss_forward",
                                               "router_entropy",
                                               "fill",
                                               "copy",
                                               "drop_elements"};

class Comparison {
 public:
  Comparison(const Twin& twin, uint64_t seed)
      : config_(twin.config),
        mesh_(config_.mesh()),
        factors_(factors_of(config_)),
        random_(seed, "operations") {
    const TrainConfig one = alone(twin);
    const RandomText text(config_, 4000 + 40 * config_.seq_len);
    ranks_ = values_of_step(config_, text.dataset);
    alone_ = values_of_step(one, text.dataset)[0];
  }

  /// Number of factors of operations along which each kind was seen to be true.
  const std::map<char, int64_t>& seen() const { return seen_; }
  /// What is not as the types say.
  const std::vector<std::string>& wrong() const { return wrong_; }

  void compare() {
    for (int64_t stage = 0; stage < mesh_.pp; ++stage) {
      AtPlaces<Typed> types;
      TypedRank of{TypedPlace::first, stage, {}, {}};
      of.listener = [&](const types::Checker&, const types::TypedOp& op) {
        if (op.name.find(" over ") != std::string::npos) return;
        types[{op.name, op.phase, op.block, op.micro_batch}].push_back(
            {op.result.value_or(types::all_of(unknown)), op.is_mixed});
      };
      REQUIRE(check_types_of(config_, of).error == "");
      for (const auto& [place, typed] : types) compare_place(stage, place, typed);
    }
  }

 private:
  void compare_place(int64_t stage, const Place& place, const std::vector<Typed>& typed) {
    if (place.phase.empty() || place.micro_batch < 0 || kLeftOut.contains(place.name)) return;
    // What one process has of these: as many operations in the micro-batches of each rank of dp.
    std::vector<const std::vector<Values>*> references;
    for (int64_t d = 0; d < mesh_.dp; ++d) {
      Place own = place;
      own.micro_batch = place.micro_batch * mesh_.dp + d;
      const auto found = alone_.find(own);
      if (found == alone_.end()) return;
      references.push_back(&found->second);
    }
    std::vector<std::pair<MeshCoordinates, const std::vector<Values>*>> own;
    for (int64_t rank = 0; rank < mesh_.ranks(); ++rank) {
      const MeshCoordinates at = mesh_.coordinates(rank);
      if (at[size_t(MeshAxis::pp)] != stage) continue;
      const auto found = ranks_[rank].find(place);
      if (found == ranks_[rank].end()) return;
      own.emplace_back(at, &found->second);
    }
    const size_t count = references[0]->size();
    const auto has_as_many = [&](const auto* values) { return values->size() == count; };
    for (const auto& [at, values] : own) {
      if (!has_as_many(values)) return;
    }
    if (!std::ranges::all_of(references, has_as_many) || typed.size() < count) return;
    for (size_t i = 0; i < count; ++i) {
      if (typed[i].is_mixed || random_.uniform(next_++) > kSampled) continue;
      // A layout may run the ops of this name in another order.
      std::string wrong = compare_op(place, i, i, typed[i].type, own, references);
      const std::string first = wrong;
      for (size_t j = 0; j < count && !wrong.empty(); ++j) {
        wrong = compare_op(place, i, j, typed[i].type, own, references);
      }
      if (!wrong.empty()) wrong_.push_back(first);
    }
  }

  /// What is wrong with the op of this number, beside one of one process; empty: nothing.
  std::string compare_op(
      const Place& place, size_t number, size_t reference, const types::Type& type,
      const std::vector<std::pair<MeshCoordinates, const std::vector<Values>*>>& own,
      const std::vector<const std::vector<Values>*>& references) {
    Joined here, there;
    for (const auto& [at, values] : own) {
      std::vector<int64_t> digits;
      for (const Factor& factor : factors_) digits.push_back(digit(factor, at));
      here.add(digits, (*values)[number]);
    }
    for (int64_t d = 0; d < mesh_.dp; ++d) {
      std::vector<int64_t> digits;
      for (const Factor& factor : factors_) {
        const bool is_dp = factor.axis == MeshAxis::dp;
        digits.push_back(is_dp ? d / factor.stride % factor.size : 0);
      }
      there.add(digits, (*references[d])[reference]);
    }
    std::string letters;
    for (size_t f = 0; f < factors_.size(); ++f) {
      if (factors_[f].axis == MeshAxis::pp) continue;
      if (!can_join(type[f])) return "";
      letters += fmt::format("{}:{} ", factors_[f].name(), types::letter(type[f]));
    }
    const std::string op =
        fmt::format("{} in {}, block {}, micro-batch {}, number {}, {}", place.name, place.phase,
                    place.block, place.micro_batch, number, letters);
    for (Kind kind : kOrder) {
      for (size_t f = 0; f < factors_.size(); ++f) {
        if (factors_[f].axis == MeshAxis::pp || type[f] != kind) continue;
        // Experts of all ranks together have the rows of all.
        const bool is_dp = factors_[f].axis == MeshAxis::dp;
        there.join(f, !is_dp ? rows : kind == experts ? partial : kind);
        if (here.join(f, kind)) continue;
        return fmt::format("{}: along {} it is not {}", op, factors_[f].name(), types::words(kind));
      }
    }
    const Values found = here.sorted(), expected = there.sorted();
    if (found.size() != expected.size()) {
      return fmt::format("{}: {} values, one process has {}", op, found.size(), expected.size());
    }
    if (!are_close(found, expected)) return fmt::format("{}: not the values of one process", op);
    if (found.empty()) return "";
    for (size_t f = 0; f < factors_.size(); ++f) {
      if (factors_[f].axis != MeshAxis::pp) ++seen_[types::letter(type[f])];
    }
    return "";
  }

  static int64_t digit(const Factor& factor, const MeshCoordinates& at) {
    return at[size_t(factor.axis)] / factor.stride % factor.size;
  }

  static constexpr double kSampled = 0.5;
  const TrainConfig config_;
  const MeshSizes mesh_;
  const std::vector<Factor> factors_;
  RandomStream random_;
  uint64_t next_ = 0;
  std::vector<AtPlaces<Values>> ranks_;
  AtPlaces<Values> alone_;
  std::map<char, int64_t> seen_;
  std::vector<std::string> wrong_;
};

}  // namespace usp::test::of_types
