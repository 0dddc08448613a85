#include <mutex>
#include <optional>
#include <regex>

#include "comm/launch.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "emulator/emulator.h"
#include "fusion/attention.h"
#include "technique/case_cover.h"
#include "technique/fusion/fused_calls.h"
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

/// Latent attention with DeepSeek-V3's heads: 192 channels of keys, of which values fill 128.
TrainConfig latent_training() {
  TrainConfig config = wide_training();
  config.model.given_head_dim = 0;
  config.model.num_heads = config.model.num_kv_heads = 2;
  config.model.mla = {.attention_kind = "mla",
                      .q_lora_rank = 24,
                      .kv_lora_rank = 16,
                      .qk_nope_head_dim = 128,
                      .qk_rope_head_dim = 64,
                      .v_head_dim = 128};
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

void check_same(const Trained& found, const Trained& expected, DType dtype = DType::bf16) {
  check_close(found.losses, expected.losses, tolerance_of(dtype, kLossTolerance), "loss");
  check_close(found.norms, expected.norms, tolerance_of(dtype, kGradNormTolerance), "norm");
}

Trained train_on_cpu(const TrainConfig& config, const Dataset& dataset) {
  const OnDevice cpu(Device::cpu);
  SoloTrainer trainer(config, &dataset);
  return train(trainer);
}

/// Calls of attention forward, of one query, backward, and by the blockwise kernels, as the report
/// has them.
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

/// Each of these operations launches a kernel or two, and not as many as it has parts.
void check_launches(CallCounter& counter, int64_t parameters) {
  constexpr int64_t kRanges = cuda::RangesOfLaunch<int>::kMost;
  for (const char* name : {"linear_forward_add", "unpermute_add", "adamw", "swiglu_forward"}) {
    CAPTURE(name);
    REQUIRE(counter.launched[name] == counter.calls[name]);
  }
  const int64_t groups = (parameters + kRanges - 1) / kRanges;
  REQUIRE(counter.launched["sum_squares"] == 2 * groups * counter.calls["sum_squares"]);
}

/// One GPU of this capability trains as the CPU does, every call of attention by these two rungs,
/// in f32 backward by the blockwise kernels.
void check_alone(const TrainConfig& config, int capability, const char* forward_by,
                 const char* backward_by) {
  emulator::Options options = emulator::options;
  options.compute_capability = capability;
  const emulator::Use use(options);
  CAPTURE(capability, config.recompute, forward_by, backward_by);
  const RandomText text(config, 1600);
  const Trained expected = train_on_cpu(config, text.dataset);
  OnDevice gpu(Device::cuda);
  SoloTrainer trainer(config, &text.dataset);
  CallCounter counter;
  check_same(train(trainer), expected, parse_dtype(config.dtype));
  REQUIRE(differences(counter.calls, fused_calls(config, /*summing=*/1, kSteps)) == "");
  check_launches(counter, int64_t(trainer.parameters().size()));
  const int64_t passes = kSteps * config.grad_acc_steps * config.model.num_layers;
  const int64_t forward = config.recompute == "full" ? 2 * passes : passes;
  const int64_t blockwise = config.dtype == "f32" ? passes : 0;
  REQUIRE(calls_of(*gpu.runtime.accelerator()) == Calls{forward, 0, passes - blockwise, blockwise});
  const std::vector<std::string> remarks = gpu.runtime.accelerator()->remarks();
  const std::string rungs =
      fmt::format("forward {} ({}), decoding 0 ({}), backward {} ({})", forward, forward_by,
                  blockwise > 0 ? "none" : "flash_decode", passes - blockwise, backward_by);
  const bool are_named = std::ranges::any_of(
      remarks, [&](const std::string& remark) { return remark.find(rungs) != std::string::npos; });
  REQUIRE(are_named);
}

TEST_CASE("with --kernels fused a GPU trains as the CPU does, by attention on tensor cores") {
  for (const char* recompute : {"none", "full"}) {
    TrainConfig config = wide_training();
    config.recompute = recompute;
    check_alone(config, 80, "flash_2", "flash_2_backward");
    check_alone(config, 90, "flash_3", "flash_3_backward");
  }
}

TEST_CASE("latent attention trains on the rungs that take its heads, none of its calls blockwise") {
  check_alone(latent_training(), 80, "flash_2", "flash_2_backward");
  check_alone(latent_training(), 90, "flash_3", "flash_2_backward");
}

/// A rung in f32 as the trainer's attention of whole samples, forward.
class WideRung : public cuda::AttentionKernels {
 public:
  using bf16 = cuda::bf16;
  using Given = cuda::AttentionProblem<float>;
  using Narrow = cuda::AttentionProblem<bf16>;
  template <class O>
  using NarrowGradients = cuda::AttentionGradients<bf16, O>;

  explicit WideRung(const attention::Rung<float>& rung) : rung_(rung) {}

  std::string_view name_of_forward() const override { return rung_.name; }
  int64_t workspace(const Given& x) const override { return rung_.scratch(shape_of(x)); }
  bool forward(cudaStream_t stream, const cuda::Heads<float>& out, float* lse, const Given& x,
               void* scratch) override {
    const attention::Problem<float> problem{shape_of(x),
                                            x.q.data,
                                            x.k.data,
                                            x.v.data,
                                            out.data,
                                            lse,
                                            static_cast<float>(x.scale),
                                            static_cast<float*>(scratch),
                                            nullptr,
                                            pitch_of(x.q),
                                            pitch_of(x.k),
                                            pitch_of(x.v),
                                            pitch_of(out)};
    rung_.run(stream, problem);
    return true;
  }

  // Nothing else.
  bool takes_heads_of(int64_t, int64_t) const override { return false; }
  std::string_view name_of_decoding() const override { return "none"; }
  std::string_view name_of_backward(int64_t) const override { return "none"; }
  int64_t workspace(const Narrow&) const override { return 0; }
  int64_t workspace(const NarrowGradients<bf16>&, const Narrow&) const override { return -1; }
  int64_t workspace(const NarrowGradients<float>&, const Narrow&) const override { return -1; }
  bool forward(cudaStream_t, const cuda::Heads<bf16>&, float*, const Narrow&, void*) override {
    return false;
  }
  bool forward(cudaStream_t, const cuda::Heads<float>&, float*, const Narrow&, void*) override {
    return false;
  }
  void backward(cudaStream_t, const NarrowGradients<bf16>&, const Narrow&, void*) override {}
  void backward(cudaStream_t, const NarrowGradients<float>&, const Narrow&, void*) override {}

 private:
  static attention::Shape shape_of(const Given& x) {
    const auto number = [](int64_t size) { return static_cast<int>(size); };
    return {number(x.B), number(x.S), number(x.K),    number(x.N),
            number(x.G), number(x.D), /*causal=*/true};
  }
  template <class T>
  static attention::Pitch pitch_of(const cuda::Heads<T>& x) {
    return {static_cast<int>(x.row), x.sample, static_cast<int>(x.head)};
  }

  const attention::Rung<float>& rung_;
};

/// What the trainer does not take by itself: a rung, the dtype that it has, a card that runs it.
struct Rung {
  const char* name;
  const char* dtype;
  int capability;
  const char* backward_by;
  cuda::MakeAttentionKernels make;
};
template <const attention::Rung<float>* rung>
std::unique_ptr<cuda::AttentionKernels> make_wide(const cuda::DeviceLimits& /*limits*/) {
  return std::make_unique<WideRung>(*rung);
}
std::unique_ptr<cuda::AttentionKernels> make_flash_4(const cuda::DeviceLimits& limits) {
  return attention::attention_by(attention::kFlash4, attention::kFlash3Backward, limits);
}
const Rung kNaive{"naive", "f32", 75, "none", make_wide<&attention::kNaive>},
    kFlash1{"flash_1", "f32", 75, "none", make_wide<&attention::kFlash1>},
    kBlockwise{"blockwise", "f32", 75, "none", make_wide<&attention::kBlockwise>},
    kFlash4{"flash_4", "bf16", 90, "flash_3_backward", make_flash_4};

/// The trainer's attention is this rung's as long as this lives.
struct Takes {
  explicit Takes(const Rung& rung) { cuda::make_attention_kernels = rung.make; }
  ~Takes() { cuda::make_attention_kernels = before; }
  Takes(const Takes&) = delete;
  Takes& operator=(const Takes&) = delete;

  cuda::MakeAttentionKernels before = cuda::make_attention_kernels;
};

TEST_CASE("the trainer runs on the other rungs as well, though it does not take them by itself") {
  for (const Rung& rung : {kNaive, kFlash1, kBlockwise, kFlash4}) {
    const Takes takes(rung);
    TrainConfig config = wide_training();
    config.dtype = rung.dtype;
    check_alone(config, rung.capability, rung.name, rung.backward_by);
  }
  const Takes takes(kFlash4);
  check_alone(latent_training(), 90, "flash_4", "flash_2_backward");
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
    CallCounter counter;
    // From other weights the fused kernels that f32 has, too, round otherwise.
    const Trained found = train(trainer, /*from_initial=*/true);
    if (config.fusion.fused() && asked) {
      REQUIRE(differences(counter.calls, fused_calls(config, /*summing=*/1, kSteps)) == "");
      check_launches(counter, int64_t(trainer.parameters().size()));
    } else {
      REQUIRE(counter.calls["linear_forward_add"] == 0);
    }
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
  int capability = 90;  ///< of the card: one before Hopper has kernels of its own
  bool latent = false;  ///< of latent_training()
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
    {"ring of 2, zig-zag", 2, [](TrainConfig& c) { c.context_parallel.cp_size = 2; }},
    {"the same before Hopper", 2, [](TrainConfig& c) { c.context_parallel.cp_size = 2; }, 80},
    {"ring of 3, documents", 3,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 3;
       c.context_parallel.document_mask = true;
     }},
    {"all_gather", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_method = "all_gather";
     }},
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
     80},
    {"experts", 2, add_experts},
    {"latents over a ring of 2", 2, [](TrainConfig& c) { c.context_parallel.cp_size = 2; }, 90,
     /*latent=*/true},
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
     }},
    {"ring_ulysses before Hopper", 4,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 4;
       c.context_parallel.cp_method = "ring_ulysses";
       c.context_parallel.ulysses_size = 2;
     },
     80},
    {"cp 2 and tp 2", 4,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.tensor_parallel.tp_size = 2;
     }},
    {"latents and tp 2 before Hopper", 2, [](TrainConfig& c) { c.tensor_parallel.tp_size = 2; }, 80,
     /*latent=*/true},
    {"latents and ulysses", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_method = "ulysses";
     },
     90, /*latent=*/true},
    {"ring of 2, recomputed but for attention", 2,
     [](TrainConfig& c) {
       c.context_parallel.cp_size = 2;
       c.context_parallel.cp_recompute = "keep";
       c.recompute = "full";
     }},
};

