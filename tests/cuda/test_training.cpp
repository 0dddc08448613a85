#include <nvtx3/nvToolsExt.h>

#include <map>
#include <set>

#include "emulator/emulator.h"
#include "technique/window.h"
#include "tensor/ops.h"
#include "train/checkpoint.h"

/// The chapter's trainer on a GPU, held against the same on the CPU.
namespace usp::test {
namespace {

constexpr int64_t kSteps = 5;
const RunIdentity kIdentity{R"({"seed": 1})", 1, "c0ffee", {}};

struct Case {
  std::string_view name;
  std::function<void(TrainConfig&)> change;
};

const std::vector<Case> kCases = {
    {"blockwise", [](TrainConfig&) {}},
    {"naive", [](TrainConfig& c) { c.attention = "naive"; }},
    {"selective", [](TrainConfig& c) { c.attention = "naive", c.recompute = "selective"; }},
    {"full", [](TrainConfig& c) { c.recompute = "full"; }},
    {"tied", [](TrainConfig& c) { c.model.tie_word_embeddings = true; }},
    {"accumulation", [](TrainConfig& c) { c.grad_acc_steps = 3; }},
};

TrainConfig training(const Case& test_case, const char* dtype) {
  TrainConfig config = tiny_training();
  config.dtype = dtype;
  test_case.change(config);
  return config;
}

/// What training leaves: by step losses and norms; then weights, moments by name, and the last
/// step's gradients before they were clipped.
using Trace = std::map<std::string, Values>;

void add_state(Trace& trace, Trainer& trainer) {
  const TrainState state = trainer.state();
  trace["weights"] = state.parameters.flat_masters().items();
  trace["gradients"] = state.parameters.flat_grads().items();
  for (const OptimizerState& moment : state.optimizer) trace[moment.name] = moment.values.items();
}

Trace trace_of(Trainer& trainer, int64_t steps) {
  Trace trace;
  for (int64_t step = 0; step < steps; ++step) {
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    trace["losses"].push_back(metrics.loss);
    trace["norms"].push_back(metrics.grad_norm);
  }
  add_state(trace, trainer);
  return trace;
}

Trace train(const TrainConfig& config, const Dataset& dataset, Device device) {
  OnDevice on(device);
  SoloTrainer trainer(config, &dataset);
  return trace_of(trainer, kSteps);
}

/// Tolerance of losses and norms, and of the state, which is held in f64 alone.
double tolerance(std::string_view dtype, std::string_view what) {
  if (what != "losses" && what != "norms" && dtype != "f64") return kInf;
  return tolerance_of(parse_dtype(dtype), what == "norms" ? kGradNormTolerance : kLossTolerance);
}

void check_same(const Trace& cuda, const Trace& cpu, std::string_view dtype) {
  REQUIRE(cuda.size() == cpu.size());
  for (const auto& [what, values] : cpu) {
    check_close(cuda.at(what), values, tolerance(dtype, what), what);
  }
}

TEST_CASE("a GPU trains as the CPU does") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    for (const Case& test_case : kCases) {
      CAPTURE(dtype, test_case.name);
      const TrainConfig config = training(test_case, dtype);
      const RandomText text(config, 400);
      check_same(train(config, text.dataset, Device::cuda),
                 train(config, text.dataset, Device::cpu), dtype);
    }
  }
}

TEST_CASE("on a GPU, too, the gradient agrees with finite differences in every parameter") {
  emulator::Options options = emulator::options;
  options.checks = options.protect = false;  // hundreds of passes
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  for (bool naive : {true, false}) {
    CAPTURE(naive);
    Window window(tiny_model(), naive, /*micro_batches=*/2);
    window.backward();
    for (size_t i = 0; i < window.parameters().size(); ++i) {
      const Parameter& parameter = window.parameters()[i];
      check_gradient(
          parameter.grad, parameter.value, [&] { return window.loss(); }, parameter.name,
          /*samples=*/2, /*tolerance=*/1e-8);
    }
  }
}

/// One order after the other of the emulated device's queues, and of the threads of a block.
class EveryOrder {
 public:
  EveryOrder()
      : use_([] {
          using emulator::Order;
          emulator::Options options = emulator::options;
          options.threads = options.streams =
              GENERATE(Order::forward, Order::reverse, Order::shuffled);
          return options;
        }()) {}

 private:
  emulator::Use use_;
};

