#include "proof/prove.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "accounting/memory.h"
#include "accounting/traffic.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/rules.h"
#include "comm/launch.h"
#include "composition/layout.h"
#include "proof/compositions.h"
#include "proof/layer_map.h"
#include "proof/rounding.h"
#include "proof/temporary_folder.h"
#include "proof/types.h"
#include "tensor/console.h"
#include "train/whole_state.h"
#include "train_step.h"

namespace usp {

namespace {

constexpr int64_t kSteps = 2;
constexpr double kTolerance = 1e-10;
/// Messages as short as a twin's go in one piece; those of the real layout do not.
constexpr int64_t kPieceBytes = 256;

/// A folder with tokens in documents that are shorter and longer than a sample. Token 0 ends a
/// document.
class TwinFolder {
 public:
  TwinFolder(int64_t vocab_size, int64_t seq_len, int64_t val_samples) {
    std::ofstream stream(tokens());
    const RandomStream random(1, "documents");
    const std::vector<int64_t> lengths = {1, 2, 5, seq_len / 2, seq_len, 2 * seq_len};
    const auto put = [&](uint64_t token) { stream.put(char(token)).put(char(token >> 8)); };
    uint64_t draws = 0;
    const auto write = [&](int64_t at_least) {
      int64_t tokens = 0;
      while (tokens < at_least) {
        const int64_t length = lengths[random.bits(draws++).a % lengths.size()];
        for (int64_t i = 0; i < length; ++i)
          put(1 + random.bits(draws++).a % uint64_t(vocab_size - 1));
        put(0);
        tokens += length + 1;
      }
      return tokens;
    };
    const int64_t train_tokens = write(4000 + 40 * seq_len);
    const int64_t val_tokens = write(val_samples * seq_len + 1);
    val_fraction_ = (double(val_tokens) + 0.5) / double(train_tokens + val_tokens);
  }

  double val_fraction() const { return val_fraction_; }
  std::string tokens() const { return (folder_.path() / "documents.bin").string(); }
  std::string checkpoints() const { return folder_.path().string(); }

 private:
  TemporaryFolder folder_;
  double val_fraction_ = 0;  ///< of the tokens: those that validation reads
};

/// Updates that are large enough to show in the second step, with clipping at work; and validation
/// of so many samples.
TrainConfig with_updates(TrainConfig config, int64_t val_samples) {
  config.eval_samples = val_samples;
  config.optimizer.lr = 0.01;
  config.optimizer.warmup_steps = 2;
  if (config.optimizer.grad_clip > 0) config.optimizer.grad_clip = 0.05;
  config.steps = 20;
  return config;
}

struct Step {
  double loss, grad_norm;
  WholeState state;
};

struct Expected {
  std::vector<Step> steps;
  double val_loss = 0;  ///< after the last of them
};

Expected train_alone(const TrainConfig& config, const Dataset& dataset) {
  Expected expected;
  run_threads(1, [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    for (int64_t step = 0; step < kSteps; ++step) {
      trainer.train_step(step);
      const StepMetrics metrics = trainer.report(step, 0);
      expected.steps.push_back({metrics.loss, metrics.grad_norm, WholeState(trainer.state())});
    }
    expected.val_loss = trainer.evaluate();
  });
  return expected;
}

/// What the ranks have found, each on its own.
class Findings {
 public:
  explicit Findings(const std::vector<PlacedPart>& parts) : parts_(parts) {}

  void number(int64_t step, const char* what, double found, double expected) {
    const double off = std::abs(found / expected - 1);
    const std::scoped_lock lock(mutex_);
    largest_ = std::max(largest_, off);
    if (off <= kTolerance) return;
    numbers_.emplace(fmt::format("{} of step {} is {:.12g}, one process has {:.12g}", what,
                                 step + 1, found, expected));
  }
  void tensors(int64_t step, int rank, const WholeState::Comparison& comparison) {
    const std::scoped_lock lock(mutex_);
    largest_ = std::max(largest_, comparison.largest);
    if (!comparison.first) return;
    // Of ranks that differ in the same place, the lowest: else it would be whoever was the fastest.
    const std::tuple key(step, comparison.first->order, rank);
    if (first_ && std::tuple(first_step_, first_->order, rank_) <= key) return;
    first_step_ = step;
    first_ = comparison.first;
    rank_ = rank;
  }
  void bytes(const std::string& what, double found, double expected) {
    const std::scoped_lock lock(mutex_);
    if (std::abs(found - expected) < 0.5) return;
    bytes_.insert(fmt::format("{}: {:.0f} bytes, by formula {:.0f}", what, found, expected));
  }

