#include "comm/launch.h"
#include "run/command_line.h"
#include "run/sample.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/zero_parity.h"
#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

const std::vector<int> kRanks = kSanitized ? std::vector<int>{4} : std::vector<int>{2, 3, 4, 8};

TEST_CASE("training with shared-out states is training on one rank, and sends what it should") {
  for (int ranks : kRanks) {
    if (is_carried("data_parallel/zero") && ranks != 4) continue;
    CAPTURE(ranks);
    run_threads(ranks, check_zero_parity, 600);
  }
}

TrainConfig zero_training(int64_t ranks, int64_t stage, const char* dtype = "f64") {
  TrainConfig config = tiny_training();
  config.dtype = dtype;
  config.data_parallel.dp_size = ranks;
  config.data_parallel.zero_stage = stage;
  return config;
}

/// The gradients of all parameters after a step, unclipped, as every rank of `world` can see them.
Values gradients_after_a_step(const Communicator& world, const TrainConfig& config,
                              const Dataset& dataset) {
  const Mesh mesh(world, {.dp = world.size()});
  Trainer trainer(config, {&dataset, mesh});
  trainer.train_step(0);
  Values all;
  const ParameterList& parameters = trainer.model().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Values values = whole(parameters[i], parameters[i].shard.grad.items(), &world);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

TEST_CASE("with one micro-batch every stage has the gradients of plain data parallelism, in bits") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    CAPTURE(dtype);
    const TrainConfig plain = zero_training(3, 0, dtype);
    const RandomText text(plain, 400);
    run_threads(3, [&](const Communicator& world) {
      const Values expected = gradients_after_a_step(world, plain, text.dataset);
      for (int64_t stage : {1, 2, 3}) {
        const TrainConfig config = zero_training(3, stage, dtype);
        USP_CHECK(gradients_after_a_step(world, config, text.dataset) == expected,
                  "stage {} in {}: other bits", stage, dtype);
      }
    });
  }
}

TEST_CASE("with one micro-batch stages 1 to 3 train alike in bits, clipping included") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    CAPTURE(dtype);
    TrainConfig config = zero_training(3, 1, dtype);
    config.optimizer.grad_clip = 0.1;  // below the norms that occur
    const RandomText text(config, 400);
    run_threads(3, [&](const Communicator& world) {
      const Mesh mesh(world, {.dp = world.size()});
      std::vector<TrainedState> states;
      for (int64_t stage : {1, 2, 3}) {
        TrainConfig staged = config;
        staged.data_parallel.zero_stage = stage;
        Trainer trainer(staged, {&text.dataset, mesh});
        states.push_back(train(trainer, 3, &world));
        USP_CHECK(states.back().grad_norms[0] > 0.1, "nothing is clipped");
        USP_CHECK(same_bits(states.back(), states[0]), "stage {} in {}: other bits", stage, dtype);
      }
    });
  }
}

TEST_CASE("f32 and bf16 train alike under every stage, and send their own bytes",
          "[not_sanitized]") {
  struct Case {
    const char *dtype, *grad_accumulation;
    double tolerance;  // of max|x|, after three updates
  };
  for (const Case& c : {Case{"f32", "f32", 1e-4},
                        {"bf16", "f32", 0.05},
                        {"bf16", "both", 0.05},
                        {"bf16", "bf16", 0.08}}) {
    CAPTURE(c.dtype, c.grad_accumulation);
    TrainConfig config = zero_training(4, 0, c.dtype);
    config.grad_acc_steps = 2;
    config.grad_accumulation = c.grad_accumulation;
    config.optimizer.adam_eps = 1e-3;  // else updates of tiny gradients are their rounding errors
    const RandomText text(config, 800);
    run_threads(4, [&](const Communicator& world) {
      TrainConfig mine = config;
      const Mesh mesh(world, {.dp = 4});
      Trainer plain(mine, {&text.dataset, mesh});
      const TrainedState expected = train(plain, 3, &world);
      for (int64_t shard_size : {4, 2}) {
        for (int64_t stage : {1, 2, 3}) {
          mine.data_parallel.zero_stage = stage;
          mine.data_parallel.shard_size = shard_size;
          for (const char* reduces : {"micro_batch", "step"}) {
            if (stage == 1 && reduces == std::string_view("step")) continue;
            mine.data_parallel.reduce_after = reduces;
            const std::string what =
                fmt::format("stage {} over {}, reduces after {}", stage, shard_size, reduces);
            Trainer trainer(mine, {&text.dataset, mesh});
            const ZeroTraffic before = sent_by_all(world);
            expect_close(train(trainer, 3, &world), expected, c.tolerance, what);
            check_zero_traffic(world, mine, before, 3, what);
          }
        }
      }
    });
  }
}

