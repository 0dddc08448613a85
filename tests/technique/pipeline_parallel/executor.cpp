#include "pipeline_parallel/executor.h"

#include <mutex>

#include "technique/pipeline_parallel/pipeline_parity.h"
#include "technique/pipeline_parallel/random_schedule.h"
#include "technique/tiny_llama.h"
#include "work_clock.h"

namespace usp::test {
namespace {

constexpr int64_t kPipelineSteps = 2;

const bool kPipelineIsCarried = is_carried("pipeline_parallel/executor");

bool full() { return is_full() && !kSanitized; }

/// Nothing but the pipeline.
PipelineCase plain_case(int64_t ranks, const char* schedule, int64_t micro_batches) {
  PipelineCase c{{1, 1, 2, "off", false, 0, "none", "blockwise", "weight_grad", micro_batches}};
  c.pp = ranks;
  c.schedule = schedule;
  return c;
}

void check_parity(const PipelineCase& c, const Text& text, PipelineReferences& references) {
  CAPTURE(c.name());
  const PipelineResult& expected = references.of(c);
  run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
    check_pipeline_parity(world, c, text.dataset, expected);
  });
}

TEST_CASE("training over stages is training on one rank, in every order of work") {
  const Text text;
  PipelineReferences references(text.dataset, kPipelineSteps);
  const std::vector<PipelineCase> cases =
      full_cases(pipeline_cases, full() && !kPipelineIsCarried ? 400 : 0);
  const size_t step = kPipelineIsCarried && !kSanitized && !full() ? 3 : 1;
  for (size_t i = 0; i < cases.size(); i += step) check_parity(cases[i], text, references);
}

TEST_CASE("what a stage receives belongs to the micro-batch that it was sent for") {
  // All that is waited for has been sent before: whichever is taken for which, nobody hangs.
  const Text text;
  PipelineReferences references(text.dataset, kPipelineSteps);
  check_parity(plain_case(2, "afab", 3), text, references);
}

#if __has_include("proof/drawn_pipeline.h")
TEST_CASE("whatever order the check accepts ends, with the gradients of one rank") {
  const Text text;
  PipelineReferences references(text.dataset, 1);
  Random random(12);
  const TempDir folder;
  const int count = full() ? 200 : kPipelineIsCarried ? 5 : 20;
  for (int i = 0; i < count; ++i) {
    const int64_t p = random.integer(2, 4);
    Schedule schedule = random_schedule(random, p, random.integer(1, 6), 2);
    if (i % 3 == 0) schedule = in_turns(std::move(schedule), {});
    PipelineCase c = plain_case(p, "", schedule.micro_batches);
    c.schedule = folder.write(fmt::format("{}.txt", i), to_text(schedule));
    c.stages = schedule.stages.count();
    c.tied = i % 2 == 0;
    CAPTURE(to_text(schedule));
    check_parity(c, text, references);
  }
}
#endif

TEST_CASE("on one rank a schedule is gradient accumulation, to the bit") {
  const OnDevice cpu;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    PipelineCase c = plain_case(1, "1f1b", 3);
    TrainConfig config = pipeline_config(c);
    config.dtype = dtype;
    const Text text;
    SoloTrainer expected(config, &text.dataset);
    // The loop that has no schedule: forward, backward, for each micro-batch.
    Grads grads(expected.model().parameters());
    grads.begin_window(3);
    const Tensor loss = Tensor::zeros({1}, DType::f64);
    for (int64_t i = 0; i < 3; ++i) {
      std::vector<int32_t> tokens(8), targets(8);
      text.dataset.read(Split::train, i, tokens, targets);
      Pass pass;
      pass.seed = uint64_t(config.seed);
      pass.micro_batch = pass.first_sample = i;
      pass.num_samples = 1;
      pass.seq_len = 8;
      pass.positions = Positions(0, 8);
      pass.tokens = Tensor::from_host(tokens, {8});
      pass.targets = Tensor::from_host(targets, {8});
      pass.loss_scale = 1 / double(config.tokens_per_step());
      pass.loss = loss;
      expected.model().backward(expected.model().forward(pass), grads, pass);
    }
    grads.end_window();
    const ParameterList& parameters = expected.model().parameters();
    for (const char* schedule : {"naive", "1f1b", "afab", "zb_h1", "zb_h2", "zb_v", "auto"}) {
      CAPTURE(dtype, schedule);
      config.pipeline.pp_schedule = schedule;
      SoloTrainer trainer(config, &text.dataset);
      trainer.train_step(0);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& found = trainer.model().parameters().find(parameters[i].name);
        REQUIRE(same_bits(found.grad, parameters[i].grad));
      }
      REQUIRE(trainer.report(0, 0).loss == loss.item());
    }
  }
}

