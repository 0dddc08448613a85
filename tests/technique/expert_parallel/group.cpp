#include "expert_parallel/group.h"

#include <iterator>
#include <sstream>

#include "run/command_line.h"
#include "technique/expert_parallel/expert_parity.h"
#include "technique/pipeline_parallel/random_schedule.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

bool all_expert_cases() { return is_full() && !kSanitized; }

void check_parity(const ExpertCase& c, const Text& text, int64_t steps) {
  CAPTURE(c.name());
  const ExpertResult expected = expert_reference(c, text.dataset, steps);
  run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
    check_expert_parity(world, c, text.dataset, expected);
  });
}

/// What the case has of each axis whose settings are to meet.
std::vector<std::string> settings_of(const ExpertCase& c) {
  return {fmt::format("ep {}", c.ep),
          fmt::format("{} experts", c.experts),
          fmt::format("k {}", c.top_k),
          c.router,
          fmt::format("balance {}", c.balance),
          fmt::format("capacity {}", c.capacity),
          fmt::format("{} shared", c.shared),
          fmt::format("nodes of {}", c.node_size),
          fmt::format("tp {}", c.tp),
          fmt::format("expert_tp {}", c.expert_tp),
          fmt::format("cp {} {}", c.cp, c.cp_method),
          fmt::format("pp {} {}", c.pp, c.schedule),
          fmt::format("stage {} {} {}", c.zero_stage, c.reduce_after, c.reshard_after),
          fmt::format("{} micro-batches", c.grad_acc_steps),
          fmt::format("in turns {}", c.in_turns)};
}

TEST_CASE("every two settings of experts meet in a case, but for those that exclude each other",
          "[not_sanitized]") {
  std::set<std::pair<std::string, std::string>> met;
  std::vector<std::set<std::string>> settings(15);
  std::set<std::string_view> attention_on_halves;
  for (const ExpertCase& c : expert_cases(0)) {
    if (c.overlap == std::string_view("batch_halves")) attention_on_halves.insert(c.attention_kind);
    const std::vector<std::string> own = settings_of(c);
    for (size_t i = 0; i < own.size(); ++i) {
      settings[i].insert(own[i]);
      for (size_t j = i + 1; j < own.size(); ++j) met.insert({own[i], own[j]});
    }
  }
  std::vector<size_t> numbers;
  for (const auto& axis : settings) numbers.push_back(axis.size());
  REQUIRE(numbers == std::vector<size_t>{4, 3, 3, 2, 4, 3, 2, 3, 3, 2, 4, 14, 6, 3, 2});
  REQUIRE(attention_on_halves == std::set<std::string_view>{"gqa", "mla"});
  std::vector<std::string> apart;
  for (size_t i = 0; i < settings.size(); ++i) {
    for (size_t j = i + 1; j < settings.size(); ++j) {
      for (const std::string& one : settings[i]) {
        for (const std::string& other : settings[j]) {
          if (!met.contains({one, other})) apart.push_back(one + " and " + other);
        }
      }
    }
  }
  REQUIRE(apart == std::vector<std::string>{
                       // Not a whole expert, or no node but one, for each rank; 32 ranks.
                       "ep 8 and 4 experts", "ep 1 and nodes of 1", "ep 1 and nodes of 2",
                       "ep 8 and pp 4 1f1b",
                       // A copy of each expert for tp has no tp; one head is not sharded.
                       "tp 1 and expert_tp true", "tp 4 and cp 2 ulysses",
                       // Both directions at once take two micro-batches a rank, less two or one.
                       "pp 2 dualpipe and 1 micro-batches", "pp 2 dualpipe_v and 1 micro-batches",
                       "pp 2 dualpipe_v and 2 micro-batches",
                       // Two blocks at a time would have their whole weights gathered.
                       "stage 3 micro_batch block and in turns true",
                       "stage 3 step step and in turns true"});
}

/// The cases of this turn: sixteen ranks take most of the time.
std::vector<ExpertCase> cases_in_turn(const std::vector<ExpertCase>& cases, uint64_t turn) {
  std::vector<ExpertCase> chosen;
  uint64_t large = 0;
  for (const ExpertCase& c : cases) {
    if (c.ranks() <= 8 || large++ % kTurns == turn % kTurns) chosen.push_back(c);
  }
  return chosen;
}