/// How many tensors with this name were alive at once, at most.
int64_t most_alive(const Allocator& allocator, std::string_view name) {
  int64_t count = 0, most = 0;
  for (const Allocator::Event& event : allocator.events()) {
    if (event.tag.name != name) continue;
    count += event.bytes > 0 ? 1 : -1;
    most = std::max(most, count);
  }
  return most;
}

struct MemoryCase {
  int64_t stage;
  const char *dtype, *grad_accumulation, *recompute;
  int64_t grad_acc_steps;
  bool tied;
  int64_t num_layers = 4;
  const char *reduce_after = "micro_batch", *reshard_after = "block";
};

TrainConfig config_of(const MemoryCase& c, int64_t ranks) {
  TrainConfig config = zero_training(ranks, c.stage, c.dtype);
  config.model.num_layers = c.num_layers;
  config.model.tie_word_embeddings = c.tied;
  config.data_parallel.shard_size = ranks == 4 ? 2 : 0;
  config.grad_accumulation = c.grad_accumulation;
  config.recompute = c.recompute;
  config.grad_acc_steps = c.grad_acc_steps;
  config.data_parallel.reduce_after = c.reduce_after;
  config.data_parallel.reshard_after = c.reshard_after;
  return config;
}

/// What two recorded steps on these ranks asked of rank 0's memory.
Simulation measure(const TrainConfig& config, const MemoryCase& c) {
  const RandomText text(config, 800);
  Simulation measured{};
  run_threads(static_cast<int>(config.data_parallel.dp_size), [&](const Communicator& world) {
    const Mesh mesh(world, {.dp = world.size()});
    Trainer trainer(config, {&text.dataset, mesh});
    Runtime& runtime = Runtime::current();
    runtime.allocator().record_events(true);
    runtime.tracer().record(true);
    for (int64_t step = 0; step < 2; ++step) trainer.train_step(step);
    if (world.rank() > 0) return;
    measured = make_simulation(2);
    const int64_t units = c.tied ? 3 : 2;  // the head's block reads the embedding's, too
    const bool stay = c.reshard_after != std::string_view("block");
    const bool add_up = c.reduce_after == std::string_view("step") && c.grad_acc_steps > 1;
    const auto count = [&](bool all) { return all ? c.num_layers + 2 : units; };
    const Allocator& allocator = runtime.allocator();
    USP_CHECK(most_alive(allocator, "gathered weights") == (c.stage == 3 ? count(stay) : 0),
              "units gathered at once");
    USP_CHECK(most_alive(allocator, "gradients to reduce") == (c.stage > 1 ? count(add_up) : 0),
              "units' gradients at once");
  });
  return measured;
}