  void step() { ++steps_; }

  double largest() const { return largest_; }
  int64_t steps() const { return steps_; }
  /// In the order in which they explain each other.
  std::string text() const {
    std::vector<std::string> lines;
    if (first_) lines.push_back(text_of_tensor());
    for (const std::string& line : numbers_) lines.push_back(line);
    for (const std::string& line : bytes_) lines.push_back(line);
    return fmt::format("{}", fmt::join(lines, "\n"));
  }

 private:
  std::string text_of_tensor() const {
    std::string text = fmt::format(
        "the first that differs: {} of {}, element {} on rank {} after step {}: {:.12g}, "
        "one process has {:.12g}",
        first_->what, first_->parameter, first_->element, rank_, first_step_ + 1, first_->found,
        first_->expected);
    for (const PlacedPart& part : parts_) {
      if (part.name != first_->parameter || !std::ranges::count(part.ranks, rank_)) continue;
      const auto list = [](const std::vector<std::string>& groups) {
        return groups.empty() ? "no group" : fmt::format("{}", fmt::join(groups, ", "));
      };
      text += fmt::format("\nthat weight: sharded over {}; copied over {}; gradient summed over {}",
                          list(part.sharded_over), list(part.copied_over), list(part.summed_over));
      break;
    }
    return text;
  }

  const std::vector<PlacedPart>& parts_;
  std::mutex mutex_;
  double largest_ = 0;
  int64_t steps_ = 0;
  std::set<std::string> numbers_, bytes_;
  std::optional<WholeState::Difference> first_;
  int64_t first_step_ = 0;
  int rank_ = 0;
};

/// What a step has sent, of all ranks together, beside the formulas.
class Sent {
 public:
  Sent(const TrainConfig& config, int rank) : rows_(step_traffic(config, rank)) {}

  void begin() { before_ = Runtime::current().ledger(); }
  /// Collective.
  void compare(const Communicator& world, Findings& findings) {
    for (const Traffic& row : rows_) {
      const auto sent =
          double(row.counted.wire_bytes(Runtime::current().ledger(), /*since=*/before_));
      const double all = world.sum(sent), expected = world.sum(row.formula);
      // Who has how many tokens of experts is the routers' business.
      if (row.beside.find("even load") != std::string::npos) continue;
      if (world.rank() == 0) findings.bytes(row.what + " in a step", all, expected);
    }
  }