TEST_CASE("whatever queue goes on first, and whatever thread of a block") {
  const EveryOrder order;
  for (const Case& test_case : kCases) {
    CAPTURE(test_case.name);
    const TrainConfig config = training(test_case, "f64");
    const RandomText text(config, 400);
    check_same(train(config, text.dataset, Device::cuda), train(config, text.dataset, Device::cpu),
               "f64");
  }
}

TEST_CASE("a GPU gives the same bits twice, whatever thread of a block goes on first") {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const Case& test_case : kCases) {
      CAPTURE(dtype, test_case.name);
      const TrainConfig config = training(test_case, dtype);
      const RandomText text(config, 400);
      const Trace once = train(config, text.dataset, Device::cuda);
      emulator::Options options = emulator::options;
      options.threads = options.streams = emulator::Order::shuffled;
      const emulator::Use use(options);
      const bool same = train(config, text.dataset, Device::cuda) == once;
      REQUIRE(same);
    }
  }
}

TEST_CASE("a gradient that is not finite changes nothing on a GPU, and the next step goes on") {
  const EveryOrder order;
  TrainConfig config = training(kCases[0], "f64");
  const RandomText text(config, 400);
  const auto disturbed = [&](Device device) {
    OnDevice on(device);
    SoloTrainer trainer(config, &text.dataset);
    Trace trace = trace_of(trainer, 2);
    ParameterList& parameters = trainer.model().parameters();
    const Tensor value = parameters.find("model.layers.1.mlp.up_proj.weight").value;
    const Tensor kept = clone(value);
    ops::fill(value, kNaN);
    const std::vector<char> poked = bits_of(parameters.flat_masters());
    trainer.train_step(2);
    REQUIRE(std::isnan(trainer.report(2, 0).grad_norm));
    REQUIRE(bits_of(parameters.flat_masters()) == poked);
    ops::copy(value, kept);
    trainer.train_step(3);
    trace["losses"].push_back(trainer.report(3, 0).loss);
    add_state(trace, trainer);
    return trace;
  };
  check_same(disturbed(Device::cuda), disturbed(Device::cpu), "f64");
}

TEST_CASE("on one rank the host waits for the GPU only at the end of a step") {
  OnDevice gpu(Device::cuda);
  const TrainConfig config = training(kCases[5], "f32");
  const RandomText text(config, 400);
  SoloTrainer trainer(config, &text.dataset);
  const Accelerator& accelerator = *gpu.runtime.accelerator();
  for (bool traced : {false, true}) {
    gpu.runtime.tracer().record(traced);
    for (int64_t step = 0; step < 3; ++step) {
      gpu.runtime.tracer().set_step(step + 1);
      const int64_t before = accelerator.waits();
      trainer.train_step(step);
      REQUIRE(accelerator.waits() == before);
      trainer.report(step, 0);
      REQUIRE(accelerator.waits() == before + 2);  // for the loss and for the norm
    }
  }
  gpu.runtime.tracer().record(false);
}

/// How often a span of each name was recorded.
std::map<std::string, int64_t> spans_by_name(const Tracer& tracer) {
  std::map<std::string, int64_t> counts;
  for (const Tracer::Span& span : tracer.spans()) {
    const std::string name(span.name);
    ++counts[span.number < 0 ? name : fmt::format("{} {}", name, span.number)];
  }
  return counts;
}

TEST_CASE("a step's spans have their times of the GPU, and the same events serve every step",
          "[emulated]") {
  emulator::Options options = emulator::options;
  options.host_clock = true;
  const emulator::Use use(options);
  for (const Case& test_case : kCases) {
    CAPTURE(test_case.name);
    OnDevice gpu(Device::cuda);
    Tracer& tracer = gpu.runtime.tracer();
    const TrainConfig config = training(test_case, "f32");
    const RandomText text(config, 400);
    SoloTrainer trainer(config, &text.dataset);
    const auto train_step = [&](int64_t step) {
      tracer.set_step(step + 1);
      trainer.train_step(step);
      trainer.report(step, 0);
    };
    const emulator::TimedEvents none = emulator::timed_events();
    train_step(0);
    REQUIRE(emulator::timed_events() == none);
    emulator::ranges.clear();
    tracer.record(true);
    std::vector<int64_t> created;
    for (int64_t step = 1; step < 6; ++step) {
      train_step(step);
      created.push_back(emulator::timed_events().created);
    }
    tracer.record(false);
    REQUIRE(created[0] > none.created);
    REQUIRE(std::set(created.begin() + 1, created.end()).size() == 1);
    for (const Tracer::Span& span : tracer.spans()) {
      CAPTURE(span.name, span.step);
      REQUIRE(span.on_device());
      REQUIRE(span.device_begin <= span.device_end);
    }
    // A profiler is told the same, in ranges that are all over.
    REQUIRE(emulator::ranges == spans_by_name(tracer));
    REQUIRE(emulator::open_ranges.empty());
    REQUIRE(emulator::unbalanced_ranges == 0);
    for (const char* name : {"train_step", "forward", "backward", "block 1", "attention"}) {
      REQUIRE(emulator::ranges.contains(name));
    }
    REQUIRE(emulator::ranges["train_step"] == 5);
    const emulator::TimedEvents recorded = emulator::timed_events();
    train_step(6);
    REQUIRE(emulator::timed_events() == recorded);
  }
}