const MemoryCase kMemoryCases[] = {{1, "f64", "f32", "none", 1, false},
                                   {1, "bf16", "both", "full", 3, true},
                                   {2, "bf16", "f32", "none", 3, false},
                                   {2, "bf16", "bf16", "full", 1, true},
                                   {3, "f64", "f32", "full", 3, true},
                                   {3, "bf16", "f32", "none", 1, false},
                                   {3, "bf16", "both", "full", 2, false},
                                   {2, "f32", "f32", "none", 1, true, 1},
                                   {3, "f32", "f32", "full", 2, true, 1},
                                   {0, "bf16", "both", "none", 2, false},
                                   {0, "f64", "f32", "full", 1, true},
                                   {2, "f64", "f32", "none", 3, false, 4, "step"},
                                   {2, "bf16", "both", "none", 3, true, 4, "step"},
                                   {2, "bf16", "both", "full", 1, false, 4, "step"},
                                   {3, "bf16", "bf16", "none", 2, false, 4, "step", "chunk"},
                                   {3, "bf16", "both", "full", 2, true, 4, "step", "step"},
                                   {3, "f32", "f32", "none", 3, true, 1, "micro_batch", "chunk"}};

TEST_CASE("every stage keeps what its formula says, and unshards two units at a time",
          "[not_sanitized]") {
  for (const MemoryCase& c : kMemoryCases) {
    for (int ranks : {2, 3, 4, 8}) {
      CAPTURE(c.stage, c.dtype, c.grad_accumulation, c.recompute, c.num_layers, ranks,
              c.reduce_after, c.reshard_after);
      const TrainConfig config = config_of(c, ranks);
      const StateBytes states = predict(config).states;
      const auto buffers = by_name(predict(config).buffers);
      const Simulation measured = measure(config, c), simulated = simulate<Trainer>(config);
      for (const Simulation& found : {measured, simulated}) {
        REQUIRE(found.states.weights == states.weights);
        REQUIRE(found.states.gradients == states.gradients);
        REQUIRE(found.states.optimizer == states.optimizer);
        REQUIRE(by_name(found.buffers) == buffers);
      }
      REQUIRE(simulated.peak_activations == measured.peak_activations);
      REQUIRE(simulated.reserved == measured.reserved);
    }
  }
}

/// Simulated memory, where units are far larger than the scratch of reductions.
TEST_CASE("reductions need 8 MiB of scratch whatever their size, in every stage") {
  for (int64_t stage : {0, 1, 2, 3}) {
    for (int64_t shard_size : {0, 4}) {
      for (const char* grad_sync : {"naive", "overlapped", "bucketed"}) {
        if (stage == 0 ? shard_size > 0 : grad_sync != std::string_view("naive")) continue;
        CAPTURE(stage, shard_size, grad_sync);
        TrainConfig config = zero_training(16, stage, "bf16");
        config.model.hidden_size = config.model.ffn_hidden_size = 2048;
        config.model.vocab_size = 20000;
        config.data_parallel.shard_size = shard_size;
        config.data_parallel.grad_sync = grad_sync;
        const Simulation simulated = simulate<Trainer>(config);
        const auto buffers = by_name(predict(config).buffers);
        REQUIRE(by_name(simulated.buffers) == buffers);
        const int64_t groups = shard_size == 0 ? 1 : 2;  // ranks of a copy, and of all copies
        // Where the pieces of 15 ranks do not divide it, a little is left over.
        REQUIRE(double(buffers.at("scratch of reductions")) > 0.98 * double(groups * (8 << 20)));
        REQUIRE(buffers.at("scratch of reductions") <= groups * (8 << 20));
      }
    }
  }
}

TEST_CASE("stage 3 gathers every block twice but the last one, embedding and head once") {
  for (const char* recompute : {"none", "full"}) {
    for (int64_t grad_acc_steps : {1, 3}) {
      run_threads(2, [&](const Communicator& world) {
        TrainConfig config = zero_training(2, 3);
        config.model.num_layers = 5;
        config.recompute = recompute;
        config.grad_acc_steps = grad_acc_steps;
        const RandomText text(config, 800);
        const Mesh mesh(world, {.dp = 2});
        Trainer trainer(config, {&text.dataset, mesh});
        for (int64_t step = 0; step < 2; ++step) {
          const auto calls = [] {
            return Runtime::current().ledger().get("dp", CommKind::all_gather).calls;
          };
          const int64_t before = calls();
          trainer.train_step(step);
          USP_CHECK(calls() - before == grad_acc_steps * (2 * 5 - 1 + 2), "{} gathers",
                    calls() - before);
          trainer.evaluate();  // leaves nothing behind that a step would reuse
        }
      });
    }
  }
}

