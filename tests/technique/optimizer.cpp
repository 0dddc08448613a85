#include "optimizer.h"

#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

TEST_CASE("the learning rate warms up linearly and falls along half a cosine") {
  OptimizerConfig config;
  config.lr = 2;
  config.min_lr_ratio = 0.1;
  config.warmup_steps = 4;
  const auto lr = [&](int64_t step) { return learning_rate(config, step, /*steps=*/14); };
  REQUIRE(lr(0) == 0.5);
  REQUIRE(lr(1) == 1.0);
  REQUIRE(lr(3) == 2.0);
  REQUIRE(lr(4) == 2.0);
  const auto close = [](double actual, double expected) {
    return std::abs(actual - expected) <= 1e-15 * expected;
  };
  REQUIRE(close(lr(9), (2 + 0.2) / 2));  // half way
  REQUIRE(close(lr(6), 0.2 + 1.8 * (1 + std::cos(std::acos(-1) * 0.2)) / 2));
  REQUIRE(close(lr(14), 0.2));
  REQUIRE(close(lr(100), 0.2));
  for (int64_t step = 4; step < 14; ++step) REQUIRE(lr(step + 1) < lr(step));
  // Neither the warm-up nor what follows it need have an even number of steps.
  config.warmup_steps = 3;
  const auto odd = [&](int64_t step) { return learning_rate(config, step, /*steps=*/10); };
  REQUIRE(close(odd(0), 2.0 / 3));
  REQUIRE(close(odd(1), 4.0 / 3));
  REQUIRE(odd(2) == 2.0);
  REQUIRE(odd(3) == 2.0);
  REQUIRE(close(odd(5), 0.2 + 1.8 * (1 + std::cos(std::acos(-1) * 2 / 7)) / 2));
  REQUIRE(close(odd(10), 0.2));
}

TEST_CASE("without warm-up the learning rate begins at its peak") {
  OptimizerConfig config;
  config.lr = 3;
  config.warmup_steps = 0;
  REQUIRE(learning_rate(config, 0, 10) == 3);
}

TEST_CASE("a run shorter than its warm-up never reaches the peak learning rate") {
  OptimizerConfig config;
  config.lr = 3;
  config.warmup_steps = 8;
  for (int64_t step = 0; step < 5; ++step) {
    REQUIRE(learning_rate(config, step, /*steps=*/5) == 3 * double(step + 1) / 8);
  }
}

/// A model whose gradients the test sets, and its optimizer, which updates several parameters in
/// one call where it can.
struct Setup {
  explicit Setup(const OptimizerConfig& config, DType dtype = DType::f64)
      : model(allocated_model(tiny_model(), 4, dtype, Probabilities::never_whole, 1)),
        parameters(model.parameters()),
        optimizer(parameters, config) {
    Random random(3);
    for (size_t i = 0; i < parameters.size(); ++i) {
      ops::copy(parameters[i].grad, random.tensor(parameters[i].grad.shape()));
    }
    fuse(optimizer);
  }

  static void fuse(auto& optimizer) {
    if constexpr (requires { optimizer.fuse(); }) optimizer.fuse();
  }

  void step(int64_t step, double lr) { optimizer.step(step, lr, optimizer.grad_squares()); }

  Model model;
  ParameterList& parameters;
  Optimizer optimizer;
};

double norm_of(const Values& values) {
  double sum = 0;
  for (double value : values) sum += value * value;
  return std::sqrt(sum);
}

TEST_CASE("weights with two or more axes decay, the embedding included; norms do not") {
  const OnDevice cpu;
  OptimizerConfig config;
  config.weight_decay = 0.25;
  Setup setup(config);
  ops::fill(setup.parameters.flat_grads(), 0);
  const Tensor before = clone(setup.parameters.flat_masters());
  setup.step(0, /*lr=*/0.5);
  int64_t offset = 0;
  for (size_t i = 0; i < setup.parameters.size(); ++i) {
    const Parameter& parameter = setup.parameters[i];
    CAPTURE(parameter.name);
    const int64_t numel = parameter.shard.master.numel();
    const bool norm = parameter.name.find("norm") != std::string::npos;
    Values expected = before.narrow(0, offset, numel).items();
    for (double& value : expected) value *= norm ? 1 : 1 - 0.5 * 0.25;
    check_close(parameter.shard.master.view({numel}), expected, 1e-15);
    offset += numel;
  }
}