TEST_CASE("a GPU's tensors take the bytes that the CPU's and the estimate's take, in their order") {
  for (const char* dtype : {"f64", "bf16"}) {
    for (const Case& test_case : kCases) {
      CAPTURE(dtype, test_case.name);
      const TrainConfig config = training(test_case, dtype);
      const RandomText text(config, 400);
      const Events cuda = events_of(config, text.dataset, Device::cuda);
      REQUIRE(cuda.size() > 100);
      const bool as_on_cpu = cuda == events_of(config, text.dataset, Device::cpu);
      const bool as_estimated = cuda == events_of(config, text.dataset, Device::meta);
      REQUIRE(as_on_cpu);
      REQUIRE(as_estimated);
    }
  }
}

TEST_CASE("from the third step on a GPU is asked for no memory") {
  for (const Case& test_case : kCases) {
    CAPTURE(test_case.name);
    OnDevice gpu(Device::cuda);
    const TrainConfig config = training(test_case, "bf16");
    const RandomText text(config, 400);
    SoloTrainer trainer(config, &text.dataset);
    trainer.train_step(0);
    trainer.train_step(1);
    const int64_t asked = gpu.allocator().system_allocations();
    const int64_t live = gpu.allocator().live_bytes();
    for (int64_t step = 2; step < 5; ++step) {
      trainer.train_step(step);
      trainer.report(step, 0);
      REQUIRE(gpu.allocator().system_allocations() == asked);
      REQUIRE(gpu.allocator().live_bytes() == live);
    }
  }
}

/// The file with a checkpoint's tensors.
std::string state_of(const TempDir& dir) {
  return read_file(newest_checkpoint(dir.file("")) + "/state.safetensors");
}

TEST_CASE("a checkpoint of either device is read on the other, bit for bit") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    for (const auto& [from, to] :
         {std::pair(Device::cpu, Device::cuda), std::pair(Device::cuda, Device::cpu)}) {
      CAPTURE(dtype, name(from));
      const TrainConfig config = training(kCases[0], dtype);
      const RandomText text(config, 400);
      const TempDir written, copied;
      {
        OnDevice on(from);
        SoloTrainer trainer(config, &text.dataset);
        trace_of(trainer, 3);
        write_checkpoint(written.file(""), 3, trainer.state(), kIdentity);
      }
      OnDevice on(to);
      SoloTrainer trainer(config, &text.dataset);
      REQUIRE(load_checkpoint(newest_checkpoint(written.file("")), trainer.state(), kIdentity) ==
              3);
      write_checkpoint(copied.file(""), 3, trainer.state(), kIdentity);
      const bool same = state_of(copied) == state_of(written);
      REQUIRE(same);
      trainer.train_step(3);
      REQUIRE(std::isfinite(trainer.report(3, 0).loss));
    }
  }
}

TEST_CASE("a text is sampled on a GPU as on the CPU") {
  const TrainConfig config = training(kCases[0], "f64");
  const RandomText text(config, 400);
  const auto sampled = [&](Device device) {
    OnDevice on(device);
    SoloTrainer trainer(config, &text.dataset);
    trace_of(trainer, 3);
    SampleConfig sample;
    sample.sample_tokens = 10;
    return sample_tokens(logits_of(trainer.model()), sample, config.seq_len, {1, 2}, 1,
                         [] { return false; });
  };
  REQUIRE(sampled(Device::cuda) == sampled(Device::cpu));
}

}  // namespace
}  // namespace usp::test
