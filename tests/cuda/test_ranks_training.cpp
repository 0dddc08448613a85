#include "comm/launch.h"
#include "emulator/emulator.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/zero_parity.h"
#include "technique/tiny_llama.h"
#if __has_include("context_parallel/attention.h")
#include "technique/context_parallel/context_parity.h"
#elif __has_include("tensor_parallel/linears.h")
#include "technique/tensor_parallel/tensor_parity.h"
#endif
#if __has_include("expert_parallel/router.h")
#include "technique/expert_parallel/expert_parity.h"
#elif __has_include("pipeline_parallel/executor.h")
#include "technique/pipeline_parallel/pipeline_parity.h"
#endif

/// A chapter's trainer on ranks that share a GPU, held against one rank on the CPU: losses,
/// gradients, moments and weights, and what was sent. And the memory that it takes there, against
/// the estimate.
///
/// Kernels of a GPU round otherwise than the CPU's, so a training agrees to 1e-10. That messages by
/// way of the host keep every bit is tested without kernels in between: test_staged.cpp.
namespace usp::test {
namespace {

using emulator::Order;

/// Runs the ranks on the emulated GPU, whose queues go on in this order.
void on_gpus(int64_t ranks, Order order, EngineKind kind,
             const std::function<void(const Communicator&)>& body) {
  emulator::Options options = emulator::options;
  options.streams = order;
  const emulator::Use use(options);
  CAPTURE(ranks, static_cast<int>(order), kind == EngineKind::nccl);
  run_threads(
      static_cast<int>(ranks),
      [&](const Communicator& world) {
        world.engine().set_device_kind(kind);
        body(world);
      },
      600, Device::cuda);
}

/// How many runs of a training: every order of the streams where the technique is new, or in the
/// newest chapter, which carries the code of all; every order by every engine with USP_TEST_FULL=1.
size_t count_runs(const char* technique) {
  if (!is_full() || is_carried(technique)) return 1;
  return is_full_in_turns() ? 3 : 6;
}

/// The same with another order each time, and with another kind of messages: so six runs in a row
/// have every pair of the two.
void on_gpus(int64_t ranks, const char* technique,
             const std::function<void(const Communicator&)>& body) {
  constexpr std::array kOrders = {Order::forward, Order::reverse, Order::shuffled};
  constexpr std::array kKinds = {EngineKind::staged, EngineKind::nccl};
  static size_t runs = turn();
  const size_t repetitions = count_runs(technique);
  for (size_t i = 0; i < repetitions; ++i, ++runs) {
    on_gpus(ranks, kOrders[runs % kOrders.size()], kKinds[runs % kKinds.size()], body);
  }
}

/// A state sharded in one way or another, over 12 samples a step.
TrainConfig zero_training(int64_t ranks, const ZeroCase& c) {
  TrainConfig config = zero_config(c, static_cast<int>(ranks));
  config.micro_batch_size = 12 / (ranks * c.grad_acc_steps);
  config.data_parallel.bucket_mb = 137.0 * 8 / (1 << 20);  // as in data_parallel_parity.h
  return config;
}

TEST_CASE("ranks on a GPU train as one on the CPU: data parallelism and ZeRO", "[streams]") {
  const TrainConfig parity = parity_config();
  const RandomTokens tokens(parity.model.vocab_size);
  const TokenFile file(tokens.path(), 2, parity.model.vocab_size);
  const Dataset dataset(file, parity.seq_len, 0.1, DataOrder::shuffled, parity.seed);
  const auto train_alone = [&](bool tied) {
    OnDevice cpu(Device::cpu);
    SoloTrainer solo(zero_training(1, {0, 0, 1, "none", tied}), &dataset);
    return train(solo, 3);
  };
  const TrainedState untied = train_alone(false), tied = train_alone(true);
  const std::vector<std::pair<int64_t, ZeroCase>> cases = {
      {2, {0, 0, 3, "none", false}},
      {3, {0, 0, 1, "full", true}},
      {2, {1, 0, 1, "none", true, "optimizer"}},
      {4, {2, 2, 3, "none", false, "none", "step"}},
      {3, {2, 0, 2, "selective", false, "forward"}},
      {4, {3, 0, 1, "none", true, "forward", "micro_batch", "block"}},
      {2, {3, 0, 3, "full", false, "none", "step", "step"}},
      {4, {3, 2, 3, "selective", false, "forward", "micro_batch", "chunk"}},
  };
  for (const auto& [ranks, c] : cases) {
    const std::string what = c.name(static_cast<int>(ranks));
    const TrainConfig config = zero_training(ranks, c);
    const TrainedState& expected = c.tied ? tied : untied;
    on_gpus(ranks, "data_parallel/zero", [&](const Communicator& world) {
      const Mesh mesh(world, {.dp = world.size()});
      Trainer trainer(config, {&dataset, mesh});
      const ZeroTraffic before = sent_by_all(world);
      expect_close(train(trainer, 3, &world), expected, 1e-10, what);
      if (config.data_parallel.zero_stage > 0) check_zero_traffic(world, config, before, 3, what);
    });
  }
}

#if __has_include("tensor_parallel/linears.h")
TEST_CASE("ranks on a GPU train as one on the CPU: tensor and sequence parallelism") {
  const std::vector<TensorCase> cases = {
      {2, 1, 2, "off", true, 0, "none", "blockwise", "none", 1, 0.25},
      {2, 2, 1, "again", false, 3, "full", "blockwise", "weight_grad", 1},
      {4, 1, 2, "kept", false, 0, "selective", "naive", "chunks", 3},
      {3, 1, 3, "off", true, 0, "full", "blockwise", "weight_grad", 1, 0, /*all_heads=*/12},
  };
  const TrainConfig config = tensor_config(cases[0]);
  const RandomTokens tokens(config.model.vocab_size);
  const TokenFile file(tokens.path(), 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0.1, DataOrder::shuffled, config.seed);
  TensorReferences references(dataset, 2);
  for (const TensorCase& c : cases) {
    const TrainedState expected = [&] {
      OnDevice cpu(Device::cpu);
      return references.of(c);
    }();
    on_gpus(c.tp * c.dp, "tensor_parallel/linears",
            [&](const Communicator& world) { check_tensor_parity(world, c, dataset, expected); });
  }
}
#endif

#if __has_include("context_parallel/attention.h")
ContextCase context_case(int64_t cp, int64_t tp, const char* method, int64_t ulysses_size) {
  ContextCase c{{tp, 1, 2, "off", false, 0, "none", "blockwise", "weight_grad", 1}};
  c.cp = cp;
  c.method = method;
  c.ulysses_size = ulysses_size;
  return c;
}

TEST_CASE("ranks on a GPU train as one on the CPU: context parallelism") {
  std::vector<ContextCase> cases = {context_case(2, 1, "ring", 1), context_case(3, 1, "ring", 1),
                                    context_case(2, 2, "all_gather", 1),
                                    context_case(4, 1, "ring_ulysses", 2)};
  cases[1].num_kv_heads = 3;
  cases[1].document_mask = true;
  cases[2].recompute = "full";
  const TrainConfig config = alone_config(cases[0]);
  const RandomTokens tokens(config.model.vocab_size);
  const TokenFile file(tokens.path(), 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0.1, DataOrder::shuffled, config.seed);
  ContextReferences references(dataset, 2);
  for (const ContextCase& c : cases) {
    const TrainedState& expected = references.of(c);
    on_gpus(c.ranks(), "context_parallel/attention",
            [&](const Communicator& world) { check_context_parity(world, c, dataset, expected); });
  }
}
#endif

#if __has_include("pipeline_parallel/executor.h")
PipelineCase pipeline_case(int64_t pp, int64_t dp, const char* schedule, int64_t micro_batches) {
  PipelineCase c{{1, dp, 2, "off", false, 0, "none", "blockwise", "weight_grad", micro_batches}};
  c.pp = pp;
  c.schedule = schedule;
  return c;
}

TEST_CASE("ranks on a GPU train as one on the CPU: pipelines", "[streams]") {
  std::vector<PipelineCase> cases = {pipeline_case(2, 1, "1f1b", 3), pipeline_case(3, 1, "afab", 3),
                                     pipeline_case(2, 2, "interleaved", 2),
                                     pipeline_case(4, 1, "zb_h1", 4),
                                     pipeline_case(2, 1, "dualpipe", 4)};
  cases[1].tied = true;
  cases[2].chunks = 2;
  cases[2].zero_stage = 1;
  const Text text;
  PipelineReferences references(text.dataset, 2);
  for (const PipelineCase& c : cases) {
    const PipelineResult& expected = references.of(c);
    on_gpus(c.ranks(), "pipeline_parallel/executor", [&](const Communicator& world) {
      check_pipeline_parity(world, c, text.dataset, expected);
    });
  }
}
#endif

#if __has_include("pipeline_parallel/executor.h")
/// Seconds of the device's spans of this name.
double device_seconds(const Tracer& tracer, std::string_view name) {
  double seconds = 0;
  for (const Tracer::Span& span : tracer.spans()) {
    if (span.name == name) seconds += double(span.device_end - span.device_begin) * 1e-9;
  }
  return seconds;
}

/// Three steps with a pipeline. What its actions took lies around the trace's passes, and in its
/// steps.
void check_measured_work(const Communicator& world, const TrainConfig& config,
                         const Dataset& dataset) {
  constexpr double kRounding = 1e-6;
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  Tracer& tracer = Runtime::current().tracer();
  tracer.record(true);
  std::vector<int64_t> created;
  for (int64_t step = 0; step < 4; ++step) {
    tracer.set_step(step + 1);
    trainer.train_step(step);
    trainer.report(step, 0);
    world.barrier();
    if (world.rank() == 0) created.push_back(emulator::timed_events().created);
    world.barrier();
  }
  tracer.record(false);
  const MeasuredWork& measured = trainer.pipeline().measured();
  const auto seconds = [&](Work work) { return measured.seconds[static_cast<int>(work)]; };
  const double f = seconds(Work::F), b = seconds(Work::B) + seconds(Work::BW);
  const double all = f + b + seconds(Work::W), forward = device_seconds(tracer, "forward"),
               backward = device_seconds(tracer, "backward"),
               steps = device_seconds(tracer, "train_step");
  USP_CHECK(forward > 0 && f >= forward - kRounding, "work of F: {} s, in the trace {}", f,
            forward);
  USP_CHECK(backward > 0 && b >= backward - kRounding, "work of B: {} s, in the trace {}", b,
            backward);
  USP_CHECK(all <= measured.span + kRounding, "work of all: {} s, in a pipeline of {}", all,
            measured.span);
  USP_CHECK(measured.span <= steps + kRounding, "work of a pipeline: {} s, in steps of {}",
            measured.span, steps);
  if (world.rank() == 0) {
    USP_CHECK(created[2] == created[3], "{} events, then {}", created[2], created[3]);
  }
}

TEST_CASE("what a stage's work takes on a GPU is the GPU's time, and not the host's") {
  const Text text;
  for (bool host_clock : {false, true}) {
    emulator::Options options = emulator::options;
    options.host_clock = host_clock;
    const emulator::Use use(options);
    for (const char* schedule : {"1f1b", "zb_h1"}) {
      CAPTURE(host_clock, schedule);
      const TrainConfig config = pipeline_config(pipeline_case(2, 1, schedule, 3));
      for (int i = 0; i < 2; ++i) {  // messages by way of the host, and by NCCL
        on_gpus(2, "pipeline_parallel/executor", [&](const Communicator& world) {
          check_measured_work(world, config, text.dataset);
        });
      }
    }
  }
}

TEST_CASE("a pipeline on GPUs learns times of the GPUs, and agrees on them") {
  const Text text;
  TrainConfig config = pipeline_config(pipeline_case(2, 1, "auto", 4));
  config.pipeline.pp_times = "measured";
  for (int i = 0; i < 2; ++i) {
    on_gpus(2, "pipeline_parallel/executor", [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      for (int64_t step = 0; step < PipelineConfig::kMeasuredUntil; ++step) {
        USP_CHECK(trainer.pipeline().measured().times.empty(), "times after {} steps", step);
        trainer.train_step(step);
      }
      const MeasuredWork& measured = trainer.pipeline().measured();
      for (const std::string& other : world.all_gather_text(measured.times)) {
        USP_CHECK(other == measured.times, "times {} and {}", measured.times, other);
      }
      PipelineConfig given;
      given.pp_times = measured.times;
      USP_CHECK(given.times().forward > 1e-3 && given.times().message > 1e-4, "times {}",
                measured.times);
      const size_t passes = 4 * (PipelineConfig::kMeasuredUntil - PipelineConfig::kWarmUpSteps);
      USP_CHECK(measured.all[static_cast<int>(Work::F)].size() == passes, "{} forward passes",
                measured.all[static_cast<int>(Work::F)].size());
      trainer.train_step(PipelineConfig::kMeasuredUntil);
    });
  }
}
#endif

#if __has_include("expert_parallel/router.h")
TEST_CASE("ranks on a GPU train as one on the CPU: experts", "[streams]") {
  std::vector<ExpertCase> cases = {plain_experts(2, 2), plain_experts(3, 3), plain_experts(4, 2),
                                   plain_experts(2, 4), plain_experts(1, 2)};
  cases[1].experts = 6;
  cases[1].balance = "bias";
  cases[1].router = "sigmoid";
  cases[2].zero_stage = 3;
  cases[2].capacity = 1;
  cases[3].cp = 2;
  cases[3].recompute = "full";
  cases[4].tp = 2;
  cases[4].sequence = "again";
  cases[4].pp = 2;
  const Text text;
  for (const ExpertCase& c : cases) {
    const ExpertResult expected = expert_reference(c, text.dataset);
    on_gpus(c.ranks(), "expert_parallel/router", [&](const Communicator& world) {
      check_expert_parity(world, c, text.dataset, expected);
    });
  }
}
#endif

/// What an allocation adds or a release takes away, in two steps. Left out is workspace, a device's
/// own business. What the router decides is left out too, where that is asked for.
Events events_of_steps(Allocator& allocator, Trainer& trainer, bool routed) {
  allocator.record_events(true);
  trainer.train_step(0);
  trainer.train_step(1);
  allocator.record_events(false);
  if (Runtime::current().accelerator() != nullptr) trainer.report(1, 0);  // all work is over
  Events events;
  for (const Allocator::Event& event : allocator.events()) {
    const Category category = event.tag.category;
    const bool kept = category == Category::weights || category == Category::gradients ||
                      category == Category::optimizer;
    if (category != Category::workspace && (kept || !routed)) {
      events.emplace_back(event.bytes, category);
    }
  }
  return events;
}

/// Bytes by category that live behind these steps.
using LiveByCategory = std::map<Category, int64_t>;

/// What training takes of a rank's memory.
struct TakenMemory {
  LiveByCategory states;
  Events events;