/// Bytes that each rank has sent to other stages in a step.
std::vector<double> sent_in_a_step(const TrainConfig& config, const Dataset& dataset) {
  std::vector<double> sent(config.pipeline.pp_size);
  run_threads(static_cast<int>(config.pipeline.pp_size), [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    trainer.train_step(0);
    sent[world.rank()] = double(Runtime::current().ledger().get("pp", CommKind::send).wire_bytes);
  });
  return sent;
}

TEST_CASE("a boundary sends the tokens' activations one way and as much back, v chunks v times") {
  const Text text;
  constexpr int64_t p = 4, m = 4;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    const int64_t message = 8 * 16 * bytes_of(parse_dtype(dtype));  // tokens, hidden size
    for (int64_t layers : {8, 9}) {  // whatever the number of layers between the boundaries
      for (int64_t v : {1, 2}) {
        CAPTURE(dtype, layers, v);
        TrainConfig config = pipeline_config(plain_case(p, v == 1 ? "1f1b" : "interleaved", m));
        config.dtype = dtype;
        config.model.num_layers = layers;
        config.pipeline.pp_chunks = v;
        const std::vector<double> sent = sent_in_a_step(config, text.dataset);
        for (int64_t rank = 0; rank < p; ++rank) {
          const int64_t boundaries = 2 * v - (rank == 0) - (rank == p - 1);  // of its stages
          CHECK(sent[rank] == double(boundaries * m * message));
        }
      }
    }
  }
}

TEST_CASE("the activations of every stage are those of the formula, to the byte", "[no_races]") {
  int compared = 0;
  for (const PipelineCase& c : pipeline_cases(kPipelineIsCarried ? 0 : 150)) {
    const TrainConfig config = pipeline_config(c);
    for (int stage = 0; stage < c.pp; ++stage) {
      const int rank = config.mesh().first_of_stage(stage);
      CAPTURE(c.name(), rank);
      const Prediction predicted = predict(config, rank);
      const Simulation made = simulate<Trainer>(config, rank);
      CHECK(made.saved_bytes() == predicted.saved_bytes());
      if (c.in_turns) {
        CHECK(made.peak_activations <= predicted.peak_activations);
      } else {
        CHECK(made.peak_activations == predicted.peak_activations);
      }
      ++compared;
    }
  }
  REQUIRE(compared > (kSanitized ? 5 : 200));
}

TEST_CASE(
    "what a stage saves has the bytes of the formula in a run, with one micro-batch as well") {
  const Text text;
  for (const char* schedule : {"naive", "1f1b", "zb_h1", "interleaved"}) {
    for (int64_t micro_batches : {1, 2}) {
      PipelineCase c = plain_case(2, schedule, micro_batches);
      if (c.schedule == "interleaved") c.chunks = 2;
      CAPTURE(c.name());
      check_saved_bytes(pipeline_config(c), text.dataset);
    }
  }
}

TEST_CASE("in turns, a pass computes while the messages of the other one cross the ranks of tp") {
  const Text text;
  for (const bool in_turns : {false, true}) {
    PipelineCase c = plain_case(2, "dualpipe", 6);
    c.tp = 2;
    c.overlap = "none";
    c.in_turns = in_turns;
    run_threads(4, [&](const Communicator& world) {
      const TrainConfig config = pipeline_config(c);
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const Tracer& tracer = traced_steps(trainer);
      int64_t all = 0, hidden = 0;
      for (const Tracer::Exchange& exchange : tracer.exchanges()) {
        if (exchange.group != "tp" || exchange.payload_bytes < 8 * 16) continue;
        ++all;
        hidden += std::ranges::any_of(tracer.spans(), [&](const Tracer::Span& span) {
          return span.category == "op" && hides(span, exchange);
        });
      }
      USP_CHECK(all > 0 && (in_turns ? 4 * hidden > all : hidden == 0),
                "{} of {} messages are hidden, in turns {}", hidden, all, in_turns);
    });
  }
}

