#include <map>

#include "technique/tiny_llama.h"

/// A training step's trace: which phase lies in which.
namespace usp::test {
namespace {

/// The spans that lie around `span`, outermost first: "train_step > forward > block 1 > mlp".
std::string path_of(const Tracer::Span& span, const std::vector<Tracer::Span>& spans) {
  std::vector<const Tracer::Span*> around;
  for (const Tracer::Span& other : spans) {
    const bool holds = other.begin_ns <= span.begin_ns && span.end_ns <= other.end_ns;
    if (&other != &span && other.category == "phase" && holds) around.push_back(&other);
  }
  std::ranges::sort(around, {}, &Tracer::Span::begin_ns);
  std::string path;
  for (const Tracer::Span* phase : around) {
    path += std::string(phase->name) + (phase->micro_batch < 0 ? "" : "'") +
            (phase->number < 0 ? "" : fmt::format(" {}", phase->number)) + " > ";
  }
  return path + std::string(span.name);
}

struct Traced {
  explicit Traced(const TrainConfig& config) {
    const RandomText text(config, 400);
    SoloTrainer trainer(config, &text.dataset);
    cpu.runtime.tracer().record(true);
    trainer.train_step(0);
    cpu.runtime.tracer().record(false);
  }
  const std::vector<Tracer::Span>& spans() { return cpu.runtime.tracer().spans(); }

  OnDevice cpu;
};

TEST_CASE("every op of a step lies in the segment of the block of the pass that it belongs to") {
  TrainConfig config = tiny_training();
  config.grad_acc_steps = 3;
  Traced traced(config);
  std::map<std::string, int> found;
  for (const Tracer::Span& span : traced.spans()) ++found[path_of(span, traced.spans())];
  const std::string step = "train_step > ", forward = step + "forward' > ",
                    backward = step + "backward' > ";
  REQUIRE(found[step + "take_batch"] == 3);
  REQUIRE(found[step + "forward"] == 3);
  REQUIRE(found[step + "backward"] == 3);
  REQUIRE(found[step + "optimizer"] == 1);
  REQUIRE(found[forward + "block 0 > embedding > embedding_forward"] == 3);
  REQUIRE(found[backward + "block 0 > embedding > embedding_backward"] == 3);
  for (const char* block : {"block 1 > ", "block 2 > "}) {
    REQUIRE(found[forward + block + "attention > attention_forward"] == 3);
    REQUIRE(found[forward + block + "attention > linear_forward"] == 2 * 3);
    REQUIRE(found[forward + block + "mlp > swiglu_forward"] == 3);
    REQUIRE(found[backward + block + "mlp > swiglu_backward"] == 3);
    REQUIRE(found[backward + block + "attention > attention_backward"] == 3);
  }
  REQUIRE(found[forward + "block 3 > head > cross_entropy_forward"] == 3);
  REQUIRE(found[backward + "block 3 > head > cross_entropy_backward"] == 3);
}

TEST_CASE(
    "the passes of a step name their micro-batch, and their operations add up to the step's") {
  TrainConfig config = tiny_training();
  config.grad_acc_steps = 3;
  Traced traced(config);
  std::map<std::string_view, std::vector<int64_t>> micro_batches;
  int64_t of_passes = 0, of_blocks = 0, of_step = 0;
  for (const Tracer::Span& span : traced.spans()) {
    if (span.micro_batch >= 0) {
      micro_batches[span.name].push_back(span.micro_batch);
      of_passes += span.flops;
    }
    if (span.name == "block") of_blocks += span.flops;
    if (span.name == "train_step") of_step = span.flops;
  }
  REQUIRE(micro_batches.size() == 2);
  REQUIRE(micro_batches["forward"] == std::vector<int64_t>{0, 1, 2});
  REQUIRE(micro_batches["backward"] == std::vector<int64_t>{0, 1, 2});
  REQUIRE(of_step > 0);
  REQUIRE(of_passes == of_step);
  REQUIRE(of_blocks == of_step);
}

TEST_CASE("blocks keep the numbers that they have in the whole model") {
  OnDevice meta(Device::meta);
  const Llama llama(tiny_model(), {7, DType::f64, Probabilities::never_whole});
  Model model([&](int64_t block, ParameterList& list) { return llama.build(block, list); },
              {{0, 1}, {2, 4}});
  model.parameters().allocate(DType::f64, 1);
  Random random(1);
  const Pass pass = random_pass(random, tiny_model(), 2, 7, 1, Tensor::zeros({1}, DType::f64));
  meta.runtime.tracer().record(true);
  Model::Activations activations;
  model.forward_chunk(1, Tensor::zeros({14, 12}, DType::f64), &activations, pass);
  Grads grads(model.parameters());
  grads.begin_window(1);
  model.backward_chunk(1, {}, std::move(activations), grads, pass);
  std::vector<int64_t> numbers;
  for (const Tracer::Span& span : meta.runtime.tracer().spans()) {
    if (span.name == "block") numbers.push_back(span.number);
  }
  REQUIRE(numbers == std::vector<int64_t>{2, 3, 3, 2});
}

}  // namespace
}  // namespace usp::test
