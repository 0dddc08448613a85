#include "technique/tiny_llama.h"

/// In what precision gradients are summed over micro-batches.
namespace usp::test {
namespace {

/// Gradients (main ones where there are two) of one step over many micro-batches.
Values gradients(const char* dtype, const char* accumulation, int64_t grad_acc_steps) {
  TrainConfig config = tiny_training();
  config.dtype = dtype;
  config.grad_accumulation = accumulation;
  config.grad_acc_steps = grad_acc_steps;
  config.micro_batch_size = 1;
  const RandomText text(config, 2000);
  SoloTrainer trainer(config, &text.dataset);
  randomize(trainer.model().parameters(), 1);
  trainer.train_step(0);
  return trainer.model().parameters().flat_grads().items();
}

TEST_CASE("gradients in bf16 lose bits with every addition, and sums in f32 do not") {
  const OnDevice cpu;
  const auto error = [](const char* accumulation, int64_t steps) {
    return relative_error(gradients("bf16", accumulation, steps), gradients("bf16", "f32", steps));
  };
  // A single micro-batch is rounded once either way, and twice where weights are used twice.
  REQUIRE(error("bf16", 1) <= 1.0 / 128);
  REQUIRE(error("both", 1) <= 1.0 / 128);
  REQUIRE(error("bf16", 1) > 0);
  const double rounded_sums = error("bf16", 64), exact_sums = error("both", 64);
  CAPTURE(rounded_sums, exact_sums);
  REQUIRE(exact_sums <= 1.0 / 256);
  REQUIRE(rounded_sums > 4 * exact_sums);
}

TEST_CASE("with both, layers write bf16 gradients and the sum is f32") {
  const OnDevice cpu;
  Model model = allocated_model(tiny_model(), 6, DType::bf16, Probabilities::never_whole, 1,
                                GradAccumulation::both);
  Grads grads(model.parameters());
  Random random(2);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const Pass pass = random_pass(random, tiny_model(), 2, 6, 0.1, loss);
  ops::fill(model.parameters().flat_grads(), kNaN);  // the first contribution overwrites
  grads.begin_window(3);
  std::vector<Values> parts(model.parameters().size());
  for (int64_t micro_step = 0; micro_step < 3; ++micro_step) {
    model.backward(model.forward(pass), grads, pass);
  }
  grads.end_window();
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& parameter = model.parameters()[i];
    CAPTURE(parameter.name);
    REQUIRE(parameter.grad.dtype() == DType::bf16);
    REQUIRE(parameter.main_grad.dtype() == DType::f32);
    Values expected = parameter.grad.items();
    for (double& value : expected) value *= 3;
    check_close(parameter.main_grad, expected, 1e-6);
    REQUIRE(parameter.shard.grad.address() == parameter.main_grad.address());
  }
}

TEST_CASE("a bf16 run learns whatever its gradients are summed in") {
  const OnDevice cpu;
  for (const char* accumulation : {"bf16", "f32", "both"}) {
    CAPTURE(accumulation);
    TrainConfig config = tiny_training();
    config.dtype = "bf16";
    config.grad_accumulation = accumulation;
    config.grad_acc_steps = 2;
    const RandomText text(config, 60);
    SoloTrainer trainer(config, &text.dataset);
    trainer.train_step(0);
    const double first = trainer.report(0, 0).loss;
    for (int64_t step = 1; step < 60; ++step) trainer.train_step(step);
    REQUIRE(trainer.report(59, 0).loss < 0.8 * first);
  }
}

}  // namespace
}  // namespace usp::test