/// "gathered weights" and the like, by name. Scratch is left out where other sums share its name:
/// those of tp, of tied tables, of mirrored stages, and of a number over all ranks.
std::map<std::string, int64_t> comparable(const std::vector<LiveBytes>& buffers,
                                          const PipelineCase& c) {
  std::map<std::string, int64_t> bytes = by_name(buffers);
  const bool alone = c.dp * c.cp == 1;
  if (c.tp > 1 || c.tied || c.schedule == "dualpipe" || alone) bytes.erase("scratch of reductions");
  return bytes;
}

/// Bytes of all weights, as they are gathered, that a chunk of rank 0 reads: of the chunk that
/// reads most.
int64_t bytes_of_largest_chunk(const TrainConfig& config) {
  DryRank dry(config, 0);
  const std::vector<UnitShape> shapes = unit_shapes(config, dry);
  const std::vector<Unit> units = cut_into_units(dry.model.parameters());
  int64_t largest = 0;
  for (const BlockRange& chunk : dry.model.ranges()) {
    int64_t numel = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      int64_t block = chunk.begin;
      while (block < chunk.end && !units[i].serves(block)) ++block;
      if (block < chunk.end) numel += shapes[i].numel;
    }
    largest = std::max(largest, numel);
  }
  return largest * bytes_of(parse_dtype(config.dtype));
}

TEST_CASE("what ZeRO keeps whole takes the bytes of the formula, in every order of work") {
  const Text text;
  int compared = 0, measured = 0;
  std::set<std::string> seen;
  for (PipelineCase c : pipeline_cases(full() && !kPipelineIsCarried ? 400 : 60)) {
    if (c.zero_stage < 2) continue;
    c.overlap = "weight_grad";  // what is started under it has its own buffers
    const TrainConfig config = pipeline_config(c);
    CAPTURE(c.name());
    const auto predicted = comparable(predict(config).buffers, c);
    CHECK(comparable(simulate<Trainer>(config).buffers, c) == predicted);
    if (c.zero_stage == 3 && config.data_parallel.reshard_after == "chunk") {
      CHECK(predicted.at("gathered weights") == bytes_of_largest_chunk(config));
    }
    ++compared;
    // Real ranks hold as much: once for each schedule and setting.
    const std::string kind = c.schedule + c.reduce_after + c.reshard_after;
    if (c.ranks() > 8 || !seen.insert(kind).second || (kSanitized && measured > 2)) continue;
    ++measured;
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const auto found = comparable(simulate_steps(trainer).buffers, c);
      USP_CHECK(world.rank() > 0 || found == predicted, "{}: measured {}, predicted {}", c.name(),
                found, predicted);
    });
  }
  REQUIRE(compared > (kSanitized ? 0 : 30));
}

TEST_CASE("the next tokens are those of one rank, however the layers are shared out") {
  const Text text;
  SampleConfig sample;
  sample.sample_tokens = 12;
  for (const char* schedule : {"1f1b", "interleaved", "zb_v", "dualpipe"}) {
    for (int64_t tp : {1, 2}) {
      for (bool tied : {false, true}) {
        if (kSanitized && !(tp == 2 && tied)) continue;
        PipelineCase c = plain_case(2, schedule, 4);
        c.tied = tied;
        c.tp = tp;
        c.sequence = tp == 2 ? "again" : "off";
        if (c.schedule == "interleaved") c.chunks = 2;
        CAPTURE(c.name());
        const std::vector<int32_t> prompt = {3, 1, 4, 1, 5};
        const auto sampled = [&](Trainer& trainer, Values& last) {
          trainer.train_step(0);
          const Logits logits = [&](const Pass& pass) {
            const Tensor of_pass = trainer.logits(pass);
            last = of_pass.items();
            return of_pass;
          };
          return sample_tokens(logits, sample, 8, prompt, 1, [] { return false; });
        };
        std::vector<int32_t> expected;
        Values last;
        {
          const OnDevice cpu;
          SoloTrainer solo(alone_config(c), &text.dataset);
          expected = sampled(solo, last);
        }
        const TrainConfig config = pipeline_config(c);
        run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
          const Mesh mesh(world, config.mesh());
          Trainer trainer(config, {&text.dataset, mesh});
          Values own;
          USP_CHECK(sampled(trainer, own) == expected, "{}: other tokens", c.name());
          expect_close(own, last, 1e-10, "logits");
        });
      }
    }
  }
}