TEST_CASE("experts over ranks are experts on one rank, in every layout") {
  const Text text;
  const bool all = all_expert_cases();
  const std::vector<ExpertCase> cases = full_cases(expert_cases, all ? 50 : 4);
  for (const ExpertCase& c : all ? cases : cases_in_turn(cases, turn())) {
    check_parity(c, text, /*steps=*/2);
  }
}

TEST_CASE("a few turns try every case of many ranks, once each", "[not_sanitized]") {
  const std::vector<ExpertCase> cases = expert_cases(4);
  std::map<std::string, uint64_t> tried;
  const uint64_t first = 7;  // wherever they begin
  for (uint64_t i = 0; i < kTurns; ++i) {
    for (const ExpertCase& c : cases_in_turn(cases, first + i)) ++tried[c.name()];
  }
  for (const ExpertCase& c : cases) {
    CAPTURE(c.name());
    REQUIRE(tried[c.name()] == (c.ranks() > 8 ? 1 : kTurns));
  }
}

TEST_CASE("a few turns try every long combination once, and what is always tried each time",
          "[not_sanitized]") {
  std::map<int, uint64_t> tried;
  for (uint64_t first = 7, i = 0; i < kTurns; ++i) {
    for (int number : in_turn(std::vector{0, 1, 2, 3, 4, 5, 6}, /*always=*/2, first + i)) {
      ++tried[number];
    }
  }
  REQUIRE(tried == std::map<int, uint64_t>{
                       {0, kTurns}, {1, kTurns}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}});
}

#if __has_include("proof/drawn_pipeline.h")
TEST_CASE("experts train in whatever order a file of the schedule has") {
  const Text text;
  Random random(5);
  const TempDir folder;
  for (int i = 0; i < 4; ++i) {
    Schedule schedule = random_schedule(random, /*p=*/2, random.integer(2, 5), 2);
    if (i % 2 == 1) schedule = in_turns(std::move(schedule), {});
    ExpertCase c = plain_experts(2, 2);
    c.pp = 2;
    c.grad_acc_steps = schedule.micro_batches;
    c.schedule = folder.write(fmt::format("{}.txt", i), to_text(schedule));
    c.stages = schedule.stages.count();
    c.shared = i / 2;
    c.balance = i % 2 == 0 ? "sample" : "bias";
    CAPTURE(to_text(schedule));
    check_parity(c, text, /*steps=*/2);
  }
}
#endif

/// After one step, each expert's gradient on whichever rank has the expert.
void check_expert_gradients(const ExpertCase& c, const Text& text, double tolerance = 1e-10) {
  CAPTURE(c.name());
  const ExpertResult expected = expert_reference(c, text.dataset, /*steps=*/1);
  std::map<std::string, Values> gradients;
  for (const auto& [name, values] : expected.trained.tensors) gradients[name] = values;
  run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
    const TrainConfig config = expert_config(c);
    const Mesh mesh(world, config.mesh());
    const int64_t copies = c.dp * c.cp * (c.expert_tp ? 1 : c.tp) / c.ep;
    USP_CHECK(mesh.edp().size() == copies, "{} copies of an expert", mesh.edp().size());
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    const ParameterList& parameters = trainer.model().parameters();
    int64_t compared = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& parameter = parameters[i];
      if (parameter.name.find(".experts.") == std::string::npos) continue;
      expect_part(parameter.shard.grad, gradients.at(parameter.name + ".grad"), parameter,
                  tolerance, c.name() + ": gradient of " + parameter.name);
      ++compared;
    }
    USP_CHECK(compared == 3 * c.num_layers() * c.experts / c.ep, "{} weights", compared);
  });
}