 private:
  std::vector<Traffic> rows_;
  Ledger before_;
};

void compare_memory(const TrainConfig& config, int rank, Findings& findings) {
  const Allocator& allocator = Runtime::current().allocator();
  const StateBytes states = predict(config, rank).states;
  const std::vector<std::tuple<const char*, Category, int64_t>> kinds = {
      {"weights", Category::weights, states.weights},
      {"gradients", Category::gradients, states.gradients},
      {"optimizer states", Category::optimizer, states.optimizer}};
  for (const auto& [what, category, bytes] : kinds) {
    findings.bytes(fmt::format("{} that last on rank {}", what, rank),
                   double(allocator.live_bytes(category)), double(bytes));
  }
}

/// Bytes by operation and communicator.
using BytesOf = std::map<std::string, int64_t>;

/// Adds what has been sent to other nodes since `before`. How many rows experts get is the routers'
/// business.
void add_to_other_nodes(const Ledger& sent, const Ledger& before, BytesOf& bytes) {
  for (const auto& [key, entry] : sent.entries()) {
    const auto& [group, kind] = key;
    if (group.starts_with("ep")) continue;
    bytes[fmt::format("{} over {}", name(kind), group)] +=
        entry.net_bytes - before.get(group, kind).net_bytes;
  }
}

/// What a rank has sent to other nodes, beside a dry run of the same steps.
void compare_nodes(const TrainConfig& config, int rank, BytesOf found, Findings& findings) {
  if (config.communication->node_size == 0) return;
  BytesOf expected;
  add_to_other_nodes(simulate<Trainer>(config, rank).sent, {}, expected);
  for (const auto& [what, bytes] : expected) found.try_emplace(what, 0);
  for (const auto& [what, bytes] : found) {
    findings.bytes(fmt::format("{} to other nodes from rank {}", what, rank), double(bytes),
                   double(expected[what]));
  }
}

/// Trains from the checkpoint in `folder`, if there is one, and leaves one of the first step there.
void train_rank(const TrainConfig& config, const Dataset& dataset, const Communicator& world,
                const Expected& expected, const std::string& folder, Findings& findings) {
  world.engine().set_node_size(config.communication->node_size);
  world.engine().limit_pieces(kPieceBytes);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  Sent sent(config, world.rank());
  const RunIdentity identity{"{}", config.global_batch_size(), "documents", {}};
  const std::string checkpoint = newest_checkpoint(folder);
  const int64_t begin =
      checkpoint.empty() ? 0 : load_checkpoint(checkpoint, trainer.state(), identity, world);
  BytesOf to_other_nodes;
  for (int64_t step = begin; step < kSteps; ++step) {
    sent.begin();
    const Ledger before = Runtime::current().ledger();
    trainer.train_step(step);
    add_to_other_nodes(Runtime::current().ledger(), before, to_other_nodes);
    // Weights that a checkpoint has brought may have to be gathered once more.
    if (step > begin || checkpoint.empty()) sent.compare(world, findings);
    const Step& own = expected.steps[step];
    findings.tensors(step, world.rank(), own.state.compare(trainer.state(), kTolerance));
    const StepMetrics metrics = trainer.report(step, 0);
    if (world.rank() == 0) {
      findings.step();
      findings.number(step, "the loss", metrics.loss, own.loss);
      findings.number(step, "the gradient norm", metrics.grad_norm, own.grad_norm);
    }
    if (step == 0) write_checkpoint(folder, 1, trainer.state(), identity, world);
  }
  compare_memory(config, world.rank(), findings);
  if (checkpoint.empty()) compare_nodes(config, world.rank(), to_other_nodes, findings);
  const double val_loss = trainer.evaluate();
  // Where the training differs it follows that this does.
  if (world.rank() > 0 || !findings.text().empty()) return;
  findings.number(kSteps - 1, "the validation loss", val_loss, expected.val_loss);
}

/// On every rank what the first has found of those that have found anything.
void agree(const Communicator& world, TwinResult& result) {
  const std::vector<std::string> failures = world.all_gather_text(result.failure);
  const auto first = std::ranges::find_if(failures, [](const auto& of) { return !of.empty(); });
  if (first != failures.end()) result.failure = *first;
  for (const std::string& largest : world.all_gather_text(fmt::format("{}", result.largest))) {
    result.largest = std::max(result.largest, std::stod(largest));
  }
}

/// On threads, or on the ranks of `world`.
TwinResult run_beside_one(const Twin& twin, const Twin* then, const Communicator* world) {
  const int64_t begin = clock_ns();
  const ModelConfig& model = twin.config.model;
  const int64_t seq_len = twin.config.seq_len;
  // One more than the ranks take at once: in the second pass some have none.
  const int64_t val_samples = twin.config.data_parallel.dp_size * twin.config.micro_batch_size + 1;
  const TwinFolder folder(model.vocab_size, seq_len, val_samples);
  const TokenFile file(folder.tokens(), 2, model.vocab_size);
  const Dataset dataset(file, seq_len, folder.val_fraction(), DataOrder::shuffled,
                        uint64_t(twin.config.seed));
  // One folder for the checkpoints of all ranks.
  const std::string checkpoints = world == nullptr
                                      ? folder.checkpoints()
                                      : world->all_gather_text(folder.checkpoints()).front();
  const auto of_all = [&](double own) { return int64_t(world == nullptr ? own : world->sum(own)); };
  TwinResult result;
  std::optional<Expected> expected;
  const auto train = [&](const Twin& of) {
    TrainConfig config = with_updates(of.config, val_samples);
    const std::vector<PlacedPart> parts = place_parameters(config);
    config.composition.check_copies = has_copies(parts) ? 1 : 0;
    Findings findings(parts);
    try {
      if (!expected) expected = train_alone(with_updates(alone(of), val_samples), dataset);
      const auto train_on = [&](const Communicator& ranks) {
        train_rank(config, dataset, ranks, *expected, checkpoints, findings);
      };
      if (world == nullptr) {
        run_threads(int(config.mesh().ranks()), train_on, /*timeout_seconds=*/20);
      } else {
        Runtime runtime(Device::cpu, world->rank(), world->size());
        const Runtime::Use use(runtime);
        train_on(*world);
      }
      result.failure = findings.text();
    } catch (const std::exception& error) {
      if (world != nullptr) throw;  // the other ranks wait for this one
      result.failure = findings.text();
      result.failure += (result.failure.empty() ? "" : "\n") + std::string(error.what());
    }
    result.largest = std::max(result.largest, findings.largest());
    result.compared += of_all(double(findings.steps()));
    if (world != nullptr) agree(*world, result);
  };
  train(twin);
  if (then != nullptr && result.failure.empty()) {
    train(*then);
    if (!result.failure.empty()) result.failure = "after it went on:\n" + result.failure;
  }
  result.seconds = seconds_since(begin);
  return result;
}

}  // namespace

TwinResult run_twin(const Twin& twin, const Twin* then) {
  return run_beside_one(twin, then, nullptr);
}

TwinResult run_twin(const Twin& twin, const Twin* then, const Communicator& world) {
  return run_beside_one(twin, then, &world);
}

std::string indented(std::string text) {
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos;)
    text.replace(at++, 1, "\n  ");
  return "  " + text;
}

