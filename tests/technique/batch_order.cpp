#include "technique/tiny_llama.h"

/// Which samples a step reads, and where: row `row` of a micro-batch is the global sample
/// step * global_batch_size + (micro_step * dp_size + dp_rank) * micro_batch_size + row.
namespace usp::test {
namespace {

constexpr int64_t kRows = 3, kMicroSteps = 2, kStep = 5;

TrainConfig order_config() {
  TrainConfig config = tiny_training();
  config.dtype = "f32";
  config.micro_batch_size = kRows;
  config.grad_acc_steps = kMicroSteps;
  return config;
}

/// The gradients of that step, written out: sums in this order, so the bits tell any other.
std::vector<char> documented_gradients(const TrainConfig& config, const Dataset& dataset,
                                       int64_t dp_size, int64_t dp_rank) {
  Model model =
      allocated_model(config.model, config.seq_len, DType::f32, Probabilities::never_whole, 1);
  randomize(model.parameters(), 1);
  Grads grads(model.parameters());
  grads.begin_window(kMicroSteps);
  const int64_t samples = dp_size * kMicroSteps * kRows;
  for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step) {
    std::vector<int32_t> tokens, targets, inputs(config.seq_len), next(config.seq_len);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t micro_batch = micro_step * dp_size + dp_rank;
      dataset.train_sample(kStep * samples + micro_batch * kRows + row, inputs, next);
      tokens.insert(tokens.end(), inputs.begin(), inputs.end());
      targets.insert(targets.end(), next.begin(), next.end());
    }
    Pass pass;
    pass.num_samples = kRows;
    pass.positions = Positions(0, config.seq_len);
    pass.tokens = Tensor::from_host(tokens, {std::ssize(tokens)});
    pass.targets = Tensor::from_host(targets, {std::ssize(targets)});
    pass.micro_batch = micro_step;
    pass.loss_scale = 1 / double(samples * config.seq_len);
    pass.loss = Tensor::zeros({1}, DType::f64);
    model.backward(model.forward(pass), grads, pass);
  }
  grads.end_window();
  return bits_of(model.parameters().flat_grads());
}

/// Fails the test unless a trainer whose gradients nobody adds to other ranks' leaves these.
void check_order(Trainer& trainer, const std::vector<char>& documented) {
  randomize(trainer.model().parameters(), 1);
  trainer.train_step(kStep);
  const bool same = bits_of(trainer.model().parameters().flat_grads()) == documented;
  INFO("bits of gradients: not the documented samples in the documented order");
  REQUIRE(same);
}

TEST_CASE("a step adds up the documented samples in the documented order, to the bit") {
  const OnDevice cpu;
  const TrainConfig config = order_config();
  for (DataOrder order : {DataOrder::sequential, DataOrder::shuffled}) {
    const RandomText text(config, 900, order);
    SoloTrainer trainer(config, &text.dataset);
    check_order(trainer, documented_gradients(config, text.dataset, 1, 0));
  }
}

#if __has_include("data_parallel/strategy.h")
TEST_CASE("a rank's micro-batches are the documented ones of the global batch, in their order") {
  const OnDevice cpu;
  TrainConfig config = order_config();
  const RandomText text(config, 900);
  for (int ranks : {2, 3}) {
    config.data_parallel.dp_size = ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      CAPTURE(ranks, rank);
      DryEngine engine(rank, ranks);  // which adds nothing to the rank's own gradients
      const Mesh mesh(Communicator::world(engine), config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      check_order(trainer, documented_gradients(config, text.dataset, ranks, rank));
    }
  }
}
#endif

}  // namespace
}  // namespace usp::test