/// What the first rank reports, and the calls of all of them.
struct Run {
  Trained trained;
  Calls attention{};
  CallCounts calls;
  int64_t summing = 0;  ///< ranks that sum squares
};

Run run_ranks(const TrainConfig& config, const Dataset& dataset, int ranks, Device device) {
  Run run;
  std::mutex one_at_a_time;
  run_threads(
      ranks,
      [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&dataset, mesh});
        CallCounter counter;
        // With ZeRO-3 there are no whole weights to set.
        const Trained found = train(trainer, config.data_parallel.zero_stage == 3);
        const std::lock_guard lock(one_at_a_time);
        if (world.rank() == 0) run.trained = found;
        for (const auto& [name, count] : counter.calls) run.calls[name] += count;
        run.summing += sums_squares(trainer);
        if (device == Device::cpu) return;
        const auto calls = calls_of(*Runtime::current().accelerator());
        for (size_t i = 0; i < calls.size(); ++i) run.attention[i] += calls[i];
      },
      600, device);
  return run;
}

/// Calls of attention of one layer and micro-batch, of all ranks of cp together: a rank's queries
/// meet the keys of one place of the ring after the other, of those that are not all behind them.
int64_t attention_calls(const ContextParallelConfig& context) {
  const int64_t places = context.ring_size();
  const int64_t met = context.cp_layout == "zigzag" ? places * places : places * (places + 1) / 2;
  return met * context.head_ranks();
}

