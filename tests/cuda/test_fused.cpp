#include <mutex>
#include <regex>

#include "comm/launch.h"
#include "emulator/emulator.h"
#include "technique/case_cover.h"
#include "technique/tiny_llama.h"
#include "tensor/backend.h"

/// The last chapter's trainer with --kernels fused on an emulated GPU: attention runs on tensor
/// cores, in every layout, and trains as the CPU does.
namespace usp::test {
namespace {

constexpr int64_t kSteps = 2, kTokens = 48;

/// Heads of 64 channels, two for each kv head; odd lengths but where ranks divide them.
TrainConfig wide_training() {
  TrainConfig config = tiny_training();
  config.model.hidden_size = 32;
  config.model.num_heads = 4;
  config.model.num_kv_heads = 2;
  config.model.given_head_dim = 64;
  config.seq_len = kTokens;
  config.micro_batch_size = 2;
  config.grad_acc_steps = 2;
  config.dtype = "bf16";
  config.optimizer.lr = 1e-3;  // of bf16 the noise grows from step to step
  config.fusion.kernels = "fused";
  config.fusion.loss_rows = 50;
  return config;
}

struct Trained {
  Values losses, norms;
};

/// Matrices some ten times as large as initial ones, with which attention is almost uniform and
/// too little of its gradients is in a norm; still larger ones let bf16's noise grow.
void sharpen(ParameterList& parameters) {
  Random random(1);
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    if (parameter.init_std == 0) continue;
    const Values values = random.normals(parameter.value.numel(), 0.25);
    parameter.value.assign(values);
    parameter.shard.master.assign(values);
  }
}

Trained train(Trainer& trainer, bool from_initial = false) {
  Trained found;
  if (!from_initial) sharpen(trainer.model().parameters());
  for (int64_t step = 0; step < kSteps; ++step) {
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    found.losses.push_back(metrics.loss);
    found.norms.push_back(metrics.grad_norm);
  }
  return found;
}

void check_same(const Trained& found, const Trained& expected) {
  check_close(found.losses, expected.losses, tolerance_of(DType::bf16, kLossTolerance), "loss");
  check_close(found.norms, expected.norms, tolerance_of(DType::bf16, kGradNormTolerance), "norm");
}

Trained train_on_cpu(const TrainConfig& config, const Dataset& dataset) {
  const OnDevice cpu(Device::cpu);
  SoloTrainer trainer(config, &dataset);
  return train(trainer);
}

/// Calls forward, of one query, backward, and by the blockwise kernels, as the report has them.
using Calls = std::array<int64_t, 4>;
Calls calls_of(const Accelerator& accelerator) {
  static const std::regex kRemark(
      R"(Attention ran on tensor cores: calls forward (\d+) .*, decoding (\d+) .*, )"
      R"(backward (\d+) .*, and (\d+) .*)");
  for (const std::string& remark : accelerator.remarks()) {
    std::smatch found;
    if (!std::regex_match(remark, found, kRemark)) continue;
    return {std::stoll(found[1]), std::stoll(found[2]), std::stoll(found[3]), std::stoll(found[4])};
  }
  return {0, 0, 0, 0};
}

TEST_CASE("with --kernels fused a GPU trains as the CPU does, by attention on tensor cores") {
  for (const int capability : {80, 90}) {
    for (const char* recompute : {"none", "full"}) {
      emulator::Options options = emulator::options;
      options.compute_capability = capability;
      const emulator::Use use(options);
      CAPTURE(capability, recompute);
      TrainConfig config = wide_training();
      config.recompute = recompute;
      const RandomText text(config, 1600);
      const Trained expected = train_on_cpu(config, text.dataset);
      OnDevice gpu(Device::cuda);
      SoloTrainer trainer(config, &text.dataset);
      check_same(train(trainer), expected);
      const int64_t passes = kSteps * config.grad_acc_steps * config.model.num_layers;
      const int64_t forward = recompute == std::string_view("full") ? 2 * passes : passes;
      REQUIRE(calls_of(*gpu.runtime.accelerator()) == Calls{forward, 0, passes, 0});
    }
  }
}

TEST_CASE("--kernels reference, and f32, stay on the blockwise kernels, bit for bit") {
  TrainConfig config = wide_training();
  const RandomText text(config, 1600);
  const auto trained = [&](const char* kernels, const char* dtype, bool asked) {
    config.fusion.kernels = kernels;
    config.dtype = dtype;
    OnDevice gpu(Device::cuda);
    SoloTrainer trainer(config, &text.dataset);
    if (!asked) gpu.runtime.backend().fuse(false);
    // From other weights the fused kernels that f32 has, too, round otherwise.
    const Trained found = train(trainer, /*from_initial=*/true);
    REQUIRE(calls_of(*gpu.runtime.accelerator()) == Calls{0, 0, 0, 0});
    return found.norms;
  };
  trained("reference", "bf16", true);
  const bool same = trained("fused", "f32", true) == trained("fused", "f32", false);
  REQUIRE(same);
}

/// What a layout changes of wide_training(), and on how many ranks.
struct Layout {
  const char* name;
  int ranks;
  std::function<void(TrainConfig&)> change;
  bool in_parts = false;  ///< a rank's queries meet one part of their keys after the other
  int capability = 90;    ///< of the card: one before Hopper has kernels of its own
};

/// Four experts, of which a token takes two and each of two ranks has two.
void add_experts(TrainConfig& c) {
  c.model.experts = {.num_experts = 4, .num_experts_per_tok = 2, .moe_ffn_hidden_size = 8};
  c.data_parallel.dp_size = 2;
  c.expert_parallel.ep_size = 2;
  c.micro_batch_size = 1;
}

const std::vector<Layout> kLayouts = {
    {"tp 2", 2, [](TrainConfig& c) { c.tensor_parallel.tp_size = 2; }},
    {"ring of 2, zig-zag", 2, [](TrainConfig& c) { c.context_parallel.cp_size = 2; }, true},
    {"the same before Hopper", 2, [](TrainConfig& c) { c.context_parallel.cp_size = 2; }, true, 80},
    {"ring of 3, documents", 3,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 3;
       c.context_parallel.document_mask = true;
     },
     true},
    {"all_gather", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_method = "all_gather";
     },
     true},
    {"ulysses", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_method = "ulysses";
     }},
    {"1f1b", 2, [](TrainConfig& c) { c.pipeline.pp_size = 2; }},
    {"ZeRO-3 before Hopper", 2,
     [](TrainConfig& c) {
       c.data_parallel.dp_size = 2;
       c.data_parallel.zero_stage = 3;
       c.micro_batch_size = 1;
     },
     false, 80},
    {"experts", 2, add_experts},
};

