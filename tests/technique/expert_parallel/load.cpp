#include "expert_parallel/load.h"

#include "technique/expert_parallel/expert_parity.h"
#include "train/checkpoint.h"

namespace usp::test {
namespace {

/// Eight samples a step, split in other ways.
struct Share {
  int64_t dp, ep, grad_acc_steps, pp, tp;
};

constexpr Share kShares[] = {{1, 1, 1, 1, 1}, {1, 1, 2, 1, 1}, {1, 1, 4, 1, 1}, {2, 2, 2, 1, 1},
                             {2, 1, 4, 1, 1}, {4, 4, 1, 1, 1}, {1, 1, 4, 2, 1}, {2, 4, 2, 1, 2}};

TEST_CASE("losses and biases of the balance are the global batch's, however it is cut") {
  const RandomTokens tokens(parity_config().model.vocab_size);
  const TokenFile file(tokens.path(), 2, 61);
  const Dataset dataset(file, 8, 0.1, DataOrder::shuffled, 0);
  for (const char* balance : {"none", "sample", "batch", "bias"}) {
    if (kSanitized && std::string_view(balance) != "bias") continue;
    for (const Share& share : kShares) {
      ExpertCase c = plain_experts(share.dp, share.ep);
      c.experts = 8;
      c.balance = balance;
      c.z_loss = 0.01;
      c.capacity = 1;
      c.tp = share.tp;
      if (c.tp > 1) c.sequence = "again";
      c.pp = share.pp;
      c.grad_acc_steps = share.grad_acc_steps;
      c.micro_batch_size = 8 / share.dp / share.grad_acc_steps;
      CAPTURE(c.name());
      const ExpertResult expected = expert_reference(c, dataset);
      REQUIRE(expected.loads[0].at(0).dropped > 0);
      REQUIRE((expected.buffers.empty()) == (*balance == 'n' || *balance == 's'));
      run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
        check_expert_parity(world, c, dataset, expected);
      });
    }
  }
}

TEST_CASE("a bias moves by the rate towards the mean, after the step that showed the load") {
  const OnDevice cpu;
  ExpertLoad load({.balance = "bias", .bias_update_rate = 0.5});
  const LayerLoad& second = load.add_layer(4);
  const LayerLoad& first = load.add_layer(2);
  load.allocate(4, DType::f32);
  const auto count = [](Tensor numbers, const Values& values) { numbers.assign(values); };
  load.begin_step();
  count(second.counts, {1, 2, 3, 10});  // the mean is 4
  count(second.dropped, {3});
  count(first.counts, {4, 4, 4, 4});
  REQUIRE(second.bias.items() == Values(4));
  load.end_step();
  REQUIRE(second.bias.items() == Values{0.5, 0.5, 0.5, -0.5});
  REQUIRE(first.bias.items() == Values(4));
  const std::vector<SeenLoad> seen = load.seen(8);
  REQUIRE((seen.size() == 2 && seen[0].layer == 2 && seen[1].layer == 4));
  REQUIRE(seen[1].counts == Values{1, 2, 3, 10});
  REQUIRE(seen[1].dropped == 3);
  REQUIRE(seen[1].max_over_mean() == 2.5);
  REQUIRE(seen[0].max_over_mean() == 1);
  load.begin_step();
  REQUIRE(second.before.items() == Values{1, 2, 3, 10});
  REQUIRE(second.counts.items() == Values(4));
  count(second.counts, {8, 4, 0, 4});
  load.end_step();
  REQUIRE(second.bias.items() == Values{0, 0.5, 1, -0.5});
  std::vector<std::string> names;
  for (const Parameter* buffer : load.buffers()) names.push_back(buffer->name);
  REQUIRE(names == std::vector<std::string>{"model.layers.2.mlp.gate.e_score_correction_bias",
                                            "model.layers.4.mlp.gate.e_score_correction_bias"});
}

/// Two steps on this rank, an interruption if `stopped` names a directory for it, and two more.
std::vector<double> train_with_break(const Communicator& world, const ExpertCase& c,
                                     const Dataset& dataset, const std::string& stopped) {
  const TrainConfig config = expert_config(c);
  const RunIdentity identity{"{}", config.global_batch_size(), "c0ffee", {}};
  std::vector<double> results;
  const auto train = [&](Trainer& trainer, int64_t begin) {
    for (int64_t step = begin; step < begin + 2; ++step) {
      trainer.train_step(step);
      const StepMetrics metrics = trainer.report(step, 0);
      results.insert(results.end(), {metrics.loss, metrics.grad_norm});
    }
  };
  const Mesh mesh(world, config.mesh());
  Trainer first(config, {&dataset, mesh});
  train(first, 0);
  if (stopped.empty()) {
    train(first, 2);
    return results;
  }
  write_checkpoint(stopped, 2, first.state(), identity, world);
  world.barrier();
  const Mesh again(world, config.mesh());
  Trainer second(config, {&dataset, again});
  load_checkpoint(newest_checkpoint(stopped), second.state(), identity, world);
  train(second, 2);
  return results;
}

TEST_CASE("a resumed run has the biases and the loads of one that was never interrupted") {
  const RandomTokens tokens(parity_config().model.vocab_size);
  const TokenFile file(tokens.path(), 2, 61);
  const Dataset dataset(file, 8, 0.1, DataOrder::shuffled, 0);
  for (const char* balance : {"batch", "bias"}) {
    for (const Share& share : {Share{1, 1, 2, 1, 1}, Share{2, 2, 2, 1, 1}, Share{1, 1, 4, 2, 1}}) {
      ExpertCase c = plain_experts(share.dp, share.ep);
      c.experts = 8;
      c.balance = balance;
      c.pp = share.pp;
      c.schedule = share.pp > 1 ? "dualpipe" : "1f1b";
      c.grad_acc_steps = share.grad_acc_steps;
      CAPTURE(c.name());
      const TempDir dir;
      run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
        const auto whole = train_with_break(world, c, dataset, "");
        const auto resumed = train_with_break(world, c, dataset, dir.file(""));
        USP_CHECK(resumed == whole, "{}: {} instead of {}", c.name(), fmt::join(resumed, " "),
                  fmt::join(whole, " "));
      });
    }
  }
}

}  // namespace
}  // namespace usp::test