TEST_CASE("what stays whole is gathered and reduced once a step, whatever the micro-batches") {
  for (const char* reshard_after : {"chunk", "step"}) {
    run_threads(2, [&](const Communicator& world) {
      TrainConfig config = zero_training(2, 3);
      config.grad_acc_steps = 3;
      config.data_parallel.reduce_after = "step";
      config.data_parallel.reshard_after = reshard_after;
      const RandomText text(config, 800);
      const Mesh mesh(world, {.dp = 2});
      Trainer trainer(config, {&text.dataset, mesh});
      Runtime& runtime = Runtime::current();
      for (int64_t step = 0; step < 2; ++step) {
        const auto calls = [&](CommKind kind) { return runtime.ledger().get("dp", kind).calls; };
        const int64_t gathers = calls(CommKind::all_gather);
        const int64_t reductions = calls(CommKind::reduce_scatter);
        trainer.train_step(step);
        const int64_t units = config.model.num_layers + 2;
        USP_CHECK(calls(CommKind::all_gather) - gathers == units, "{} gathers",
                  calls(CommKind::all_gather) - gathers);
        USP_CHECK(calls(CommKind::reduce_scatter) - reductions == units, "{} reductions",
                  calls(CommKind::reduce_scatter) - reductions);
        USP_CHECK(runtime.allocator().live_bytes(Category::communication) == 0,
                  "buffers outlive the step");
        trainer.evaluate();
      }
    });
  }
}

/// Both numbers of "12 bytes a step by rank 0, ...: 12".
std::pair<std::string, std::string> numbers_of_row(Trainer& trainer) {
  const ReportRows rows = trainer.report_rows();
  const std::string row = std::ranges::find_if(rows, [](const auto& any) {
                            return any.first.ends_with(" sent");
                          })->second;
  return {row.substr(0, row.find(' ')), row.substr(row.rfind(' ') + 1)};
}

void check_traffic_row(const Communicator& world, const TrainConfig& config, const Dataset& dataset,
                       const std::string& what) {
  constexpr int64_t kSteps = 4;
  const Mesh mesh(world, {.dp = world.size()});
  Trainer trainer(config, {&dataset, mesh});
  for (int64_t step = 0; step < kSteps; ++step) {
    trainer.train_step(step);
    if (step == 0) trainer.evaluate();
    if (step == 1) {
      SampleConfig sample;
      sample.sample_tokens = 3;
      sample_tokens(logits_of(trainer.model()), sample, config.seq_len, {1, 2}, 1,
                    [] { return false; });
    }
    ParameterList& parameters = trainer.model().parameters();
    for (size_t i = 0; i < parameters.size() && step == 2; ++i) ++parameters[i].version;  // loaded
  }
  // Before anybody waits for the last gathers; reading changes nothing.
  const auto numbers = numbers_of_row(trainer);
  const int64_t sent = kSteps * std::stoll(numbers.first);
  const int64_t predicted = kSteps * predict_traffic(config).total();
  USP_CHECK(static_cast<int64_t>(world.sum(double(sent))) == predicted, "{}: {} bytes of {}", what,
            sent, predicted);
  USP_CHECK(sent * world.size() == predicted, "{}: {} bytes by this rank, {} by all", what, sent,
            predicted);
  USP_CHECK(numbers.first == numbers.second, "{}: {} and {}", what, numbers.first, numbers.second);
  trainer.evaluate();
  USP_CHECK(numbers_of_row(trainer) == numbers, "{}: validation is counted", what);
}