TEST_CASE("measured times give every rank the same table, and change no bit of the training") {
  const Text text;
  for (const auto& [dp, tp, zero] : {std::tuple(1, 1, 0), {2, 1, 3}, {1, 2, 0}}) {
    PipelineCase c = plain_case(2, "auto", 4);
    c.dp = dp;
    c.tp = tp;
    c.zero_stage = zero;
    CAPTURE(c.name());
    TrainConfig config = pipeline_config(c);
    std::map<int, std::vector<Values>> expected;
    std::mutex mutex;
    for (const char* asked : {"1,1,1,0", "3,1,2,1", "measured"}) {
      config.pipeline.pp_times = asked;
      run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
        const Mesh mesh(world, config.mesh());
        Trainer trainer(config, {&text.dataset, mesh});
        const std::string& times = trainer.pipeline().measured().times;
        for (int64_t step = 0; step < PipelineConfig::kMeasuredUntil; ++step) {
          USP_CHECK(times.empty(), "step {} has times: {}", step, times);
          trainer.train_step(step);
        }
        for (const std::string& other : world.all_gather_text(times)) {
          USP_CHECK(other == times, "ranks have times of their own: {} and {}", times, other);
        }
        USP_CHECK(times.empty() != config.pipeline.measures_times(), "times are {}", times);
        PipelineConfig given = config.pipeline;
        if (!times.empty()) given.pp_times = times;
        USP_CHECK(to_text(given.schedule(4)) == to_text(trainer.pipeline().schedule()),
                  "a schedule of other times than {}", times);
        for (int64_t step : {0, 1}) trainer.train_step(PipelineConfig::kMeasuredUntil + step);
        std::vector<Values> own;
        const ParameterList& parameters = trainer.model().parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          own.push_back(parameters[i].shard.master.items());
        }
        const std::lock_guard lock(mutex);
        const auto& first = expected.emplace(world.rank(), own).first->second;
        USP_CHECK(own == first, "rank {}: other weights", world.rank());
      });
    }
  }
}

TEST_CASE("a message takes what the link takes, as those ranks find that send one") {
  const Text text;
  TrainConfig config = pipeline_config(plain_case(4, "auto", 4));
  config.pipeline.pp_times = "measured";
  constexpr double kLatencyMs = 4;  // half of it is more than a message takes without the link
  run_threads(4, [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    world.engine().emulate({0, {1e3 * kLatencyMs, 0.5}, {}, {}});
    for (int64_t step = 0; step < PipelineConfig::kMeasuredUntil; ++step) trainer.train_step(step);
    const std::string& times = trainer.pipeline().measured().times;
    const double message = std::stod(times.substr(times.rfind(',') + 1));
    USP_CHECK(message >= 0.99 * kLatencyMs, "messages of {} ms over a link of {} ms", message,
              kLatencyMs);
  });
}