namespace {

/// What differs from one process in f64; prints how little, where it is nothing but rounding.
std::string prove_equal(const Twin& twin) {
  const TwinResult result = run_twin(twin);
  if (result.failure.empty()) {
    print("  equal to one process within {:.1e}, in {:.1f} s\n", result.largest, result.seconds);
  }
  return result.failure;
}

/// The same in bf16, where rounding is what lies between orders of one process.
std::string prove_rounding(const Twin& twin) {
  const RoundingResult result = compare_rounding(twin);
  if (!result.orders.empty()) print("{}\n", indented(table_of(result)));
  if (result.failure.empty()) {
    print("  {} ({:.2f} times), in {:.1f} s\n",
          result.ratio <= 1
              ? "rounding: no further from one process than its orders are from each other"
              : "perhaps rounding: further, but less than twice as far as its orders",
          result.ratio, result.seconds);
  }
  return result.failure;
}

}  // namespace

namespace {

/// Whether types fit, as far as the layout has any; says so.
bool is_typed(const TrainConfig& config, const types::Mutation& mutation) {
  try {
    return say_types(config, mutation);
  } catch (const UsageError& error) {  // groups that are no factors of an axis
    print("not typed: {}\n", error.what());
    return true;
  }
}

}  // namespace

int prove(const TrainConfig& config, const types::Mutation& mutation) {
  const bool asks_types = config.composition.mesh_show == "types";
  if (asks_types && config.composition.prove == 0) return show_types(config);
  if (config.composition.mesh_show == "shapes") return show_layer(config);
  if (config.mesh().ranks() == 1) {
    usage_error(
        "prove compares a layout with one process, and this layout is one process; try --dp_size "
        "2");
  }
  if (asks_types && !is_typed(config, mutation)) return 1;
  const int64_t begin = clock_ns();
  const TwinFamily family = shrink(config, config.composition.prove);
  const double searched = seconds_since(begin);
  print("{} ranks ({}): {} classes; {} kept by twins of at most {} ranks, found in {:.1f} s\n",
        config.mesh().ranks(), describe(config.mesh()), family.real.size(),
        family.real.size() - family.lost.size(), config.composition.prove, searched);
  const bool rounds = config.composition.prove_dtype == "bf16";
  int failed = 0;
  for (size_t i = 0; i < family.twins.size(); ++i) {
    const Twin twin = rounds ? in_bf16(family.twins[i]) : family.twins[i];
    print("\ntwin {}, {} ranks ({})\n  {}\n", i + 1, twin.config.mesh().ranks(),
          describe(twin.config.mesh()), twin.flags);
    const std::string failure = rounds ? prove_rounding(twin) : prove_equal(twin);
    if (failure.empty()) continue;
    ++failed;
    print("  DIFFERS\n{}\n", indented(failure));
  }
  print("\n");
  if (!family.without.empty()) {
    usp::print("no twin has all dimensions at once: the first is without {}\n",
               fmt::join(family.without, ", "));
  }
  const auto said = [](const std::string& label) { return label == "-" ? "not there" : label; };
  for (const LostClass& lost : family.lost) {
    print("no twin keeps \"{}\": {} in the layout, {} in the first twin\n", lost.name,
          said(lost.real), said(lost.twin));
  }
  if (rounds && config.tensor_parallel.dropout > 0) {
    print("twins in bf16 have no dropout: what it leaves out goes by a sample's number\n");
  }
  print("lengths of messages and tiles are those of the twins, not of the layout\n");
  return failed == 0 ? 0 : 1;
}

int prove(const TrainConfig& config, const Communicator& world) {
  return config.composition.fuzz > 0 ? fuzz(config, world) : prove(config);
}

}  // namespace usp
