#include "base/rules.h"

#include <fmt/ranges.h>

#include <cmath>
#include <optional>
#include <set>

#include "run/command_line.h"
#include "run/run_data.h"
#if __has_include("data_parallel/strategy.h")
#include "comm/launch.h"
#endif
#include "technique/case_cover.h"
#include "technique/solo_trainer.h"
#include "technique/tiny_llama.h"

/// What goes with what: a command line that is accepted is built and run, and what a refusal
/// advises is accepted.
namespace usp::test {
namespace {

using Words = std::vector<std::string>;

/// A flag, and values that a drawn command line may give it; "": it is a switch.
struct Choice {
  const char* flag;
  std::vector<const char*> values;
};

const std::vector<Choice>& choices() {
  static const std::vector<Choice> all = {
      {"num_heads", {"2", "4", "6"}},
      {"num_kv_heads", {"1", "2", "3"}},
      {"num_layers", {"1", "2", "5"}},
      {"vocab_size", {"3", "16", "31"}},
      {"tie_word_embeddings", {""}},
      {"seq_len", {"8", "12", "21"}},
      {"micro_batch_size", {"1", "2", "3"}},
      {"grad_acc_steps", {"1", "2", "3", "8"}},
      {"dtype", {"f32", "bf16", "f64"}},
      {"attention", {"naive", "blockwise"}},
      {"recompute", {"none", "selective", "full"}},
      {"grad_accumulation", {"bf16", "both"}},
      {"grad_clip", {"0", "0.5"}},
      {"dp_size", {"1", "2", "3", "4"}},
      {"grad_sync", {"naive", "overlapped"}},
      {"zero_stage", {"0", "1", "2", "3"}},
      {"shard_size", {"1", "2", "3"}},
      {"gather_overlap", {"none", "optimizer"}},
      {"reduce_after", {"step"}},
      {"reshard_after", {"chunk", "step"}},
      {"node_size", {"1", "2", "3", "4"}},
      {"tp_size", {"2", "3", "4"}},
      {"sequence_parallel", {""}},
      {"gathered_input", {"kept"}},
      {"tp_overlap", {"none", "chunks", "batch_halves"}},
      {"dropout", {"0.1"}},
      {"cp_size", {"2", "3", "4"}},
      {"cp_layout", {"contiguous"}},
      {"cp_method", {"all_gather", "ulysses", "ring_ulysses"}},
      {"ulysses_size", {"1", "2"}},
      {"cp_overlap", {"none"}},
      {"cp_recompute", {"keep"}},
      {"document_mask", {""}},
      {"document_separator", {"1"}},
      {"pp_size", {"2", "3", "4"}},
      {"pp_schedule",
       {"naive", "afab", "interleaved", "breadth_first", "llama3", "zb_h1", "zb_v", "dualpipe",
        "dualpipe_v", "auto", "zb_h2"}},
      {"pp_chunks", {"2", "3"}},
      {"pp_run_length", {"1"}},
      {"pp_layers", {"1,1", "0,2", "2,1,2"}},
      {"pp_in_flight", {"2"}},
      {"pp_times", {"1,2,1,0.5", "measured"}},
      {"overlap_dispatch", {""}},
      {"num_experts", {"2", "4", "6"}},
      {"num_experts_per_tok", {"1", "3"}},
      {"moe_ffn_hidden_size", {"7", "8"}},
      {"num_shared_experts", {"1"}},
      {"first_dense_layers", {"1"}},
      {"expert_nodes", {"2"}},
      {"route_nodes", {"1"}},
      {"ep_size", {"2", "3", "4"}},
      {"dispatch", {"by_node"}},
      {"expert_tp", {""}},
      {"balance", {"sample", "batch", "bias"}},
      {"balance_coef", {"0.1"}},
      {"router_z_loss_coef", {"0.01"}},
      {"capacity_factor", {"1"}},
      {"attention_kind", {"mla"}},
      {"q_lora_rank", {"6"}},
      {"v_head_dim", {"2", "40"}},
      {"kernels", {"fused"}},
  };
  return all;
}

/// A command line, on so many ranks; 0: on as many as it asks for.
struct Drawn {
  Words words;
  int64_t ranks;