// Groups that sum, or factors that scale, an expert's gradient as if it were a dense weight's are a
// mistake that large libraries have made: DeepSpeed, issue 6545; Megatron-LM, issue 1628.
TEST_CASE("the gradient of an expert under ep x dp is that of one process, whatever edp") {
  const Text text;
  for (int64_t ep : {1, 2, 4, 8}) {
    if (kSanitized && ep != 4) continue;
    for (int64_t zero_stage : {0, 1, 2, 3}) {
      ExpertCase c = plain_experts(8, ep);
      c.experts = 8;
      c.zero_stage = zero_stage;
      c.grad_acc_steps = ep == 2 ? 2 : 1;
      check_expert_gradients(c, text);
      if (zero_stage == 0 || ep == 8) continue;
      c.shard_size = 2;  // of edp, too
      check_expert_gradients(c, text);
    }
  }
  for (const bool expert_tp : {false, true}) {
    for (int64_t ep : {1, 2, 4}) {
      ExpertCase c = plain_experts(2, ep);
      c.tp = c.cp = 2;
      c.sequence = "again";
      c.expert_tp = expert_tp;
      check_expert_gradients(c, text);
    }
  }
}

TEST_CASE("ZeRO-3 shards an expert over the ranks that hold it, apart from dense weights") {
  const Text text;
  for (int64_t ep : {1, 2, 4}) {
    ExpertCase c = plain_experts(4, ep);
    c.zero_stage = 3;
    c.grad_acc_steps = 2;
    const TrainConfig config = expert_config(c);
    run_threads(4, [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      Runtime::current().allocator().record_events(true);
      trainer.train_step(0);
      int64_t held = 0, all = 0, units = 0, most = 0;
      const ParameterList& parameters = trainer.model().parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].name.find(".experts.") == std::string::npos) continue;
        USP_CHECK(!parameters[i].value.defined(), "{} is whole", parameters[i].name);
        held += parameters[i].shard.numel();
        all += parameters[i].global_shape.numel();
      }
      USP_CHECK(held == all * ep / 4, "{} of {} elements of {} experts", held, all, c.experts / ep);
      for (const Allocator::Event& event : Runtime::current().allocator().events()) {
        if (event.tag.name != std::string_view("gathered weights")) continue;
        units += event.bytes > 0 ? 1 : -1;
        most = std::max(most, units);
      }
      // A block has two units, its experts and all the rest, and the next one's are on their way.
      USP_CHECK(most == 4, "{} units are gathered at once", most);
    });
  }
}

TEST_CASE("in f32 and bf16 experts over ranks have the gradients of one rank") {
  const Text text;
  for (const auto& [dtype, tolerance] : {std::pair("f32", 1e-4), {"bf16", 5e-2}}) {
    ExpertCase c = plain_experts(4, 4);
    c.experts = 8;
    c.dtype = dtype;
    c.shared = 1;
    c.balance = "sample";
    c.router = "sigmoid";
    check_expert_gradients(c, text, tolerance);
  }
}

/// A step's gradients on one rank, as f64 has them with the weights of bf16.
std::map<std::string, Values> exact_gradients(const TrainConfig& in_bf16, const Dataset& dataset) {
  const OnDevice cpu;
  TrainConfig config = in_bf16;
  config.dtype = "f64";
  SoloTrainer rounded(in_bf16, &dataset), exact(config, &dataset);
  ParameterList& parameters = exact.model().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].value.assign(rounded.model().parameters()[i].value.items());
  }
  exact.train_step(0);
  std::map<std::string, Values> gradients;
  for (auto& [name, values] : gradients_of(parameters)) gradients[name] = std::move(values);
  return gradients;
}