TEST_CASE("the optimizer clips by the norm over all parameters and reports it unclipped") {
  const OnDevice cpu;
  OptimizerConfig config;
  config.weight_decay = 0;
  config.adam_eps = 1;  // large, so that the size of a gradient matters
  config.grad_clip = 0.5;
  Setup clipped(config);
  const double norm = norm_of(clipped.parameters.flat_grads().items());
  config.grad_clip = 0;
  Setup scaled(config);
  Values gradients = scaled.parameters.flat_grads().items();
  for (double& value : gradients) value *= 0.5 / norm;
  Tensor(scaled.parameters.flat_grads()).assign(gradients);
  clipped.step(0, 0.1);
  scaled.step(0, 0.1);
  check_close(Values{clipped.optimizer.grad_norm().item()}, Values{norm}, 1e-14);
  check_close(Values{scaled.optimizer.grad_norm().item()}, Values{0.5}, 1e-14);
  check_close(clipped.parameters.flat_masters(), scaled.parameters.flat_masters(), 1e-13);
  check_close(Values{norm_of(clipped.optimizer.first_moments().items())},
              Values{(1 - config.adam_beta1) * 0.5}, 1e-12, "moments");
}

TEST_CASE("what a rank does not count is not in its squares, and is updated all the same") {
  const OnDevice cpu;
  Setup all((OptimizerConfig())), fewer((OptimizerConfig()));
  fewer.parameters[2].counted = false;
  const double without = std::pow(norm_of(all.parameters[2].grad.items()), 2);
  const double squares = all.optimizer.grad_squares().item();
  check_close(Values{fewer.optimizer.grad_squares().item()}, Values{squares - without}, 1e-12);
  all.step(0, 0.1);
  fewer.optimizer.step(0, 0.1, Tensor::from_host(Values{squares}, {1}, DType::f64));
  REQUIRE(same_bits(all.parameters.flat_values(), fewer.parameters.flat_values()));
  REQUIRE(fewer.parameters[2].version == 1);
}

TEST_CASE("all observers see each parameter as it is updated, in the order they were added") {
  const OnDevice cpu;
  Setup setup({});
  const Tensor before = clone(setup.parameters.flat_masters());
  std::vector<std::string> seen, expected;
  for (const char* name : {"a ", "b "}) {
    setup.optimizer.on_updated([&, name](const Parameter& parameter) {
      const Tensor& master = parameter.shard.master;
      REQUIRE(parameter.version == 1);
      REQUIRE(!same_bits(master, before.narrow(0, parameter.flat_begin, master.numel())));
      seen.push_back(name + parameter.name);
    });
  }
  setup.optimizer.step(0, 0.1, setup.optimizer.grad_squares());
  for (size_t i = 0; i < setup.parameters.size(); ++i) {
    expected.push_back("a " + setup.parameters[i].name);
    expected.push_back("b " + setup.parameters[i].name);
  }
  REQUIRE(seen == expected);
}

TEST_CASE("bf16 weights are the rounded masters after every step") {
  const OnDevice cpu;
  Setup setup(OptimizerConfig(), DType::bf16);
  const Tensor start = clone(setup.parameters.flat_masters());
  for (int64_t step = 0; step < 3; ++step) setup.step(step, 1e-4);
  const Tensor& masters = setup.parameters.flat_masters();
  REQUIRE(!same_bits(masters, start));
  REQUIRE(same_bits(setup.parameters.flat_values(),
                    Tensor::from_host(masters.items(), masters.shape(), DType::bf16)));
}

TEST_CASE("a gradient that is not finite changes neither weights nor moments") {
  const OnDevice cpu;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    CAPTURE(dtype);
    TrainConfig config = tiny_training();
    config.dtype = dtype;
    const RandomText text(config, 400);
    SoloTrainer disturbed(config, &text.dataset), calm(config, &text.dataset);
    disturbed.train_step(0);
    calm.train_step(0);

    ParameterList& parameters = disturbed.model().parameters();
    const Tensor value = parameters.find("model.layers.1.mlp.up_proj.weight").value;
    const Tensor weights = clone(parameters.flat_values()), kept = clone(value);
    ops::fill(value, kNaN);
    const Tensor poked = clone(parameters.flat_values()),
                 masters = clone(parameters.flat_masters());
    disturbed.train_step(1);
    REQUIRE(std::isnan(disturbed.report(1, 0).grad_norm));
    REQUIRE(std::isnan(disturbed.report(1, 0).loss));
    REQUIRE(same_bits(parameters.flat_values(), poked));
    REQUIRE(same_bits(parameters.flat_masters(), masters));

    // With the weight back, the next step is that of a trainer which never saw the NaN: so the
    // moments are its moments, too.
    ops::copy(value, kept);
    REQUIRE(same_bits(parameters.flat_values(), weights));
    disturbed.train_step(2);
    calm.train_step(2);
    REQUIRE(same_bits(parameters.flat_values(), calm.model().parameters().flat_values()));
    REQUIRE(same_bits(parameters.flat_masters(), calm.model().parameters().flat_masters()));
  }
}

}  // namespace
}  // namespace usp::test
