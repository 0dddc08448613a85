#include "planner/closed_form.h"

#include "accounting/memory.h"
#include "planner/cost.h"
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