/// How far gradients of experts, of routers and of all other weights are from the exact ones.
std::map<std::string, double> gradient_errors(const TrainConfig& config, const Dataset& dataset,
                                              const std::map<std::string, Values>& exact) {
  std::map<std::string, double> errors;
  const MeshSizes sizes = config.mesh();
  run_threads(static_cast<int>(sizes.pp * sizes.dp * sizes.cp * sizes.tp),
              [&](const Communicator& world) {
                world.engine().set_node_size(config.communication->node_size);
                const Mesh mesh(world, config.mesh());
                Trainer trainer(config, {&dataset, mesh});
                trainer.train_step(0);
                std::map<std::string, std::pair<double, double>> sums = {
                    {"experts", {}}, {"routers", {}}, {"others", {}}};
                const ParameterList& parameters = trainer.model().parameters();
                for (size_t i = 0; i < parameters.size(); ++i) {
                  const Parameter& parameter = parameters[i];
                  if (!parameter.counted) continue;
                  const bool expert = parameter.name.find(".experts.") != std::string::npos;
                  const bool router = parameter.name.ends_with("mlp.gate.weight");
                  auto& [squares, scale] = sums[expert ? "experts" : router ? "routers" : "others"];
                  const Values found = parameter.shard.grad.items();
                  const Values expected = shard_of(exact.at(parameter.name), parameter);
                  for (size_t j = 0; j < found.size(); ++j) {
                    squares += std::pow(found[j] - expected[j], 2);
                    scale += std::pow(expected[j], 2);
                  }
                }
                for (const auto& [kind, sum] : sums) {
                  const double error = std::sqrt(world.sum(sum.first) / world.sum(sum.second));
                  if (world.rank() == 0) errors[kind] = error;
                }
              });
  return errors;
}

/// Every way to lay out experts, each with the others' layouts that it meets.
std::map<std::string, ExpertCase> kinds_of_layouts() {
  ExpertCase plain = plain_experts(2, 2);
  plain.top_k = plain.experts;  // a choice that a rounding changes is an error of another kind
  plain.dtype = "bf16";
  plain.shared = 1;
  ExpertCase over_tp = plain, split = plain, over_cp = plain, stages = plain, zero = plain;
  over_tp.tp = split.tp = 2;
  over_tp.ep = 4;
  over_tp.sequence = split.sequence = "again";
  split.expert_tp = true;
  over_cp.cp = 2;
  over_cp.ep = 4;
  stages.pp = 2;
  stages.schedule = "dualpipe";
  stages.grad_acc_steps = 4;
  zero.dp = 4;
  zero.zero_stage = 3;
  ExpertCase nodes = zero;
  nodes.zero_stage = 0;
  nodes.ep = 4;
  nodes.node_size = 2;
  return {{"tp", over_tp}, {"expert_tp", split}, {"cp", over_cp},
          {"pp", stages},  {"ZeRO-3", zero},     {"by_node", nodes}};
}

TEST_CASE("in bf16 experts err no more over ranks than on one, in every kind of layout",
          "[not_sanitized]") {
  const Text text;
  constexpr int kSeeds = 3;
  for (const auto& [layout, c] : kinds_of_layouts()) {
    std::map<std::string, double> ratios;
    TrainConfig config = expert_config(c), one = alone_config(c);
    for (int seed = 1; seed <= kSeeds; ++seed) {
      config.seed = one.seed = seed;
      const auto exact = exact_gradients(one, text.dataset);
      const auto alone = gradient_errors(one, text.dataset, exact);
      for (const auto& [kind, error] : gradient_errors(config, text.dataset, exact)) {
        ratios[kind] += error / alone.at(kind) / kSeeds;
      }
    }
    for (const auto& [kind, ratio] : ratios) {
      CAPTURE(layout, kind);
      CHECK(ratio <= 1.1);
    }
  }
}

TEST_CASE("in turns, a pass computes while the rows of the other one travel between experts") {
  const Text text;
  for (const bool in_turns : {false, true}) {
    ExpertCase c = plain_experts(2, 2);
    c.pp = 2;
    c.schedule = "dualpipe";
    c.grad_acc_steps = 4;
    c.in_turns = in_turns;
    run_threads(4, [&](const Communicator& world) {
      const TrainConfig config = expert_config(c);
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      int64_t all = 0, hidden = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.group != "ep") continue;
        ++all;
        hidden += std::ranges::any_of(tracer.spans(), [&](const Tracer::Span& span) {
          return span.category == "op" && hides(span, exchange);
        });
      }
      // Alone, a pass has only the router's gradient to compute under one of its four exchanges.
      USP_CHECK(all > 0 && (in_turns ? 2 * hidden > all : 4 * hidden == all),
                "{} of {} exchanges are hidden, in turns {}", hidden, all, in_turns);
    });
  }
}