  bool operator==(const TakenMemory&) const = default;
};

TakenMemory taken_memory(Allocator& allocator, const TrainConfig& config, const Dataset* dataset,
                         const Mesh& mesh, bool routed) {
  Trainer trainer(config, {dataset, mesh});
  TakenMemory taken;
  taken.events = events_of_steps(allocator, trainer, routed);
  for (Category category : {Category::weights, Category::gradients, Category::optimizer}) {
    taken.states[category] = allocator.live_bytes(category);
  }
  return taken;
}

/// Layouts of every kind that the chapter has.
std::vector<TrainConfig> layouts() {
  std::vector<TrainConfig> configs;
  for (int64_t stage : {0, 1, 2, 3}) {
    configs.push_back(zero_training(2, {stage, 0, 3, "full", false}));
  }
  configs.push_back(zero_training(4, {3, 2, 1, "none", true, "forward"}));
#if __has_include("tensor_parallel/linears.h")
  for (const char* sequence : {"off", "again"}) {
    configs.push_back(
        tensor_config({2, 2, 2, sequence, false, 1, "selective", "naive", "weight_grad", 1}));
  }
#endif
#if __has_include("context_parallel/attention.h")
  configs.push_back(context_config(context_case(3, 1, "ring", 1)));
#endif
#if __has_include("pipeline_parallel/executor.h")
  configs.push_back(pipeline_config(pipeline_case(2, 1, "1f1b", 3)));
  configs.push_back(pipeline_config(pipeline_case(3, 1, "zb_h1", 4)));
#endif
#if __has_include("expert_parallel/router.h")
  ExpertCase experts = plain_experts(2, 2);
  experts.zero_stage = 3;
  configs.push_back(expert_config(experts));
#endif
  return configs;
}

/// Whether a router decides what a rank computes.
bool is_routed([[maybe_unused]] const TrainConfig& config) {
#if __has_include("expert_parallel/router.h")
  return config.model.experts.num_experts > 0;
#else
  return false;
#endif
}

TEST_CASE("a rank's GPU takes the memory of the estimate, allocation by allocation") {
  EngineKind other = EngineKind::nccl;
  for (TrainConfig config : layouts()) {
    config.device = "cuda";
    other = other == EngineKind::nccl ? EngineKind::staged : EngineKind::nccl;
    const RandomText text(config, 400);
    const int ranks = DryMesh(config.mesh()).engine.size();
    for (EngineKind kind : {EngineKind::staged, EngineKind::nccl}) {
      if (!is_full() && kind == other) continue;  // the layouts take turns
      config.communication->comm = kind == EngineKind::nccl ? "nccl" : "mpi";
      std::vector<TakenMemory> found(ranks);
      on_gpus(ranks, Order::shuffled, kind, [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        found[world.rank()] = taken_memory(Runtime::current().allocator(), config, &text.dataset,
                                           mesh, is_routed(config));
      });
      for (int rank = 0; rank < ranks; ++rank) {
        OnDevice meta(Device::meta);
        DryEngine engine(rank, ranks, config.engine());
        const Mesh mesh(Communicator::world(engine), config.mesh());
        const TakenMemory expected =
            taken_memory(meta.allocator(), config, nullptr, mesh, is_routed(config));
        CAPTURE(ranks, rank, kind == EngineKind::nccl, config.data_parallel.zero_stage);
        REQUIRE(found[rank].states == expected.states);
        REQUIRE(found[rank].states.at(Category::optimizer) > 0);
        if (!is_routed(config)) REQUIRE(found[rank].events.size() > 100);
        const bool same = found[rank].events == expected.events;
        REQUIRE(same);
      }
    }
  }
}

TEST_CASE("sums wait in memory of the host: the formulas leave them out where a GPU computes") {
  for (int64_t stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    TrainConfig config = zero_training(4, {stage, 0, 1, "none", false});
    const auto scratch = [&] {
      const auto predicted = by_name(predict(config).buffers);
      REQUIRE(predicted == by_name(simulate<Trainer>(config).buffers));
      return predicted.contains("scratch of reductions");
    };
    REQUIRE(scratch());
    config.device = "cuda";
    REQUIRE_FALSE(scratch());
  }
}

TEST_CASE("from the third step on ranks ask a GPU for no memory") {
  TrainConfig config = zero_training(2, {3, 0, 3, "none", false, "forward"});
  const RandomText text(config, 400);
  on_gpus(2, "data_parallel/zero", [&](const Communicator& world) {
    const Mesh mesh(world, {.dp = 2});
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    trainer.train_step(1);
    const Allocator& allocator = Runtime::current().allocator();
    const int64_t asked = allocator.system_allocations(), live = allocator.live_bytes();
    for (int64_t step = 2; step < 5; ++step) {
      trainer.train_step(step);
      trainer.report(step, 0);
      USP_CHECK(allocator.system_allocations() == asked, "{} requests, {} before",
                allocator.system_allocations(), asked);
      USP_CHECK(allocator.live_bytes() == live, "{} bytes live, {} before", allocator.live_bytes(),
                live);
    }
  });
}

}  // namespace
}  // namespace usp::test
