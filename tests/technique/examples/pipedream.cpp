#include "examples/pipedream.h"

#include "technique/examples/pipedream_parity.h"
#include "technique/tiny_llama.h"
#include "work_clock.h"

namespace usp::test {
namespace {

PipelineCase stale_case(int64_t p, int64_t m, int64_t dp = 1) {
  PipelineCase c{{1, dp, 2, "off", false, 0, "none", "blockwise", "weight_grad", m}};
  c.pp = p;
  return c;
}

TrainConfig stale_config(const PipelineCase& c) {
  TrainConfig config = pipeline_config(c);
  config.optimizer.grad_clip = 0;
  return config;
}

/// Trains the case over its ranks and compares every step with the serial program.
void check_against_serial(const TrainConfig& config, int64_t ranks, const Text& text,
                          const std::string& what) {
  std::vector<double> losses;
  TrainedState expected;
  {
    const OnDevice cpu;
    SerialPipeDream serial(config, text.dataset);
    for (int64_t step = 0; step < kStashSteps; ++step) losses.push_back(serial.step(step));
    expected = serial.state();
  }
  run_threads(static_cast<int>(ranks), [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    PipeDream trainer(config, {&text.dataset, mesh});
    for (int64_t step = 0; step < kStashSteps; ++step) {
      trainer.train_step(step);
      expect_close({trainer.report(step, 0).loss}, {losses[step]}, 1e-10, what + ": loss");
    }
    expect_same_parameters(trainer, expected, 1e-10, what);
  });
}

TEST_CASE("PipeDream is training one by one with the weights that its stages have by then") {
  const Text text;
  for (int64_t p : {2, 3, 4}) {
    for (int64_t m : {1, 2, 4, 9}) {
      for (int64_t dp : {1, 2}) {
        const PipelineCase c = stale_case(p, m, dp);
        CAPTURE(c.name());
        check_against_serial(stale_config(c), c.ranks(), text, c.name());
      }
    }
  }
}

TEST_CASE("PipeDream keeps its versions under recomputation, shards of layers and of samples",
          "[not_sanitized]") {
  const Text text;
  for (const char* recompute : {"none", "selective", "full"}) {
    for (int64_t tp : {1, 2}) {
      for (int64_t cp : {1, 2}) {
        PipelineCase c = stale_case(2, 4);
        c.recompute = recompute;
        c.tp = tp;
        c.cp = cp;
        c.num_kv_heads = 1;  // of which both ranks of tp have a copy
        c.sequence = tp == 2 ? "again" : "off";
        CAPTURE(c.name());
        check_against_serial(stale_config(c), c.ranks(), text, c.name());
      }
    }
  }
}

/// Training with updates of one micro-batch, without a schedule.
TrainedState one_by_one(TrainConfig config, const Text& text, int64_t updates) {
  const OnDevice cpu;
  config.pipeline = {};
  config.grad_acc_steps = 1;
  SoloTrainer solo(config, &text.dataset);
  return train(solo, updates);
}

TEST_CASE("without a version in between, PipeDream is training with batches of a micro-batch") {
  const Text text;
  for (const auto& [p, m] : {std::pair<int64_t, int64_t>{1, 1}, {1, 4}, {1, 9}, {2, 1}, {4, 1}}) {
    TrainConfig config = stale_config(stale_case(p, m));
    config.optimizer.min_lr_ratio = 1;  // one rate, however many updates a step has
    CAPTURE(p, m);
    const TrainedState expected = one_by_one(config, text, kStashSteps * m);
    run_threads(static_cast<int>(p), [&, m = m](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      PipeDream trainer(config, {&text.dataset, mesh});
      for (int64_t step = 0; step < kStashSteps; ++step) {
        trainer.train_step(step);
        const StepMetrics metrics = trainer.report(step, 0);
        double mean = 0;
        for (int64_t i = 0; i < m; ++i) mean += expected.losses[step * m + i] / double(m);
        expect_close({metrics.loss}, {mean}, 1e-10, "loss");
        expect_close({metrics.grad_norm}, {expected.grad_norms[step * m + m - 1]}, 1e-10,
                     "norm of the last micro-batch's gradient");
      }
      expect_same_parameters(trainer, expected, 1e-10, fmt::format("p {} m {}", world.size(), m));
    });
  }
}

TEST_CASE("the plain PipeDream of one rank differs where there are versions in between") {
  const Text text;
  const TrainConfig config = stale_config(stale_case(2, 4));
  const OnDevice cpu;
  SerialPipeDream serial(config, text.dataset);
  const double first = serial.step(0);
  TrainConfig other = config;
  other.pipeline.pp_size = 1;
  SerialPipeDream fresh(other, text.dataset);
  CHECK(std::abs(first - fresh.step(0)) > 1e-6);
}

TEST_CASE("a rank keeps the versions that the formula says, and as many micro-batches as in 1F1B",
          "[no_races]") {
  for (int64_t p : {1, 2, 3, 4}) {
    for (int64_t m : {1, 2, 3, 4, 5, 9}) {
      for (const char* dtype : {"f64", "bf16"}) {
        TrainConfig config = stale_config(stale_case(p, m));
        config.dtype = dtype;
        for (int rank = 0; rank < p; ++rank) {
          CAPTURE(p, m, dtype, rank);
          const Simulation plain = simulate<Trainer>(config, rank);
          const Simulation stale = simulate<PipeDream>(config, rank);
          const int64_t most = WeightStash::most(p, rank, m);
          const int64_t stash = most * plain.states.weights;
          CHECK(stale.states.weights == plain.states.weights + stash);
          CHECK(stale.peak == plain.peak + stash);
          CHECK(stale.peak_activations == plain.peak_activations);
          CHECK(stale.peak_activations == predict(config, rank).peak_activations);
          CHECK(most <= p - rank - 1);
          if (m >= 2 * p) CHECK(most == p - rank - 1);
          CHECK(predict_pipedream(config, rank).states.weights == stale.states.weights);
        }
      }
    }
  }
}

TEST_CASE("PipeDream's updates are work: a rank idles while it waits, and only then") {
  const Text text;
  for (int64_t p : {2, 3, 4}) {
    for (int64_t m : {1, 4}) {
      const PipelineCase c = stale_case(p, m);
      const TrainConfig config = stale_config(c);
      CAPTURE(c.name());
      run_threads(static_cast<int>(p), [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        PipeDream trainer(config, {&text.dataset, mesh});
        const WorkClock clock(
            {"forward", "backward", "stash", "update", "grad_squares", "optimizer"});
        trainer.train_step(0);
        const PipeDreamWork& work = trainer.measured();
        const double worked = work.forward + work.backward + work.update;
        expect_close({1e9 * worked, 1e9 * work.span, work.idle()},
                     {double(clock.worked()), double(clock.span()), clock.idle()}, 1e-12,
                     fmt::format("{}, rank {}: work, span, idle", c.name(), world.rank()));
        USP_CHECK(work.idle() > 0 && work.update > 0, "idle {}, update {} s", work.idle(),
                  work.update);
        if (world.rank() > 0) return;
        const double each = 1e3 / double(m);
        const std::string row = trainer.report_rows().back().second;
        const std::string expected = fmt::format(
            "forward {:.3g}, backward {:.3g}, update {:.3g} ms; rank 0 idles {:.0f} % of its step",
            each * work.forward, each * work.backward, each * work.update, 100 * clock.idle());
        USP_CHECK(row == expected, "{}", row);
      });
    }
  }
}

TEST_CASE("what PipeDream cannot do is refused with what can") {
  const auto refuses = [](const std::function<void(TrainConfig&)>& change,
                          const std::vector<std::string>& parts) {
    TrainConfig config = stale_config(stale_case(2, 4));
    check_updates_of_a_stage(config);  // as it is, it trains
    change(config);
    check_throws<UsageError>([&] { check_updates_of_a_stage(config); }, parts);
  };
  refuses([](TrainConfig& c) { c.optimizer.grad_clip = 0.5; }, {"grad_clip=0.5", "--grad_clip 0"});
  refuses([](TrainConfig& c) { c.pipeline.overlap_dispatch = true; },
          {"overlap_dispatch", "leave out --overlap_dispatch"});
  refuses([](TrainConfig& c) { c.data_parallel.zero_stage = 1; },
          {"zero_stage=1", "--zero_stage 0"});
  refuses([](TrainConfig& c) { c.model.tie_word_embeddings = true; },
          {"tie_word_embeddings", "--pp_size 1"});
  refuses(
      [](TrainConfig& c) {
        c.tensor_parallel.tp_size = 2;
        c.tensor_parallel.tp_overlap = "batch_halves";
      },
      {"tp_overlap=batch_halves", "--tp_overlap chunks"});
  refuses([](TrainConfig& c) { c.pipeline.pp_schedule = "zb_h1"; },
          {"pp_schedule=zb_h1", "--pp_schedule 1f1b"});
  TrainConfig config = stale_config(stale_case(1, 4));
  config.model.tie_word_embeddings = true;  // on one stage
  check_updates_of_a_stage(config);
}

}  // namespace
}  // namespace usp::test