/// The case with these biases of the choice.
ExpertCase with_biases(ExpertCase c, std::vector<double> biases) {
  c.balance = "bias";
  c.biases = std::move(biases);
  return c;
}

TEST_CASE("experts that no token chooses, ranks of them, and one that all tokens choose") {
  const Text text;
  const std::vector<std::pair<int64_t, std::vector<double>>> biases = {
      {2, {0, 0, 0, -9}}, {2, {0, 0, -9, -9}}, {1, {-9, 0, 0, -9}}, {1, {-9, -9, -9, 0}}};
  for (const auto& [top_k, of_first] : biases) {
    if (kSanitized && of_first != biases.back().second) continue;
    std::vector<double> of_experts = of_first;
    for (int variant = 0; variant < 5; ++variant) {
      std::ranges::rotate(of_experts, of_experts.begin() + 1);  // each expert's turn
      ExpertCase c = with_biases(plain_experts(4, variant == 1 ? 2 : 4), of_experts);
      c.top_k = top_k;
      c.zero_stage = variant == 2 ? 3 : 0;
      c.shared = variant % 2;
      c.capacity = variant == 3 ? 1 : 0;
      c.recompute = variant == 3 ? "full" : "none";
      if (variant == 4) {
        c.dp = c.ep = c.pp = 2;
        c.schedule = "dualpipe";
        c.grad_acc_steps = 4;
      }
      const ExpertResult expected = expert_reference(c, text.dataset, /*steps=*/2);
      for (const SeenLoad& load : {expected.loads[0].at(0), expected.loads[1].at(1)}) {
        for (int64_t expert = 0; expert < 4; ++expert) {
          CAPTURE(of_experts, expert);
          REQUIRE((load.counts[expert] == 0) == (of_experts[expert] < 0));
        }
        if (c.capacity > 0) REQUIRE(load.dropped > 0);
      }
      check_parity(c, text, /*steps=*/2);
    }
  }
}

TEST_CASE("where no rank has a token, every exchange is empty and every expert's gradient 0") {
  for (const int64_t node_size : {0, 2}) {
    for (const char* balance : {"sample", "bias"}) {
      ExpertCase c = plain_experts(4, 4);
      c.node_size = node_size;
      c.balance = balance;
      c.z_loss = 0.01;
      c.capacity = 1;
      c.shared = 1;
      CAPTURE(c.name());
      run_threads(4, [&](const Communicator& world) {
        const TrainConfig config = expert_config(c);
        world.engine().set_node_size(config.communication->node_size);
        const Mesh mesh(world, config.mesh());
        ExpertModel experts(config, mesh);
        Pass pass = experts.passes()[0];
        pass.num_samples = 0;
        pass.tokens = pass.tokens.narrow(0, 0, 0);
        pass.targets = pass.targets.narrow(0, 0, 0);
        ops::fill(experts.parameters().flat_grads(), kNaN);
        experts.grads().begin_window(1);
        experts.model().backward(experts.model().forward(pass), experts.grads(), pass);
        experts.grads().end_window();
        experts.load().end_step();
        for (const auto& [name, gradient] : gradients_of(experts.parameters())) {
          USP_CHECK(gradient == Values(gradient.size()), "{}: {} is not 0", c.name(), name);
        }
        USP_CHECK(experts.loss() == 0, "{}: loss {}", c.name(), experts.loss());
        for (const SeenLoad& load : experts.load().seen(1)) {
          USP_CHECK(load.counts == Values(4) && load.dropped == 0 && load.max_over_mean() == 0,
                    "{}: {} choices", c.name(), load.counts);
        }
      });
    }
  }
}

TEST_CASE("a rank without a sample takes part in the evaluation of the others'") {
  const Text text;
  for (const auto& [cp, tp, ep] : {std::tuple(1, 1, 8), {1, 1, 2}, {2, 1, 4}, {1, 2, 8}}) {
    for (const double capacity : {0.0, 1.0}) {
      ExpertCase c = plain_experts(8 / cp / tp, ep);
      c.experts = 8;
      c.cp = cp;
      c.tp = tp;
      if (tp > 1) c.sequence = "again";
      c.capacity = capacity;
      c.balance = "sample";
      TrainConfig one = alone_config(c), config = expert_config(c);
      one.eval_samples = config.eval_samples = 1;
      double expected = 0;
      {
        const OnDevice cpu;
        expected = SoloTrainer(one, &text.dataset).evaluate();
      }
      run_threads(8, [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        expect_close({Trainer(config, {&text.dataset, mesh}).evaluate()}, {expected}, 1e-10,
                     c.name());
      });
    }
  }
}