  std::string name() const {
    return fmt::format("{} on {} ranks", fmt::join(words.begin() + 1, words.end(), " "), ranks);
  }
};

/// Draws some of the flags that the chapter has, for a small model.
Drawn draw(Random& random) {
  Drawn drawn{{"program", "--hidden_size", "24", "--ffn_hidden_size", "12", "--warmup_steps", "0"},
              random.integer(0, 6)};
  TrainConfig config;
  Args args("");
  config.bind(args);
  for (const auto& [flag, values] : choices()) {
    if (args.group_of(flag).empty() || random.integer(0, 19) > 0) continue;
    drawn.words.push_back(std::string("--") + flag);
    const std::string value = values[random.integer(0, std::ssize(values) - 1)];
    if (!value.empty()) drawn.words.push_back(value);
  }
  return drawn;
}

TrainConfig read(const Drawn& drawn) {
  TrainConfig config;
  Args args("");
  USP_CHECK(read_command_line(config, args, drawn.words, drawn.ranks), "--help was not asked for");
  return config;
}

/// Command line that is accepted: itself, or as a remedy of its refusal would have it.
/// Nothing where it has a value that could not be, whatever else it says.
std::optional<Drawn> accepted(const Drawn& drawn, Random& random) {
  try {
    read(drawn);
    return drawn;
  } catch (const Refusal& refusal) {
    INFO(drawn.name() << "\n" << refusal.what());
    const Remedies& remedies = refusal.remedies();
    REQUIRE(!remedies.empty());
    const std::string& remedy = remedies[random.integer(0, std::ssize(remedies) - 1)];
    const int64_t ranks = ranks_to_start(remedy);
    const Drawn mended{with_remedy(drawn.words, remedy), ranks > 0 ? ranks : drawn.ranks};
    REQUIRE_NOTHROW(read(mended));
    return mended;
  } catch (const UsageError&) {
    return std::nullopt;
  }
}

#if __has_include("data_parallel/strategy.h")

/// A dry run of one step, as every rank of the run in turn. Throws where one cannot.
void build_everywhere(const TrainConfig& config) {
  const auto ranks = static_cast<int>(config.mesh().ranks());
  for (int rank = 0; rank < ranks; ++rank) {
    const OnDevice meta(Device::meta);
    DryEngine engine(rank, ranks);
    engine.set_node_size(config.communication->node_size);
    const Mesh mesh(Communicator::world(engine), config.mesh());
    Trainer trainer(config, {nullptr, mesh});
    trainer.train_step(0);
  }
}

/// Two steps, by threads as ranks. Throws where one cannot.
void run_everywhere(const TrainConfig& config) {
  const RandomText text(config, 4000);
  run_threads(static_cast<int>(config.mesh().ranks()), [&](const Communicator& world) {
    world.engine().set_node_size(config.communication->node_size);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    for (int64_t step = 0; step < 2; ++step) {
      trainer.train_step(step);
      const double loss = trainer.report(step, 0).loss;
      USP_CHECK(std::isfinite(loss), "loss {} of step {}", loss, step);
    }
  });
}

#else

void build_everywhere(const TrainConfig& config) {
  const OnDevice meta(Device::meta);
  SoloTrainer(config, nullptr).train_step(0);
}

void run_everywhere(const TrainConfig& config) {
  const OnDevice cpu;
  const RandomText text(config, 4000);
  SoloTrainer trainer(config, &text.dataset);
  for (int64_t step = 0; step < 2; ++step) trainer.train_step(step);
}

#endif

TEST_CASE("what is accepted is built on every rank, and runs; what is advised is accepted") {
  // With --all as many turns as there are draw the same, and run two steps of each once.
  const uint64_t seed = is_full() ? turn() / kTurns : turn();
  Random random(17 + seed);
  constexpr int kDrawn = kSanitized ? 20 : 500;
  const uint64_t share = kSanitized ? 5 : is_full_in_turns() ? kTurns : is_full() ? 1 : 20;
  uint64_t as_drawn = 0, built = 0, run = 0;
  for (int i = 0; i < kDrawn; ++i) {
    const Drawn drawn = draw(random);
    const auto mended = accepted(drawn, random);
    if (!mended) continue;
    as_drawn += mended->words == drawn.words && mended->ranks == drawn.ranks;
    const TrainConfig config = read(*mended);
    if (config.mesh().ranks() > 16) continue;
    INFO(mended->name());
    REQUIRE_NOTHROW(build_everywhere(config));
    if (built++ % share != turn() % share || (kSanitized && config.mesh().ranks() > 8)) continue;
    REQUIRE_NOTHROW(run_everywhere(config));
    ++run;
  }
  CAPTURE(as_drawn, built, run);
  REQUIRE(built > kDrawn / 2);
  REQUIRE(run > 0);
  REQUIRE(as_drawn > 0);
}

/// Flags of which one is far too large, or data that are too short or of other tokens.
Drawn draw_beyond_limits(Random& random, const TempDir& dir) {
  Drawn drawn{{"program", "--hidden_size", "24", "--warmup_steps", "0"}, random.integer(0, 4)};
  const auto add = [&](const std::string& flag, const std::string& value) {
    TrainConfig config;
    Args args("");
    config.bind(args);
    if (args.group_of(flag).empty()) return;
    drawn.words.insert(drawn.words.end(), {"--" + flag, value});
  };
  const auto one_of = [&](const std::vector<int64_t>& values) {
    return std::to_string(values[random.integer(0, std::ssize(values) - 1)]);
  };
  const auto chance = [&](int one_in) { return random.integer(1, one_in) == 1; };
  const std::string bytes(random.integer(2, 90), static_cast<char>(random.integer('1', 'z')));
  const bool ids = chance(3);
  add("data", dir.write(ids ? "ids.bin" : "text.txt",
                        ids ? bytes + std::string(bytes.size() % 2, '1') + "\1\1" : bytes));
  if (chance(2)) add("cp_size", one_of({1, 2, 3, 4}));
  if (chance(2)) add("seq_len", one_of({1, 8, 39, 60, 1 << 27, 1 << 27, int64_t{1} << 62}));
  if (chance(2)) add("val_fraction", chance(2) ? "0.97" : "0.3");
  if (chance(2)) add("micro_batch_size", one_of({1, 2, 1 << 20, int64_t{1} << 62}));
  if (chance(3)) add("vocab_size", one_of({3, 50, 100, 60000}));
  if (chance(3)) add("prompt", "12z");
  if (chance(4)) add("max_position_embeddings", one_of({7, 31}));
  if (chance(4)) add("head_dim", one_of({3, 4, 1 << 24}));
  if (chance(4)) add("num_heads", one_of({4, 1 << 22}));
  if (chance(4)) add("num_layers", one_of({3, 1 << 12}));
  if (chance(6)) add("rope_type", "yarn");
  if (chance(6)) add("rope_theta", "1");
  if (chance(6)) add("attention_kind", "mla");
  return drawn;
}

/// What the configuration refuses of a command line, or else what the data do; nothing if neither.
struct Outcome {
  std::optional<Refusal> by_rules, by_data;
  std::string otherwise;  ///< what else is wrong
};

Outcome outcome_of(const Drawn& drawn) {
  Outcome found;
  TrainConfig config;
  Args args("");
  try {
    read_command_line(config, args, drawn.words, drawn.ranks, check_data);
  } catch (const Refusal& refusal) {
    found.by_rules = refusal;
    return found;
  } catch (const UsageError& error) {
    found.otherwise = error.what();
    return found;
  }
  try {
    open_data(config, args, drawn.words, drawn.ranks);
  } catch (const Refusal& refusal) {
    found.by_data = refusal;
  } catch (const UsageError& error) {
    found.otherwise = error.what();
  }
  return found;
}

TEST_CASE("what is advised for sizes beyond limits, and for data, is accepted when it is typed") {
  Random random(3);
  const TempDir dir;
  int64_t advised = 0;
  std::set<std::string> rules;
  for (int i = 0; i < (kSanitized ? 50 : 400); ++i) {
    const Drawn drawn = draw_beyond_limits(random, dir);
    const Outcome found = outcome_of(drawn);
    INFO(drawn.name() << "\n" << found.otherwise);
    REQUIRE(found.otherwise.find("; try ") == std::string::npos);  // what is advised was tried
    if (!found.by_rules && !found.by_data) continue;
    const Refusal& refusal = found.by_rules ? *found.by_rules : *found.by_data;
    rules.insert(refusal.rule());
    int64_t with_data = 0;
    for (const std::string& remedy : refusal.remedies()) {
      INFO(refusal.what() << "\n" << remedy);
      const int64_t ranks = ranks_to_start(remedy);
      const Outcome then =
          outcome_of({with_remedy(drawn.words, remedy), ranks > 0 ? ranks : drawn.ranks});
      INFO((then.by_rules ? then.by_rules->what() : "accepted"));
      REQUIRE(!then.by_rules);
      with_data += !then.by_data && then.otherwise.empty();
    }
    // A rule advises what the data allow, too, unless they allow nothing of it.
    const int64_t all = std::ssize(refusal.remedies());
    INFO(refusal.what());
    REQUIRE((with_data == all || (found.by_rules && with_data == 0)));
    advised += all;
  }
  CAPTURE(advised, fmt::format("{}", fmt::join(rules, " ")));
  REQUIRE(advised > 50);
  if (kSanitized) return;
  for (const char* rule : {"tokens_of_sample", "training_tokens", "tokens_of_vocabulary",
                           "prompt_of_tokens", "tokens_at_once", "bytes_at_once",
                           "weights_that_count", "positions_of_model", "pairs_of_head"}) {
    CAPTURE(rule);
    REQUIRE(rules.contains(rule));
  }
}

/// What the chapter can be asked, each as it is typed.
std::vector<Words> questions() {
  TrainConfig config;
  Args args("");
  config.bind(args);
  std::vector<Words> own;
  for (const Words& words : std::initializer_list<Words>{{"--estimate"},
                                                         {"--plan", "1024"},
                                                         {"--pp_show", "table"},
                                                         {"--mesh_show", "json"},
                                                         {"--prove", "4"},
                                                         {"--fuzz", "0.1"}}) {
    if (!args.group_of(words[0].substr(2)).empty()) own.push_back(words);
  }
  return own;
}

Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST_CASE("of two questions none is answered, and the second is to be left out") {
  for (const Words& first : questions()) {
    for (const Words& second : questions()) {
      if (first == second) continue;
      const Words words = joined(joined({"program"}, first), second);
      check_throws<Refusal>(
          [&] {
            read({words, 0});
          },
          {fmt::format("{} and {} cannot be answered in one run; leave out {}", first[0].substr(2),
                       second[0].substr(2), second[0])});
    }
  }
}

TEST_CASE("advice on a question is not judged by the data, which it does not read") {
  const auto advice = [](const Words& question) {
    TrainConfig config;
    Args args("");
    const Words words = {"program", "--micro_batch_size", "1048576", "--seq_len", "1048576"};
    try {
      read_command_line(config, args, joined(words, question), /*ranks=*/0, check_data);
    } catch (const Refusal& refusal) {
      return refusal.remedies();
    }
    return Remedies{};
  };
  const Remedies of_sizes = usp::values_of("micro_batch_size", {128});
  REQUIRE(advice({}) != of_sizes);  // the project's own text is shorter than such a sample
  for (const Words& question : questions()) {
    CAPTURE(question[0]);
    REQUIRE(advice(question) == of_sizes);
  }
}

#if __has_include("tensor_parallel/region.h")
TEST_CASE("two rules that contradict each other's advice both advise what satisfies both") {
  const auto advice = [](const char* tp_size, int64_t ranks) {
    try {
      read({{"program", "--tp_size", tp_size}, ranks});
    } catch (const Refusal& refusal) {
      return refusal.remedies();
    }
    return Remedies{};
  };
  // 4 divides eight ranks, but not six heads; 3 divides the heads alone.
  REQUIRE(advice("4", 0) == usp::values_of("tp_size", {1, 2, 3, 6}));
  REQUIRE(advice("4", 8) == usp::values_of("tp_size", {1, 2}));
}

TEST_CASE("advice that starts other ranks says what these need besides") {
  Random random(1);
  const Drawn drawn{{"program", "--tp_size", "2", "--node_size", "3"}, /*ranks=*/5};
  const auto mended = accepted(drawn, random);
  REQUIRE(mended);
  REQUIRE(mended->ranks != drawn.ranks);  // of which tp_size=2 makes no groups
  REQUIRE(mended->words != drawn.words);  // nor does node_size=3 divide the 4 that it leaves
}

TEST_CASE("advice on other ranks is tried without the number that --world_size says") {
  const Drawn drawn{{"program", "--tp_size", "2", "--world_size", "5"}, /*ranks=*/1};
  try {
    read(drawn);
    FAIL("nothing is refused");
  } catch (const Refusal& refusal) {
    REQUIRE(std::string(refusal.what()).ends_with("; start 4 ranks"));
  }
}
#endif

#if __has_include("data_parallel/strategy.h")
TEST_CASE(
    "nodes that would not hold equally many ranks are refused, and ranks that are not there") {
  const auto refused = [](const Words& flags, int64_t ranks, const std::string& text) {
    Words words = flags;
    words.insert(words.begin(), "program");
    check_throws<Refusal>([&] { read({words, ranks}); }, {text});
  };
  refused({"--node_size", "2"}, 3, "node_size=2 must divide the 3 ranks of the run; try 1 or 3");
  refused({"--dp_size", "2"}, 3,
          "dp_size=2 must equal the 3 ranks of the run; start 2 ranks, or --dp_size 3");
}
#endif

}  // namespace
}  // namespace usp::test
