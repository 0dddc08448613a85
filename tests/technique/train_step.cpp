#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

TEST_CASE("gradients do not depend on how a batch is cut into micro-batches") {
  const OnDevice cpu;
  TrainConfig config = tiny_training();
  const RandomText text(config, 400);
  std::vector<std::pair<std::string, Values>> expected;
  double expected_loss = 0;
  for (int64_t grad_acc_steps : {1, 2, 3, 6}) {
    CAPTURE(grad_acc_steps);
    config.grad_acc_steps = grad_acc_steps;
    config.micro_batch_size = 6 / grad_acc_steps;
    SoloTrainer trainer(config, &text.dataset);
    randomize(trainer.model().parameters(), 1);
    trainer.train_step(0);
    const auto gradients = gradients_of(trainer.model().parameters());
    const double loss = trainer.report(0, 0).loss;
    if (expected.empty()) {
      expected = gradients;
      expected_loss = loss;
    }
    check_close(Values{loss}, Values{expected_loss}, 1e-13, "loss");
    for (size_t i = 0; i < expected.size(); ++i) {
      check_close(gradients[i].second, expected[i].second, 1e-12, expected[i].first);
    }
  }
}

TEST_CASE("each step trains on the samples after those of the step before") {
  const OnDevice cpu;
  TrainConfig config = tiny_training();
  config.grad_acc_steps = 3;
  config.optimizer.lr = 0;  // the weights stay, so that losses can be compared
  const RandomText text(config, 400, DataOrder::sequential);
  SoloTrainer trainer(config, &text.dataset);
  randomize(trainer.model().parameters(), 1);
  for (int64_t step : {0, 1, 5}) {
    trainer.train_step(step);
    std::vector<int32_t> tokens, targets(config.seq_len), inputs(config.seq_len), next;
    for (int64_t i = 0; i < 6; ++i) {
      text.dataset.train_sample(6 * step + i, inputs, targets);
      tokens.insert(tokens.end(), inputs.begin(), inputs.end());
      next.insert(next.end(), targets.begin(), targets.end());
    }
    Pass pass;
    pass.num_samples = 6;
    pass.positions = Positions(0, config.seq_len);
    pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
    pass.targets = Tensor::from_host(next, {std::ssize(next)});
    pass.loss_scale = 1 / double(6 * config.seq_len);
    pass.loss = Tensor::zeros({1}, DType::f64);
    trainer.model().evaluate(pass);
    check_close(Values{trainer.report(step, 0).loss}, Values{pass.loss.item()}, 1e-13);
  }
}

TEST_CASE("training on one short text learns it by heart") {
  const OnDevice cpu;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    CAPTURE(dtype);
    TrainConfig config = tiny_training();
    config.dtype = dtype;
    config.steps = 60;
    config.optimizer.lr = 0.02;
    const RandomText text(config, 12);  // 9 training tokens
    SoloTrainer trainer(config, &text.dataset);
    trainer.train_step(0);
    const double first = trainer.report(0, 0).loss;
    for (int64_t step = 1; step < config.steps; ++step) trainer.train_step(step);
    const StepMetrics last = trainer.report(config.steps - 1, 0);
    REQUIRE(first > 2);
    REQUIRE(last.loss < 0.5);
    REQUIRE(last.tokens == config.steps * config.tokens_per_step());
    REQUIRE(last.lr == learning_rate(config.optimizer, config.steps - 1, config.steps));
  }
}

TEST_CASE("two runs give the same bits in every dtype, in f64 on any number of threads") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    TrainConfig config = tiny_training();
    config.dtype = dtype;
    config.model.hidden_size = 48;
    config.model.ffn_hidden_size = 100;
    config.seq_len = 50;
    config.micro_batch_size = 4;
    const RandomText text(config, 1000);
    const auto weights_after_two_steps = [&](int count) {
      const Threads threads(count);
      const OnDevice cpu;
      SoloTrainer trainer(config, &text.dataset);
      trainer.train_step(0);
      trainer.train_step(1);
      return bits_of(trainer.model().parameters().flat_values());
    };
    const std::vector<char> once = weights_after_two_steps(2);
    const bool f64 = config.dtype == "f64";
    for (int threads : f64 ? std::vector<int>{1, 2, 4} : std::vector<int>{2}) {
      CAPTURE(dtype, threads);
      const bool equal = weights_after_two_steps(threads) == once;
      REQUIRE(equal);
    }
  }
}

TEST_CASE("validation is the mean over its samples, whatever the micro-batch size") {
  const OnDevice cpu;
  TrainConfig config = tiny_training();
  const RandomText text(config, 400);  // 100 validation tokens: 14 samples
  std::vector<double> losses;
  for (int64_t micro_batch_size : {1, 4, 14, 50}) {
    config.micro_batch_size = micro_batch_size;
    SoloTrainer trainer(config, &text.dataset);
    randomize(trainer.model().parameters(), 1);
    losses.push_back(trainer.evaluate());
    check_close(Values{losses.back()}, Values{losses[0]}, 1e-13);
  }
  config.eval_samples = 3;
  SoloTrainer few(config, &text.dataset);
  randomize(few.model().parameters(), 1);
  REQUIRE(few.evaluate() != losses[0]);
  config.eval_samples = 0;
  REQUIRE(std::isnan(SoloTrainer(config, &text.dataset).evaluate()));
}

TEST_CASE("validation is the mean of what there is where the split has fewer samples than asked") {
  const OnDevice cpu;
  TrainConfig config = tiny_training();
  const RandomText text(config, 400);
  const int64_t samples = text.dataset.val_samples();
  config.eval_samples = 3 * samples;
  SoloTrainer trainer(config, &text.dataset);
  randomize(trainer.model().parameters(), 1);
  // A sample at a time, without the trainer.
  double sum = 0;
  for (int64_t i = 0; i < samples; ++i) {
    std::vector<int32_t> inputs(config.seq_len), targets(config.seq_len);
    text.dataset.val_sample(i, inputs, targets);
    Pass pass;
    pass.num_samples = 1;
    pass.positions = Positions(0, config.seq_len);
    pass.tokens = Tensor::from_host(inputs, {config.seq_len});
    pass.targets = Tensor::from_host(targets, {config.seq_len});
    pass.loss_scale = 1 / double(config.seq_len);
    pass.loss = Tensor::zeros({1}, DType::f64);
    trainer.model().evaluate(pass);
    sum += pass.loss.item();
  }
  check_close(Values{trainer.evaluate()}, Values{sum / double(samples)}, 1e-13, "validation loss");
}

TEST_CASE("validation leaves training as it was") {
  const OnDevice cpu;
  const TrainConfig config = tiny_training();
  const RandomText text(config, 400);
  SoloTrainer with(config, &text.dataset), without(config, &text.dataset);
  for (int64_t step = 0; step < 3; ++step) {
    with.train_step(step);
    without.train_step(step);
    with.evaluate();
  }
  REQUIRE(same_bits(with.model().parameters().flat_values(),
                    without.model().parameters().flat_values()));
}

}  // namespace
}  // namespace usp::test