void check_layout(const Layout& layout, DType dtype = DType::bf16) {
  CAPTURE(layout.name, name(dtype));
  emulator::Options options = emulator::options;
  options.compute_capability = layout.capability;
  const emulator::Use use(options);
  TrainConfig config = layout.latent ? latent_training() : wide_training();
  config.dtype = name(dtype);
  layout.change(config);
  const RandomText text(config, 1600);
  const Run gpu = run_ranks(config, text.dataset, layout.ranks, Device::cuda);
  const Run cpu = run_ranks(config, text.dataset, layout.ranks, Device::cpu);
  check_same(gpu.trained, cpu.trained, dtype);
  for (const Run* run : {&gpu, &cpu}) {
    CHECK(run->summing > 0);
    CHECK(differences(run->calls, fused_calls(config, run->summing, kSteps)) == "");
  }
  const auto [forward, decoding, backward, blockwise] = gpu.attention;
  const int64_t all = kSteps * config.grad_acc_steps * config.model.num_layers *
                      config.mesh().ranks() / config.mesh().cp / config.pipeline.pp_size *
                      attention_calls(config.context_parallel);
  const bool twice = config.recompute == "full" && !config.context_parallel.keeps_attention();
  const bool documents = config.context_parallel.document_mask;  // which skip keys of others
  if (dtype != DType::bf16) {                                    // which tensor cores do not take
    CHECK(forward + decoding + backward + blockwise == 0);
    return;
  }
  CHECK(blockwise + decoding == 0);
  CHECK(forward == (twice ? 2 : 1) * backward);
  CHECK(backward <= all);
  CHECK(backward > (documents ? all / config.context_parallel.ring_size() : all - 1));
}