TEST_CASE("the report's traffic is that of the steps, whatever validation and samples send",
          "[not_sanitized]") {
  TrainConfig config = zero_training(4, 0);
  config.eval_samples = 5;
  config.model.vocab_size = 64;  // sizes that four ranks divide: every one sends the same
  config.model.hidden_size = 16;
  config.model.ffn_hidden_size = 24;
  const RandomText text(config, 1600);
  for (int64_t stage : {0, 1, 2, 3}) {
    for (int64_t shard_size : {0, 2}) {
      for (const char* overlap : {"none", "optimizer", "forward"}) {
        for (int64_t grad_acc_steps : {1, 2}) {
          if (stage == 0 && shard_size > 0) continue;
          if (stage % 3 == 0 && overlap != std::string_view("none")) continue;
          const std::string what = fmt::format("stage {} shard_size {} {} x{}", stage, shard_size,
                                               overlap, grad_acc_steps);
          TrainConfig mine = config;
          mine.data_parallel.zero_stage = stage;
          mine.data_parallel.shard_size = shard_size;
          mine.data_parallel.gather_overlap = overlap;
          mine.grad_acc_steps = grad_acc_steps;
          mine.model.tie_word_embeddings = grad_acc_steps == 2;
          run_threads(4, [&](const Communicator& world) {
            check_traffic_row(world, mine, text.dataset, what);
          });
        }
      }
    }
  }
}

TEST_CASE("stage 1 waits for no gradient before the backward pass is over") {
  run_threads(2, [](const Communicator& world) {
    const TrainConfig config = zero_training(2, 1);
    const RandomText text(config, 400);
    const Mesh mesh(world, {.dp = 2});
    Trainer trainer(config, {&text.dataset, mesh});
    const Tracer& tracer = traced_steps(trainer);
    int64_t backward_ends = 0, reductions = 0, under_way = 0;
    for (const Tracer::Span& span : tracer.spans()) {
      if (span.name == "backward") backward_ends = span.end_ns;
    }
    for (const Tracer::Exchange& exchange : tracer.exchanges()) {
      if (exchange.kind != "reduce_scatter") continue;
      ++reductions;
      USP_CHECK(exchange.wait_begin_ns >= backward_ends, "waits under the backward pass");
      if (exchange.queued_ns < backward_ends) ++under_way;
    }
    USP_CHECK(reductions == 4 && under_way == 4, "{} reductions, {} under way", reductions,
              under_way);
  });
}

TEST_CASE("what a block computes and what the next one gathers go on at the same time") {
  run_threads(2, [](const Communicator& world) {
    TrainConfig config = zero_training(2, 3);
    config.model.num_layers = 4;
    const RandomText text(config, 400);
    const Mesh mesh(world, {.dp = 2});
    Trainer trainer(config, {&text.dataset, mesh});
    const Tracer& tracer = traced_steps(trainer);
    // A gather is under way while an attention segment runs if it was queued before that began and
    // nobody waited for it until that was over.
    int64_t hidden = 0, gathers = 0;
    for (const Tracer::Exchange& exchange : tracer.exchanges()) {
      if (exchange.kind != "all_gather") continue;
      ++gathers;
      for (const Tracer::Span& span : tracer.spans()) {
        if (span.name == "mlp" && hides(span, exchange)) {
          ++hidden;
          break;
        }
      }
    }
    // All nine but the embedding's, which a pass begins with, and the first block's, which has the
    // embedding to hide under.
    USP_CHECK(gathers == 9 && hidden == 7, "{} of {} gathers are prefetched", hidden, gathers);
  });
}

