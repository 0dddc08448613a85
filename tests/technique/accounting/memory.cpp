#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

/// Addresses that requests of many sizes get now: a picture of the freed blocks.
std::vector<void*> probe() {
  std::vector<void*> addresses;
  std::vector<Tensor> alive;
  for (int64_t bytes = 256; bytes < 1 << 20; bytes += bytes / 8) {
    alive.push_back(Tensor::empty({bytes / 4}, DType::f32));
    addresses.push_back(alive.back().address());
  }
  return addresses;
}

TEST_CASE("from the third step on, no memory is asked of the system and pointers repeat") {
  for (const char* attention : {"naive", "blockwise"}) {
    for (const char* dtype : {"f64", "f32", "bf16"}) {
      CAPTURE(attention, dtype);
      OnDevice cpu;
      TrainConfig config = tiny_training();
      config.attention = attention;
      config.dtype = dtype;
      config.seq_len = 40;
      config.grad_acc_steps = 2;
      const RandomText text(config, 400);
      SoloTrainer trainer(config, &text.dataset);
      trainer.train_step(0);
      trainer.train_step(1);
      probe();
      Allocator& allocator = cpu.allocator();
      const int64_t asked = allocator.system_allocations(), live = allocator.live_bytes();
      const std::vector<void*> addresses = probe();
      allocator.reset_peaks();
      trainer.train_step(2);
      const int64_t peak = allocator.peak_bytes();
      for (int64_t step = 3; step < 6; ++step) {
        allocator.reset_peaks();
        trainer.train_step(step);
        REQUIRE(allocator.system_allocations() == asked);
        REQUIRE(allocator.live_bytes() == live);
        REQUIRE(allocator.peak_bytes() == peak);
        REQUIRE(probe() == addresses);
      }
    }
  }
}

TEST_CASE("a layer's gradient may be computed into memory that stays where it is") {
  OnDevice cpu;
  const TrainConfig config = tiny_training();
  const RandomText text(config, 400);
  SoloTrainer trainer(config, &text.dataset);
  const auto addresses = [&] {
    std::vector<void*> result;
    ParameterList& parameters = trainer.model().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      result.push_back(parameters[i].value.address());
      result.push_back(parameters[i].grad.address());
    }
    return result;
  };
  const std::vector<void*> before = addresses();
  for (int64_t step = 0; step < 3; ++step) trainer.train_step(step);
  REQUIRE(addresses() == before);
}

TEST_CASE("inside a step nothing may be read back from the device") {
  OnDevice cpu;
  const TrainConfig config = tiny_training();
  Model model =
      allocated_model(config.model, config.seq_len, DType::f32, Probabilities::never_whole, 1);
  Grads grads(model.parameters());
  Optimizer optimizer(model.parameters(), config.optimizer);
  Random random(1);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const Pass pass = random_pass(random, config.model, 2, config.seq_len, 0.1, loss);
  {
    const NoHostReads step;
    grads.begin_window(1);
    model.backward(model.forward(pass), grads, pass);
    grads.end_window();
    optimizer.step(0, 1e-3, optimizer.grad_squares());
    REQUIRE_THROWS_AS(optimizer.grad_norm().item(), Error);
  }
  REQUIRE(optimizer.grad_norm().item() > 0);
}

}  // namespace
}  // namespace usp::test