/// Two techniques at once, and variants of one: with --all.
const std::vector<Layout> kMoreLayouts = {
    {"experts, tp 2 and sequence parallelism", 4,
     [](TrainConfig& c) {
       add_experts(c);
       c.tensor_parallel.tp_size = 2;
       c.tensor_parallel.sequence_parallel = true;
     }},
    {"ring of 2, contiguous", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_layout = "contiguous";
     },
     true},
    {"ring_ulysses before Hopper", 4,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 4;
       c.context_parallel.cp_method = "ring_ulysses";
       c.context_parallel.ulysses_size = 2;
     },
     true, 80},
    {"cp 2 and tp 2", 4,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.tensor_parallel.tp_size = 2;
     },
     true},
    {"ring of 2, recomputed but for attention", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_recompute = "keep";
       c.recompute = "full";
     },
     true},
};

/// What the first rank reports, and the calls of all of them.
struct Run {
  Trained trained;
  Calls calls{};
};

Run run_ranks(const TrainConfig& config, const Dataset& dataset, int ranks, Device device) {
  Run run;
  std::mutex one_at_a_time;
  run_threads(
      ranks,
      [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&dataset, mesh});
        // With ZeRO-3 there are no whole weights to set.
        const Trained found = train(trainer, config.data_parallel.zero_stage == 3);
        const std::lock_guard lock(one_at_a_time);
        if (world.rank() == 0) run.trained = found;
        if (device == Device::cpu) return;
        const auto calls = calls_of(*Runtime::current().accelerator());
        for (size_t i = 0; i < calls.size(); ++i) run.calls[i] += calls[i];
      },
      600, device);
  return run;
}

