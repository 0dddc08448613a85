#include "planner/closed_form.h"

#include "accounting/memory.h"
#include "pipeline_parallel/generators.h"
#include "planner/classes_of_ranks.h"
#include "planner/cost.h"
#include "planner/schedule_replay.h"
#include "technique/planner/layouts.h"

/// The book's formulas, calculated by hand.
namespace usp::test {
namespace {

ClosedForm form(const std::string& flags) {
  return closed_form(layout_of_flags(instead(kSmall, flags)), round_cluster(16));
}

TEST_CASE("the formulas of a step are the book's") {
  const TrainConfig small = layout_of_flags(kSmall);  // 2 samples of 16 tokens, 24 wide, f32
  const double flops = 32 * model_flops_per_token(small.model, 16);  // at 1e9 a second
  CHECK(form("").step() == Approx(flops * 1e-9));
  CHECK(form("--recompute full").computes == Approx(4.0 / 3 * flops * 1e-9));
  CHECK(form("--dp_size 4").computes == Approx(flops * 1e-9));
  CHECK(form("--tp_size 2").computes == Approx(flops / 2 * 1e-9));

  const ClosedForm pipeline = form("--pp_size 2 --grad_acc_steps 8");
  CHECK(pipeline.computes == Approx(8 * flops / 2 * 1e-9));
  CHECK(pipeline.bubble == Approx(pipeline.computes / 8));
  const ClosedForm chunks =
      form("--pp_size 2 --grad_acc_steps 8 --pp_schedule interleaved --pp_chunks 2");
  CHECK(chunks.bubble == Approx(chunks.computes / 16));

  // 8 exchanges a layer, of 32 tokens: a hop of 1 us, and half of 32 x 24 x 4 bytes at 1 GB/s.
  CHECK(form("--tp_size 2").tensor == Approx(8 * 4 * (1e-6 + 0.5 * 3072e-9)));
  CHECK(form("--tp_size 2 --grad_acc_steps 3").tensor == Approx(3 * form("--tp_size 2").tensor));
}

TEST_CASE("the formulas know where a group's ranks lie, whichever axis is the fastest") {
  const auto step = [](const char* order) {
    const std::string flags = "--dp_size 2 --cp_size 2 --tp_size 2 --mesh_order ";
    const TrainConfig config = layout_of_flags(instead(kSmall, flags + order));
    const Cluster cluster = round_cluster(2);
    const ClosedForm form = closed_form(config, cluster);
    Cost cost(cluster);
    // 8 exchanges a layer of 16 tokens, 24 wide, in f32.
    const GroupLayout tp = layout_of(config.mesh().members("tp", 0), 2);
    CHECK(form.tensor == Approx(8 * 4 * cost.of(CommKind::all_gather, 1536, tp).busy));
    const GroupLayout dp = layout_of(config.mesh().members("dp_cp", 0), 2);
    const double bytes = 4 * double(num_parameters(config.model)) / 2;
    const double sums = 2 * cost.of(CommKind::all_gather, bytes, dp).busy;
    CHECK(form.data == Approx(std::max(0.0, sums - form.computes * 2 / 3)));
    return form.step();
  };
  CHECK(step("pp,dp,cp,tp") != Approx(step("pp,dp,tp,cp")));
  CHECK(step("pp,cp,dp,tp") == Approx(step("pp,dp,cp,tp")));
  step("pp,dp,tp,cp");  // tp between dp and cp
  step("tp,pp,cp,dp");
}

/// Programs in whose place every pass of a kind takes equally long, and all else no time.
std::vector<Program> uniform(std::vector<Program> programs, int64_t backward) {
  for (Program& program : programs) {
    const auto takes = [](int64_t us) { return Kernel{.op = "copy", .bytes = us * 1000}; };
    // A pass that is not split makes both kinds of gradients.
    const auto splits = [&](ProgramSegment pass) {
      pass.work = 'W';
      return std::ranges::find(program.segments, pass) != program.segments.end();
    };
    program.kernels = {takes(0), takes(100), takes(100 * backward), takes(100 * (backward + 1))};
    std::set<int32_t> begun;
    for (Event& event : program.events) {
      if (event.kind != Event::compute) continue;
      const ProgramSegment& pass = program.segments[event.segment];
      const bool is_first = begun.insert(event.segment).second;
      const bool is_forward = pass.work == 'F' || pass.work == 'W';  // as long as one
      event.what = !is_first ? 0 : is_forward ? 1 : pass.work != 'B' ? 0 : splits(pass) ? 2 : 3;
    }
  }
  return programs;
}

TEST_CASE("the formulas' bubble is the replay's on every schedule") {
  Cluster cluster = round_cluster(16);
  cluster.node = {{0, Origin::assumed, ""}, {1e9, Origin::assumed, ""}};  // messages take no time
  for (const std::string& name : schedule_names()) {
    for (const auto& [p, m] : {std::pair{2, 6}, {4, 8}, {4, 12}, {2, 5}, {4, 3}, {3, 5}, {4, 9}}) {
      const bool few = name == "dualpipe" ? m < 2 * p - 2 : name == "dualpipe_v" && m < 2 * p - 1;
      if (few || (name == "dualpipe" && (p % 2 != 0 || m % 2 != 0))) continue;  // it is refused
      for (const char* recompute : {"none", "full"}) {
        const bool in_chunks = name == "interleaved" || name == "breadth_first" || name == "llama3";
        const TrainConfig config = layout_of_flags(instead(
            kSmall, fmt::format("--num_layers 8 --pp_size {} --grad_acc_steps {} --pp_schedule {} "
                                "--recompute {}{}",
                                p, m, name, recompute, in_chunks ? " --pp_chunks 2" : "")));
        const RankClasses classes = classes_of_ranks(config, 16);
        const int64_t backward = config.recompute == "full" ? 2 : 1;
        const std::vector<Program> programs = uniform(record_classes(config, classes), backward);
        Cost cost(cluster);
        const double step = replay(programs, classes, cost).step;
        ScheduleReplay products(programs, classes);
        products.price(cost);
        const int passes = name == "dualpipe_v" || name == "zb_v" || in_chunks ? 2 : 1;
        const double work = 100e-6 * double(m * passes) * double(2 + backward);
        const ClosedForm formulas = closed_form(config, cluster);
        CAPTURE(name, p, m, recompute, step, work);
        CHECK(step / work - 1 == Approx(formulas.bubble / formulas.computes).margin(1e-6));
        CHECK(products.time().step == Approx(step));
      }
    }
  }
}

/// Seconds of a rank's exchanges along a dimension, whatever hides them.
double exchanged(const TrainConfig& config, const Cluster& cluster, const char* dimension) {
  const Program program = record(config, 0);
  Cost cost(cluster);
  double seconds = 0;
  for (const Event& event : program.events) {
    if (event.kind != Event::post) continue;
    const Exchange& exchange = program.exchanges[event.what];
    const ProgramGroup& group = program.groups[exchange.group];
    if (dimension_of(group.name) == dimension) seconds += cost.of(exchange, group).busy;
  }
  return seconds;
}

TEST_CASE("of a layer's exchanges the formulas count those that every pass has") {
  const Cluster cluster = round_cluster(16);
  Cost cost(cluster);
  for (const auto& [recompute, m] : {std::pair{"none", 1}, {"full", 1}, {"full", 3}}) {
    const auto more = [&](const auto& seconds) {  // of four layers more: the rest is the head's
      const auto of = [&](int layers) {
        return seconds(layout_of_flags(instead(
            kSmall, fmt::format("--tp_size 2 --sequence_parallel --num_layers {} --recompute {} "
                                "--grad_acc_steps {}",
                                layers, recompute, m))));
      };
      return of(8) - of(4);
    };
    const double formula =
        more([&](const TrainConfig& config) { return closed_form(config, cluster).tensor; });
    const double record =
        more([&](const TrainConfig& config) { return exchanged(config, cluster, "tp"); });
    // Eight of them. Backward gathers twice more, for gradients of weights; recomputation repeats
    // three of the forward pass; and once a step there are sums of the gradients of two norms.
    const int counted = std::string(recompute) == "full" ? 13 : 10;
    const GroupLayout tp = layout_of(2, 1, 16);
    const double norms = 4 * 2 * cost.of(CommKind::all_reduce, 24 * 4, tp).busy;
    CAPTURE(recompute, m);
    CHECK(record == Approx(formula * counted / 8 + norms));
  }
}

TEST_CASE("the formulas send for ZeRO's stages the bytes that a record sends") {
  Cluster cluster = round_cluster(16);
  cluster.node.latency_us.value = 0;
  cluster.peak_tflops[DType::f32].value = 1e9;  // nothing is hidden
  for (int stage : {0, 1, 2, 3}) {
    for (int m : {1, 4}) {
      const TrainConfig config = layout_of_flags(
          instead(kSmall, fmt::format("--dp_size 4 --zero_stage {} --grad_acc_steps {} "
                                      "--reduce_after micro_batch",
                                      stage, m)));
      // Backward needs no weights of the embedding, and still has those of the last layer and head.
      const auto there = double(config.model.layer_weights(0, false) + (2 * 31 + 3) * 24);
      const double again = stage == 3 ? m * 0.75 * 4 * there * 1e-9 : 0;
      CAPTURE(stage, m);
      CHECK(closed_form(config, cluster).data == Approx(exchanged(config, cluster, "dp") + again));
    }
  }
}

TEST_CASE("of dp's exchanges the formulas count what backward does not hide") {
  const TrainConfig small = layout_of_flags(kSmall);
  const double bytes = 4 * double(num_parameters(small.model));
  const double once = 10e-6 + 0.5 * bytes / 2e6;  // between two nodes of one rank, at 2 MB/s
  const double backward = form("").computes * 2 / 3;
  REQUIRE(2 * once > backward);
  Cluster slow = round_cluster(1);
  slow.net.gbs.value = 0.002;
  const auto data = [&](const std::string& flags) {
    return closed_form(layout_of_flags(instead(kSmall, flags)), slow).data;
  };
  CHECK(data("--dp_size 2") == Approx(2 * once - backward));
  CHECK(data("--dp_size 2 --zero_stage 1") == Approx(2 * once - backward));
  CHECK(data("--dp_size 2 --zero_stage 3") == Approx(3 * once - backward));
  // Of four micro-batches the last one's backward pass hides it, or each hides its own.
  CHECK(data("--dp_size 2 --grad_acc_steps 4") == Approx(2 * once - backward));
  CHECK(data("--dp_size 2 --grad_acc_steps 4 --zero_stage 3") == Approx(12 * once - 4 * backward));
}

}  // namespace
}  // namespace usp::test