TEST_CASE("operations, tokens and utilisation of every step are those of all stages") {
  const Text text;
  for (const auto& [pp, schedule] : {std::pair(2, "dualpipe"), {3, "afab"}, {4, "1f1b"}}) {
    PipelineCase c = plain_case(pp, schedule, 4);
    c.dp = pp == 2 ? 2 : 1;
    CAPTURE(c.name());
    double carried_out = 0;  // by one rank, of the same samples
    {
      const OnDevice cpu;
      SoloTrainer alone(alone_config(c), &text.dataset);
      alone.train_step(0);
      carried_out = alone.report(0, 0).flops;
    }
    const TrainConfig config = pipeline_config(c);
    run_threads(static_cast<int>(c.ranks()), [&](const Communicator& world) {
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      for (int64_t step = 0; step < 3; ++step) {
        trainer.train_step(step);
        const StepMetrics found = trainer.report(step, /*peak_gflops=*/2.5);
        const double possible = 2.5e9 * found.step_ms * 1e-3;
        const double tokens = double(c.dp * 4 * config.seq_len);  // of four micro-batches
        expect_close({double(found.tokens), found.tokens_per_s * found.step_ms * 1e-3},
                     {double(step + 1) * tokens, tokens}, 1e-12, c.name() + ": tokens");
        expect_close({found.flops, found.hfu * possible}, {carried_out, carried_out}, 1e-12,
                     c.name() + ": operations of all stages");
      }
    });
  }
}

TEST_CASE("a rank idles for the share of its step that no work of either kind fills") {
  MeasuredWork work;
  work.span = 10;
  const auto add = [&](Work kind, bool with_next, double seconds) {
    Action action{};
    action.work = kind;
    action.with_next = with_next;
    work.add(action, seconds);
  };
  add(Work::F, /*with_next=*/false, 1);
  add(Work::B, false, 2);
  add(Work::W, false, 1.5);
  add(Work::BW, false, 0.25);
  add(Work::F, /*with_next=*/true, 1.25);  // a forward and a backward pass in turns
  REQUIRE(work.idle() == 0.4);
  REQUIRE(work.mean(Work::F) == 1);
  REQUIRE(MeasuredWork().idle() == 0);
}

TEST_CASE("a rank's idle share, its step's time, its speed and utilisation go by one clock") {
  const Text text;
  for (const char* schedule : {"afab", "1f1b", "zb_h1", "zb_v"}) {
    const PipelineCase c = plain_case(3, schedule, 4);
    CAPTURE(c.name());
    const TrainConfig config = pipeline_config(c);
    run_threads(3, [&](const Communicator& world) {
      const std::string what = fmt::format("{}, rank {}", c.name(), world.rank());
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      const WorkClock clock({"forward", "backward", "weights"});
      trainer.train_step(0);
      const MeasuredWork& work = trainer.pipeline().measured();
      expect_close({1e9 * work.span, work.idle()}, {double(clock.span()), clock.idle()}, 1e-12,
                   what + ": span, idle");
      const double seconds = 1e-9 * double(clock.now() + WorkClock::kWaitNs);  // for the loss
      const StepMetrics found = trainer.report(0, /*peak_gflops=*/2.5);
      const double possible = 2.5e9 * seconds;
      expect_close({found.step_ms, found.tokens_per_s, found.mfu, found.hfu},
                   {1e3 * seconds, double(found.tokens) / seconds, found.needed_flops / possible,
                    found.flops / possible},
                   1e-12, what + ": step, speed, utilisation");
    });
  }
}