TEST_CASE("the next tokens are those of one rank, whoever holds the experts") {
  const Text text;
  SampleConfig sample;
  sample.sample_tokens = 8;
  for (const auto& [pp, tp, ep] : {std::tuple(1, 1, 4), {1, 2, 4}, {2, 1, 2}, {2, 2, 2}}) {
    ExpertCase c = plain_experts(4 / pp / tp, ep / pp);
    c.ep = c.dp * c.tp;
    c.pp = pp;
    c.tp = tp;
    if (tp > 1) c.sequence = "kept";
    c.grad_acc_steps = 2;
    c.capacity = 1;
    c.balance = "sample";
    c.shared = 1;
    CAPTURE(c.name());
    const auto sampled = [&](Trainer& trainer, Values& last) {
      trainer.train_step(0);
      const Logits logits = [&](const Pass& pass) {
        const Tensor of_pass = trainer.logits(pass);
        last = of_pass.items();
        return of_pass;
      };
      return sample_tokens(logits, sample, 8, {3, 1, 4, 1, 5}, 1, [] { return false; });
    };
    std::vector<int32_t> expected;
    Values last;
    {
      const OnDevice cpu;
      SoloTrainer solo(alone_config(c), &text.dataset);
      expected = sampled(solo, last);
    }
    const TrainConfig config = expert_config(c);
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      Values own;
      USP_CHECK(sampled(trainer, own) == expected, "{}: other tokens", c.name());
      expect_close(own, last, 1e-10, "logits");
    });
  }
}

/// Runs the passes of a step on a model of its own, forward and perhaps backward; returns where
/// each one's tokens have gone, layer by layer, but for blocks that will run again.
std::vector<Routing> run_passes(const TrainConfig& config, const Mesh& mesh, bool backward) {
  ExpertModel experts(config, mesh);
  std::vector<Routing> routings;
  experts.grads().begin_window(config.grad_acc_steps);
  for (const Pass& pass : experts.passes()) {
    Model::Activations activations = experts.model().forward(pass);
    for (Routing& routing : routings_of(activations)) routings.push_back(std::move(routing));
    if (backward) experts.model().backward(std::move(activations), experts.grads(), pass);
  }
  return routings;
}

void check_ledger(const Communicator& world, const ExpertCase& c) {
  TrainConfig config = expert_config(c);
  const Mesh mesh(world, config.mesh());
  const Ledger& ledger = Runtime::current().ledger();
  run_passes(config, mesh, /*backward=*/true);
  const Ledger::Entry rows = ledger.get("ep", CommKind::all_to_all);
  const Ledger::Entry counts = ledger.get("ep_counts", CommKind::all_to_all);
  // There and back in forward, there and back in backward, and once more where blocks run again.
  const bool again = config.recompute == "full";
  const int64_t exchanges = again ? 6 : 4;
  config.recompute = "none";  // the same passes show where tokens go
  int64_t payload = 0, wire = 0, passes = 0;
  for (const Routing& routing : run_passes(config, mesh, /*backward=*/false)) {
    const int64_t all = routing.rows.sent() + routing.rows.received();
    payload += exchanges / 2 * all;
    wire += exchanges / 2 * (all - 2 * routing.rows.rows_to_rank[mesh.ep().rank()]);  // its own
    ++passes;
  }
  const int64_t row = config.model.hidden_size * 8, numbers = passes * c.experts * 4;
  USP_CHECK(rows.calls == passes * exchanges, "{} exchanges of rows", rows.calls);
  USP_CHECK(rows.payload_bytes == payload * row, "{}: {} bytes of rows, not {}", c.name(),
            rows.payload_bytes, payload * row);
  USP_CHECK(rows.wire_bytes == wire * row, "{}: {} bytes on the wire, not {}", c.name(),
            rows.wire_bytes, wire * row);
  USP_CHECK(counts.calls == passes, "{} exchanges of counts in {} passes", counts.calls, passes);
  USP_CHECK(counts.payload_bytes == numbers, "{} bytes of counts, not {}", counts.payload_bytes,
            numbers);
  USP_CHECK(counts.wire_bytes == numbers * (c.ep - 1) / c.ep, "{} bytes of counts on the wire",
            counts.wire_bytes);
}