TEST_CASE("stages 1 and 2 gather after the update, under it, or under the next forward pass") {
  for (const char* overlap : {"none", "optimizer", "forward"}) {
    run_threads(2, [&](const Communicator& world) {
      TrainConfig config = zero_training(2, 1);
      config.data_parallel.gather_overlap = overlap;
      const RandomText text(config, 400);
      const Mesh mesh(world, {.dp = 2});
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer, 2);
      int64_t update_begins = 0, update_ends = 0, second_step = 0;
      for (const Tracer::Span& span : tracer.spans()) {
        if (span.name == "optimizer" && update_begins == 0) {
          update_begins = span.begin_ns, update_ends = span.end_ns;
        }
        if (span.name == "train_step") second_step = std::max(second_step, span.begin_ns);
      }
      int64_t gathers = 0, under_update = 0, before_forward = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.kind != "all_gather" || exchange.queued_ns > second_step) continue;
        ++gathers;
        if (exchange.queued_ns < update_ends) ++under_update;
        if (exchange.wait_end_ns <= second_step) ++before_forward;
      }
      const std::string way = overlap;
      USP_CHECK(gathers == 4, "{}: {} units", way, gathers);
      USP_CHECK(under_update == (way == "optimizer" ? 4 : 0), "{}: {} under the update", way,
                under_update);
      USP_CHECK(before_forward == (way == "forward" ? 0 : 4), "{}: {} over before the next step",
                way, before_forward);
    });
  }
}

TEST_CASE("validation and samples are the same under every stage, whatever the ranks' share") {
  TrainConfig config = zero_training(1, 0);
  config.eval_samples = 7;  // ranks get one pass, part of one, and nothing
  config.sample.sample_tokens = 5;
  const RandomText text(config, 800);
  config.micro_batch_size = 6;
  SampleConfig greedy = config.sample;
  greedy.temperature = 0;
  OnDevice cpu;
  SoloTrainer solo(config, &text.dataset);
  for (int64_t step = 0; step < 3; ++step) solo.train_step(step);
  const double expected = solo.evaluate();
  const auto sample = [&](Trainer& trainer) {
    return sample_tokens(logits_of(trainer.model()), greedy, config.seq_len, {1, 2}, 1,
                         [] { return false; });
  };
  const std::vector<int32_t> expected_sample = sample(solo);
  for (int64_t stage : {1, 2, 3}) {
    run_threads(3, [&](const Communicator& world) {
      TrainConfig mine = zero_training(3, stage);
      mine.eval_samples = 7;
      const Mesh mesh(world, {.dp = 3});
      Trainer trainer(mine, {&text.dataset, mesh});
      for (int64_t step = 0; step < 3; ++step) {
        trainer.train_step(step);
        if (step == 1) trainer.evaluate();  // leaves no weights behind
      }
      expect_close({trainer.evaluate()}, {expected}, 1e-12, "validation");
      USP_CHECK(sample(trainer) == expected_sample, "stage {}: another sample", stage);
    });
  }
}

TEST_CASE("weights that nobody has gathered are not there to be read") {
  run_threads(2, [](const Communicator& world) {
    const TrainConfig config = zero_training(2, 3);
    const RandomText text(config, 400);
    const Mesh mesh(world, {.dp = 2});
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    const ParameterList& parameters = trainer.model().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      USP_CHECK(!parameters[i].value.defined() && !parameters[i].grad.defined(), "{} is whole",
                parameters[i].name);
    }
    USP_CHECK(Runtime::current().allocator().live_bytes(Category::communication) == 0,
              "buffers outlive the step");
  });
}

TEST_CASE("one layer, or ranks with nothing to update, train like one rank") {
  TrainConfig config = tiny_training();
  config.model.num_layers = 1;
  config.model.vocab_size = 3;
  config.model.hidden_size = config.model.ffn_hidden_size = 2;
  config.model.num_heads = 1;
  config.micro_batch_size = 12;
  const RandomText text(config, 800);
  OnDevice cpu;
  SoloTrainer solo(config, &text.dataset);
  const TrainedState expected = train(solo, 3);
  for (int64_t stage : {1, 2, 3}) {
    run_threads(12, [&](const Communicator& world) {  // 6 elements in the embedding
      TrainConfig mine = config;
      mine.micro_batch_size = 1;
      mine.data_parallel.dp_size = 12;
      mine.data_parallel.zero_stage = stage;
      const Mesh mesh(world, {.dp = 12});
      Trainer trainer(mine, {&text.dataset, mesh});
      expect_close(train(trainer, 3, &world), expected, 1e-10, fmt::format("stage {}", stage));
    });
  }
}