TEST_CASE("a schedule that cannot be run is refused before a rank starts, with one that can") {
  const TempDir folder;
  const auto refuses = [](PipelineCase c, const std::vector<std::string>& parts,
                          int64_t layers = 8) {
    TrainConfig config = pipeline_config(c);
    config.model.num_layers = layers;
    CAPTURE(c.name());
    check_throws<UsageError>([&] { config.pipeline.check(config); }, parts);
  };
  const auto table = [&](int64_t ranks, int64_t micro_batches, const std::string& text) {
    PipelineCase c = plain_case(ranks, "", micro_batches);
    c.stages = ranks;
    c.schedule = folder.write("own.txt", "placement loop\n" + text);
    return c;
  };
  refuses(plain_case(8, "1f1b", 4),
          {"pp_size=8 needs a layer for each of 8 stages, num_layers is "
           "5; try --num_layers 8, or --pp_size 5"},
          5);
  refuses(plain_case(4, "dualpipe", 4), {"grad_acc_steps=4; try --pp_size 4 --grad_acc_steps 6"});
  PipelineCase in_turns = plain_case(2, "interleaved", 4);
  in_turns.chunks = 2;
  in_turns.in_turns = true;
  in_turns.zero_stage = 3;
  refuses(in_turns, {"overlap_dispatch", "zero_stage=3", "try --zero_stage 2"});
  PipelineCase halves = plain_case(1, "1f1b", 2);
  halves.tp = 2;
  halves.overlap = "batch_halves";
  halves.in_turns = true;
  refuses(halves, {"tp_overlap=batch_halves", "leave out --overlap_dispatch"});
  refuses(table(2, 1, "0: F0 BW0\n1: F0 BW0 BW0"),
          {"own.txt: rank 1, action 2, BW0: a second time"});
  refuses(table(2, 2, "0: F0 BW0 F1 BW1\n1: F0 F1 BW0 BW1"), {"own.txt: deadlock: rank 0 waits"});
  refuses(table(2, 1, "0: F0 BW0"), {"own.txt is for 1 ranks, pp_size is 2; try --pp_size 1"});
  refuses(table(2, 1, "1: F0 BW0"), {"own.txt, line 2: \"1:\" is not the next rank; try 0:"});
  refuses(table(1, 1, "0: F0 BW0 F1 BW1"), {"own.txt is for 2 micro-batches, grad_acc_steps is 1; "
                                            "try --grad_acc_steps 2"});
  PipelineCase c = table(1, 1, "");
  c.schedule = folder.file("none.txt");
  refuses(c, {"none.txt: cannot read this file"});
  c = plain_case(2, "1f1b", 2);
  const auto refuses_measured = [&](const char* show, const std::vector<std::string>& parts) {
    TrainConfig config = pipeline_config(c);
    config.pipeline.pp_times = "measured";
    config.pipeline.pp_show = show;
    check_throws<UsageError>([&] { config.pipeline.check(config); }, parts);
  };
  refuses_measured("", {"pp_times is for pp_schedule=auto, not 1f1b; leave it out"});
  c.schedule = "auto";
  refuses_measured("table", {"pp_show=table prints", "try --pp_times 1,1,1,0"});
  PipelineConfig config;
  for (const char* times : {"1,1,1", "1,1,1,0,2", "0,1,1,0", "1,-1,1,0", "1,nan,1,0", "one"}) {
    config.pp_times = times;
    check_throws<UsageError>([&] { config.times(); },
                             {fmt::format("pp_times={} must be", times), "try 1,1,1,0"});
  }
}

TEST_CASE("layers go to the stage that has least to do, or where the command line says") {
  ModelConfig model = tiny_model();
  model.num_layers = 9;
  PipelineConfig config;
  config.pp_size = 4;
  const auto sizes = [&](int64_t stages) {
    std::vector<int64_t> found;
    int64_t next = 0;
    for (const BlockRange& range : blocks_of_stages(config, model, stages)) {
      REQUIRE(range.begin == next);
      next = range.end;
      found.push_back(range.end - range.begin);
    }
    REQUIRE(next == model.num_layers + 2);
    return found;
  };
  // With the embedding in the first and the head in the last, which multiplies as a third of a
  // layer.
  REQUIRE(sizes(4) == std::vector<int64_t>{4, 2, 2, 3});
  model.vocab_size = 4000;  // a head that multiplies more than nine layers
  REQUIRE(sizes(4) == std::vector<int64_t>{4, 3, 2, 2});
  config.pp_layers = "0,5,4,0";
  REQUIRE(sizes(4) == std::vector<int64_t>{1, 5, 4, 1});
  const auto refuses = [&](const char* layers, const std::vector<std::string>& parts) {
    config.pp_layers = layers;
    check_throws<UsageError>([&] { blocks_of_stages(config, model, 4); }, parts);
  };
  refuses("3,3,3", {"pp_layers=3,3,3 has 9 layers in 3 stages, the model 9 in 4; try 3,3,2,1"});
  refuses("3,3,3,1", {"has 10 layers in 4 stages, the model 9 in 4"});
  refuses("3,3,x,1", {"\"x\" is no number of layers; try such as 3,5,4"});
  refuses("5,0,3,1", {"pp_layers=5,0,3,1 leaves nothing to stage 1; try 3,3,2,1"});
  model.num_layers = 3;
  refuses(
      "",
      {"needs a layer for each of 4 stages, num_layers is 3; try --num_layers 4, or --pp_size 3"});
}

}  // namespace
}  // namespace usp::test