TEST_CASE("in every layout ranks on a GPU with --kernels fused train as those on the CPU do") {
  for (const Layout& layout : kLayouts) check_layout(layout);
  for (const Layout& layout : kLayouts) {
    const bool always = layout.name == std::string_view("experts");
    if (always || is_full()) check_layout(layout, DType::f64);
  }
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
  struct Case {
    const char* recompute;
    int capability;
    bool latent = false;
    const Rung* rung = nullptr;
  };
  for (const auto& [recompute, capability, latent, rung] :
       {Case{"none", 90},
        {"full", 90},
        {"full", 80},
        {"none", 90, /*latent=*/true},
        {"none", 75, /*latent=*/false, &kNaive},
        {"full", 75, /*latent=*/false, &kFlash1},
        {"none", 75, /*latent=*/false, &kBlockwise},
        {"none", 90, /*latent=*/false, &kFlash4}}) {
    CAPTURE(recompute, capability, latent, rung == nullptr ? "" : rung->name);
    std::optional<Takes> takes;
    if (rung != nullptr) takes.emplace(*rung);
    emulator::Options options = emulator::options;
    options.compute_capability = capability;
    const emulator::Use use(options);
    TrainConfig config = latent ? latent_training() : wide_training();
    config.recompute = recompute;
    if (rung != nullptr) config.dtype = rung->dtype;
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
