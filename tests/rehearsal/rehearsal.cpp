#include "compare.h"

/// Chapters 7 to 9 in miniature: every kind of parallelism, put together from the layers of chapter
/// 1 as they are, equals the model on one process.
namespace usp::rehearsal {
namespace {

TEST_CASE("one rank of the rehearsal is chapter 1") {
  for (bool tied : {false, true}) check(small(tied), {}, whole_model(small(tied)), "alone");
}

TEST_CASE("ring attention over zig-zag position ranges is attention") {
  for (int cp : {2, 3, 4}) {
    check(small(), {.cp = cp}, whole_model(small()), fmt::format("cp {}", cp));
  }
  check(small(true), {.dp = 2, .cp = 2}, whole_model(small(true), 2), "dp 2 cp 2");
}

TEST_CASE("tensor parallelism, with kv heads that ranks share and with sequence shards") {
  for (bool sequence_parallel : {false, true}) {
    for (int tp : {2, 4}) {
      for (bool tied : {false, true}) {
        Setting setting = small(tied);
        setting.plan.sequence_parallel = sequence_parallel;
        check(setting, {.tp = tp}, whole_model(setting),
              fmt::format("tp {} sequence_parallel {} tied {}", tp, sequence_parallel, tied));
      }
    }
  }
}

TEST_CASE("pipelines: 1F1B, weight gradients held back, several chunks to a stage") {
  for (int pp : {2, 3, 4}) {
    for (const char* schedule : {"1f1b", "zb_h1", "breadth_first"}) {
      for (bool tied : {false, true}) {
        Setting setting = small(tied);
        setting.schedule = schedule;
        setting.micro_batches = 5;
        setting.model.num_layers = 8;
        setting.chunks = std::string(schedule) == "breadth_first" ? 2 : 1;
        check(setting, {.pp = pp}, whole_model(setting),
              fmt::format("pp {} {} tied {}", pp, schedule, tied));
      }
    }
  }
}

TEST_CASE("clipping sees every element once, wherever it lies") {
  const Setting setting = with_all_techniques(small(true));
  check(setting, {.dp = 2, .pp = 2, .tp = 2}, alone(setting, 2), "dp 2 pp 2 tp 2");
  check(setting, {.dp = 1, .pp = 2, .cp = 2, .tp = 2}, alone(setting, 1), "pp 2 cp 2 tp 2");
}

TEST_CASE("linear layers with quantised operands, the weight's cached until the next update") {
  Setting setting = small();
  setting.plan.quantisation = Quantisation::uncached;
  const State expected = alone(setting, 2), exact = whole_model(setting, 2);
  REQUIRE(std::abs(expected.losses[0] - exact.losses[0]) > 1e-6);
  setting.plan.quantisation = Quantisation::cached;
  const State cached = alone(setting, 2);
  REQUIRE(cached.losses == expected.losses);
  REQUIRE(cached.grad_norms == expected.grad_norms);
  check(setting, {.dp = 2}, expected, "quantised dp 2");
  setting.schedule = "zb_h1";
  check(setting, {.dp = 2, .pp = 2}, expected, "quantised dp 2 pp 2");
}

TEST_CASE("a weight is quantised once per update") {
  const test::OnDevice cpu;
  ParameterList parameters;
  Parameter& weight = parameters.add("weight", {6, 8}, 0.5);
  QuantisedLinear linear({&weight}, /*cached=*/true);
  parameters.allocate(DType::f64, 1);
  Grads grads(parameters);
  const Tensor x = test::Random(1).tensor({5, 8}), dy = test::Random(2).tensor({5, 6});
  Optimizer optimizer(parameters, optimizer_config());
  for (int64_t step = 0; step < 2; ++step) {
    grads.begin_window(3);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      Linear::Saved saved;
      linear.forward(x, saved, {});
      linear.backward(dy, saved, grads, {});
    }
    REQUIRE(linear.quantisations() == step + 1);
    optimizer.step(step, 0.1, optimizer.grad_squares());
  }
}

/// Bytes by communicator and kind of operation.
using Traffic = std::map<std::pair<std::string, CommKind>, std::array<int64_t, 3>>;

Traffic traffic_of_two_steps(RehearsalTrainer& trainer) {
  const Ledger before = Runtime::current().ledger();  // what building it took
  trainer.train_step(0);
  trainer.train_step(1);
  Traffic traffic;
  for (const auto& [key, entry] : Runtime::current().ledger().entries()) {
    const Ledger::Entry sent = entry - before.get(key.first, key.second);
    if (sent.calls > 0) traffic[key] = {sent.calls, sent.payload_bytes, sent.wire_bytes};
  }
  return traffic;
}

/// The settings whose traffic no data decides.
std::vector<std::pair<Setting, MeshSizes>> predictable_settings() {
  Setting all = small(true), zero = small(true);
  all.plan.sequence_parallel = true;
  all.schedule = "zb_h1";
  all.seq_len = 16;
  zero.zero_stage = 3;
  return {{all, {.dp = 1, .pp = 2, .cp = 2, .tp = 2}}, {zero, {.dp = 4, .pp = 2}}};
}

TEST_CASE("on meta with the dry engine a rank's step sends what it sends in truth") {
  for (const auto& [setting, sizes] : predictable_settings()) {
    std::vector<Traffic> real(8);
    run_threads(8, [&, &setting = setting, &sizes = sizes](const Communicator& world) {
      RehearsalTrainer trainer(setting, world, sizes);
      real[world.rank()] = traffic_of_two_steps(trainer);
    });
    for (int rank = 0; rank < 8; ++rank) {
      const test::OnDevice meta(Device::meta);
      DryEngine engine(rank, 8);
      RehearsalTrainer trainer(setting, Communicator::world(engine), sizes);
      const Traffic dry = traffic_of_two_steps(trainer);
      CAPTURE(rank, dry.size(), real[rank].size());
      REQUIRE(dry.size() >= 4);
      const bool same = dry == real[rank];
      REQUIRE(same);
    }
  }
}

TEST_CASE("rank 37 of 64 runs all of it on meta") {
  test::OnDevice meta(Device::meta);
  Setting setting = small(true);
  setting.plan.sequence_parallel = true;
  setting.schedule = "zb_h1";
  setting.seq_len = 64;
  DryEngine engine(37, 64);
  RehearsalTrainer trainer(setting, Communicator::world(engine),
                           {.dp = 2, .pp = 4, .cp = 2, .tp = 4});
  const Traffic traffic = traffic_of_two_steps(trainer);
  // Stage 2 of 4 passes on activations and gradients of 3 micro-batches, twice.
  REQUIRE(trainer.mesh().pp().rank() == 2);
  const int64_t rows = setting.micro_batch_size * setting.seq_len / 2 / 4;
  const int64_t boundary = rows * setting.model.hidden_size * 8;
  REQUIRE(traffic.at({"pp", CommKind::send}) ==
          std::array{int64_t{2 * 3 * 2}, 12 * boundary, 12 * boundary});
  for (const char* name : {"tp", "cp_ring", "dp_cp", "world"}) {
    CAPTURE(name);
    const bool used =
        std::ranges::any_of(traffic, [&](const auto& entry) { return entry.first.first == name; });
    REQUIRE(used);
  }
  REQUIRE(meta.allocator().live_bytes(Category::activations) == 0);
}

TEST_CASE("ZeRO-3 and quantised layers run on meta as rank 37 of 64") {
  Setting zero = small(true), quantised = small(true);
  zero.zero_stage = 3;
  quantised.plan.quantisation = Quantisation::cached;
  for (const Setting& setting : {zero, quantised}) {
    CAPTURE(setting.zero_stage);
    test::OnDevice meta(Device::meta);
    DryEngine engine(37, 64);
    RehearsalTrainer trainer(setting, Communicator::world(engine), {.dp = 16, .pp = 4});
    const Traffic traffic = traffic_of_two_steps(trainer);
    REQUIRE(traffic.contains({"dp", CommKind::all_gather}) == (setting.zero_stage == 3));
    REQUIRE(traffic.contains({"dp", CommKind::all_reduce}) == (setting.zero_stage == 0));
    REQUIRE(traffic.at({"pp", CommKind::send})[0] == 2 * 3 * 2);
    REQUIRE(meta.allocator().live_bytes(Category::activations) == 0);
  }
}

}  // namespace
}  // namespace usp::rehearsal