TEST_CASE("the ledger of ep is the rows that the routers count, without those that stay") {
  struct Layout {
    int64_t dp, tp, cp, ep;
    bool expert_tp = false;
  };
  for (const Layout& layout : {Layout{2, 1, 1, 2},
                               {4, 1, 1, 4},
                               {4, 1, 1, 2},
                               {2, 2, 1, 4},
                               {2, 2, 1, 2, true},
                               {2, 1, 2, 4},
                               {1, 2, 2, 4},
                               {1, 2, 2, 2, true}}) {
    for (const char* recompute : {"none", "full"}) {
      ExpertCase c = plain_experts(layout.dp, layout.ep);
      c.tp = layout.tp;
      c.cp = layout.cp;
      c.expert_tp = layout.expert_tp;
      if (c.tp > 1) c.sequence = "again";
      c.capacity = 1;
      c.grad_acc_steps = 2;
      c.recompute = recompute;
      run_threads(static_cast<int>(c.ranks()),
                  [&](const Communicator& world) { check_ledger(world, c); });
    }
  }
}

TEST_CASE("experts on paper: rank 37 of 64 sends what even popularity makes it send") {
  OnDevice meta(Device::meta);
  ExpertCase c = plain_experts(64, 8);
  c.experts = 16;
  c.top_k = 3;
  c.micro_batch_size = 5;
  TrainConfig config = expert_config(c);
  config.seq_len = 5;
  config.dtype = "bf16";
  DryEngine engine(37, 64);
  const Mesh mesh(Communicator::world(engine), config.mesh());
  Trainer trainer(config, {nullptr, mesh});
  trainer.train_step(0);
  // 25 tokens make 75 choices: 5 for experts 0 to 10, 4 for the others. Rank 37 is the sixth of its
  // group and holds experts 10 and 11; each of 8 ranks sends it 5 + 4 rows, also it itself.
  const int64_t layers = config.model.num_layers, row = config.model.hidden_size * 2;
  const Ledger& ledger = meta.runtime.ledger();
  const Ledger::Entry rows = ledger.get("ep", CommKind::all_to_all);
  REQUIRE(rows.calls == 4 * layers);
  REQUIRE(rows.payload_bytes == layers * 2 * (75 + 8 * 9) * row);
  REQUIRE(rows.wire_bytes == layers * 2 * (75 - 9 + 7 * 9) * row);
  REQUIRE(ledger.get("ep_counts", CommKind::all_to_all).payload_bytes == layers * 16 * 4);
  REQUIRE(meta.allocator().live_bytes(Category::activations) == 0);
}