void check_layout(const Layout& layout) {
  CAPTURE(layout.name);
  emulator::Options options = emulator::options;
  options.compute_capability = layout.capability;
  const emulator::Use use(options);
  TrainConfig config = wide_training();
  layout.change(config);
  const RandomText text(config, 1600);
  const Run gpu = run_ranks(config, text.dataset, layout.ranks, Device::cuda);
  const Run cpu = run_ranks(config, text.dataset, layout.ranks, Device::cpu);
  check_same(gpu.trained, cpu.trained);
  // Each rank has the layers of its stage; of a ring, each query meets the keys of those before.
  const auto [forward, decoding, backward, blockwise] = gpu.calls;
  const int64_t passes = kSteps * config.grad_acc_steps * config.model.num_layers * layout.ranks /
                         config.pipeline.pp_size;
  CHECK(blockwise + decoding == 0);
  CHECK(backward == forward);
  CHECK((layout.in_parts ? forward > passes : forward == passes));
}

TEST_CASE("in every layout ranks on a GPU with --kernels fused train as those on the CPU do") {
  for (const Layout& layout : kLayouts) check_layout(layout);
  for (const Layout& layout : is_full() ? kMoreLayouts : std::vector<Layout>()) {
    check_layout(layout);
  }
}

TEST_CASE("with --kernels fused a GPU decodes as the CPU does, with keys split over blocks") {
  constexpr int64_t kPrompt = 290, kLength = 293, kSamples = 2;
  const ModelConfig config = wide_training().model;
  const std::vector<int32_t> text = Random(3).tokens(kSamples * kLength, config.vocab_size);
  const auto logits_on = [&](Device device) {
    OnDevice here(device);
    here.runtime.backend().fuse(device == Device::cuda);
    Model model = allocated_model(config, kLength, DType::bf16, probabilities_of(false), 1);
    randomize(model.parameters(), 2);
    KvCache cache(kLength);
    Values logits;
    for (int64_t begin = 0, end = kPrompt; end <= kLength; begin = end, ++end) {
      std::vector<int32_t> tokens;
      for (int64_t sample = 0; sample < kSamples; ++sample) {
        const auto first = text.begin() + sample * kLength;
        tokens.insert(tokens.end(), first + begin, first + end);
      }
      Pass pass;
      pass.mode = Pass::Mode::decode;
      pass.num_samples = kSamples;
      pass.positions = Positions(begin, end - begin);
      pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
      pass.kv_cache = &cache;
      const Values found = model.logits(pass).items();
      logits.insert(logits.end(), found.begin(), found.end());
    }
    if (device == Device::cuda) {
      const int64_t layers = config.num_layers;
      REQUIRE(calls_of(*here.runtime.accelerator()) ==
              Calls{layers, (kLength - kPrompt) * layers, 0, 0});
    }
    return logits;
  };
  check_close(logits_on(Device::cuda), logits_on(Device::cpu), 0.05, "logits");
}

TEST_CASE("with --kernels fused a GPU's tensors take the bytes of the CPU's and the estimate's") {
  for (const auto& [recompute, capability] : {std::pair("none", 90), {"full", 90}, {"full", 80}}) {
    CAPTURE(recompute, capability);
    emulator::Options options = emulator::options;
    options.compute_capability = capability;
    const emulator::Use use(options);
    TrainConfig config = wide_training();
    config.recompute = recompute;
    const RandomText text(config, 1600);
    const Events cuda = events_of(config, text.dataset, Device::cuda);
    const bool as_on_cpu = cuda == events_of(config, text.dataset, Device::cpu);
    const bool as_estimated = cuda == events_of(config, text.dataset, Device::meta);
    REQUIRE(as_on_cpu);
    REQUIRE(as_estimated);
    if (recompute != std::string_view("none")) continue;
    config.recompute = "selective";  // no weights are stored that it could drop
    const bool as_with_selective = cuda == events_of(config, text.dataset, Device::cuda);
    REQUIRE(as_with_selective);
  }
}

}  // namespace
}  // namespace usp::test