TEST_CASE("a gradient that is not finite on one rank's shard leaves every shard as it is") {
  for (int64_t stage : {1, 2, 3}) {
    run_threads(2, [&](const Communicator& world) {
      TrainConfig config = zero_training(2, stage, "f32");
      config.data_parallel.gather_overlap = "none";  // no shard is on its way when it is written to
      const RandomText text(config, 400);
      const Mesh mesh(world, {.dp = 2});
      Trainer trainer(config, {&text.dataset, mesh});
      trainer.train_step(0);
      ParameterList& parameters = trainer.model().parameters();
      Parameter& head = parameters[parameters.size() - 1];  // its end belongs to the last rank
      USP_CHECK((head.shard.end == head.local_shape().numel()) == (world.rank() == 1), "shards");
      const auto state = [&] {
        Values all;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const Values values = parameters[i].shard.master.items();
          all.insert(all.end(), values.begin(), values.end());
        }
        return all;
      };
      if (world.rank() == 1) head.shard.value.narrow(0, 0, 1).assign(std::vector<double>{kInf});
      ++head.version;
      const Values before = state();
      trainer.train_step(1);
      const StepMetrics metrics = trainer.report(1, 0);
      USP_CHECK(!std::isfinite(metrics.grad_norm), "norm {}", metrics.grad_norm);
      const Values after = state();
      for (size_t i = 0; i < before.size(); ++i) {
        USP_CHECK(before[i] == after[i], "stage {}: rank {} has updated", stage, world.rank());
      }
    });
  }
}

/// What the command line of these flags is refused with; "" if it is not.
std::string refusal(std::vector<std::string> flags) {
  flags.insert(flags.begin(), "test");
  TrainConfig config;
  Args args("test");
  try {
    read_command_line(config, args, flags, /*ranks=*/0);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("flags of ZeRO are refused with what would do") {
  REQUIRE(refusal({"--dp_size", "6", "--zero_stage", "3", "--shard_size", "3"}).empty());
  REQUIRE(refusal({"--zero_stage", "4"}).find("zero_stage=4") != std::string::npos);
  REQUIRE(refusal({"--dp_size", "6", "--zero_stage", "1", "--shard_size", "4"}) ==
          "shard_size=4 must divide dp_size=6; try 1, 2, 3 or 6");
  for (const char* flag : {"shard_size", "gather_overlap"}) {
    const char* value = flag == std::string_view("shard_size") ? "1" : "none";
    const std::string text = refusal({fmt::format("--{}", flag), value});
    REQUIRE(text.find(fmt::format("{} is for zero_stage 1 to", flag)) == 0);
  }
  REQUIRE(!refusal({"--zero_stage", "3", "--gather_overlap", "none"}).empty());
  REQUIRE(refusal({"--zero_stage", "2", "--gather_overlap", "none"}).empty());
  REQUIRE(refusal({"--zero_stage", "2", "--reduce_after", "step"}).empty());
  REQUIRE(
      refusal({"--zero_stage", "3", "--reduce_after", "step", "--reshard_after", "chunk"}).empty());
  REQUIRE(refusal({"--zero_stage", "1", "--reduce_after", "step"}) ==
          "reduce_after is for zero_stage 2 to 3, not 1; leave it out");
  REQUIRE(refusal({"--zero_stage", "2", "--reshard_after", "step"}) ==
          "reshard_after is for zero_stage 3, not 2; leave it out");
  REQUIRE(!refusal({"--zero_stage", "2", "--reduce_after", "window"}).empty());
  REQUIRE(refusal({"--zero_stage", "1", "--bucket_mb", "3"}) ==
          "bucket_mb is for zero_stage 0, not 1; leave it out");
  REQUIRE(refusal({"--zero_stage", "1", "--grad_sync", "naive"}) ==
          "grad_sync is for zero_stage 0, not 1; leave it out");
}

}  // namespace
}  // namespace usp::test