/// The refusal of a command line, "" if there is none.
std::string refusal_of(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"program", "--hidden_size", "32", "--num_heads", "4",
                               "--num_kv_heads", "4", "--num_layers", "3", "--seq_len", "16"});
  TrainConfig config;
  Args args("A test.");
  try {
    read_command_line(config, args, flags, /*ranks=*/0);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("flags of experts are refused with what would do", "[not_sanitized]") {
  const auto refuses = [](const std::string& flags, const std::string& message) {
    std::istringstream stream(flags);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    CAPTURE(flags);
    REQUIRE(refusal_of(words).find(message) == 0);
    REQUIRE(message.empty() == refusal_of(words).empty());
  };
  refuses("--num_experts 6 --dp_size 12 --ep_size 4",
          "ep_size=4 must divide num_experts=6; try 1, 2, 3 or 6");
  refuses("--num_experts 6 --dp_size 12 --ep_size 3", "");
  refuses("--num_experts 4 --num_experts_per_tok 5", "num_experts_per_tok=5 must");
  refuses("--num_experts 4 --num_experts_per_tok 4", "");
  refuses("--num_experts 8 --expert_nodes 3",
          "expert_nodes=3 must divide num_experts=8; try 1, 2,");
  refuses("--num_experts 8 --num_experts_per_tok 3 --expert_nodes 4 --route_nodes 1",
          "route_nodes=1 nodes of 2 experts are fewer than num_experts_per_tok=3; try 2");
  refuses("--num_experts 8 --num_experts_per_tok 3 --expert_nodes 4 --route_nodes 2", "");
  refuses("--num_experts 8 --capacity_factor 0",
          "capacity_factor=0 must be above 0 and at most 65536; try 1.25, or leave it out");
  refuses("--num_experts 8 --capacity_factor nan", "capacity_factor=nan must be above 0");
  refuses("--num_experts 8 --capacity_factor 1.25", "");
  refuses("--num_experts 8 --tp_size 2",
          "experts with tp_size=2 need each token on one rank of tp; try --sequence_parallel");
  refuses("--num_experts 8 --tp_size 2 --sequence_parallel", "");
  refuses("--num_experts 8 --moe_ffn_hidden_size 9 --tp_size 2 --sequence_parallel --expert_tp",
          "");
  refuses("--num_experts 8 --moe_ffn_hidden_size 1 --tp_size 2 --sequence_parallel --expert_tp",
          "expert_tp: tp_size=2 must be at most the experts' width of 1; try --tp_size 1");
  const std::string shards = "--num_experts 8 --dp_size 8 --ep_size 4 --zero_stage 3 --shard_size ";
  refuses(shards + "4",
          "shard_size=4 must divide the 2 ranks of edp, which hold the same experts; "
          "try 1 or 2");
  refuses(shards + "2", "");
  refuses("--num_experts 8 --dropout 0.1", "dropout=0.1 is for MLPs");
  refuses("--num_experts 8 --route_nodes 3",
          "route_nodes=3 must be at most expert_nodes=1; try --expert_nodes 4");
  refuses("--num_experts 8 --first_dense_layers 3", "first_dense_layers=3 must lie in [0, 2]");
  refuses("--num_experts 8 --first_dense_layers -1", "first_dense_layers=-1 must lie in [0, 2]");
  refuses("--num_experts 8 --first_dense_layers 2", "");
  refuses("--num_experts 8 --expert_tp", "expert_tp is for tp_size above 1; leave it out");
  refuses("--num_experts 8 --balance_coef 0.1", "balance_coef is for balance=sample or batch");
  refuses("--num_experts 8 --balance sample --balance_coef 0.1", "");
  refuses("--num_experts 8 --balance sample --bias_update_rate 0.1", "bias_update_rate is for");
  refuses("--num_experts 8 --balance bias --bias_update_rate 0.1", "");
  refuses("--dp_size 2 --ep_size 2", "ep_size needs experts; try --num_experts 8, or leave it out");
  for (const char* flag :
       {"num_experts_per_tok 2", "num_shared_experts 1", "router_score sigmoid", "norm_topk_prob",
        "route_nodes 0", "balance bias", "capacity_factor 1.25", "router_z_loss_coef 0.001"}) {
    const std::string words = flag, name = words.substr(0, words.find(' '));
    refuses("--" + words, name + " needs experts; try --num_experts 8");
    refuses("--num_experts 8 --" + words, "");
  }
  refuses("--expert_tp", "expert_tp needs experts; leave it out");  // and several ranks of tp
  DryEngine engine(0, 4);
  check_throws<UsageError>(
      [&] { Mesh(Communicator::world(engine), {.dp = 2, .tp = 2, .ep = 3, .ep_over_tp = true}); },
      {"ep_size=3 must divide dp_size*cp_size*tp_size=4; try 1, 2 or 4"});
  check_throws<UsageError>([&] { Mesh(Communicator::world(engine), {.dp = 2, .tp = 2, .ep = 4}); },
                           {"ep_size=4 must divide dp_size*cp_size=2; try 1 or 2"});
}

}  // namespace
}  // namespace usp::test
