#include "run/report.h"

#include <cmath>
#include <map>

#include "comm/communicator.h"
#include "comm/engine.h"
#include "run/matmul_rate.h"
#include "testing.h"

/// What a run's report tells people of its speed.
namespace usp::test {
namespace {

/// Five steps of 2048 tokens that need 30 GFLOP each and carry out 36; the median takes 200 ms.
RunSummary five_steps() {
  RunSummary summary;
  for (const double ms : {1000, 210, 190, 200, 160}) summary.step_ms.add(ms);
  summary.last.step = 5;
  summary.last.step_ms = 160;
  summary.last.tokens_per_s = 2048 / 0.160;
  summary.last.needed_flops = 30e9;
  summary.last.book_flops = 45e9;
  summary.last.flops = 36e9;
  return summary;
}

std::map<std::string, std::string> rows_of(const ReportRows& rows) {
  return {rows.begin(), rows.end()};
}

TEST_CASE("utilisation is operations over time and peak") {
  StepMetrics metrics = five_steps().last;
  metrics.relate_to(/*peak_gflops=*/300);  // 48 GFLOP in 160 ms
  check_close(Values{metrics.mfu, metrics.book_mfu, metrics.hfu}, Values{0.625, 0.9375, 0.75},
              1e-15);
}

TEST_CASE("the report tells the median step, and tokens/s that go with it") {
  const auto rows = rows_of(speed_rows(five_steps(), 300));
  REQUIRE(rows.at("speed") == "10240 tokens/s: 200.000 ms a step of 2048 tokens, median of 5");
  REQUIRE(rows.at("MFU").starts_with("50 % of the matmul library's 300.0 GFLOP/s"));
  REQUIRE(rows.at("MFU").find("below the causal mask") != std::string::npos);
  REQUIRE(rows.at("MFU, no mask").starts_with("75 %, by the book's count"));
  REQUIRE(rows.at("HFU").starts_with("60 %, by what was carried out"));
  REQUIRE(speed_rows(RunSummary(), 300).empty());  // no step, no speed
}

TEST_CASE("a long run keeps the times of some of its steps, evenly over all of them") {
  StepTimes times;
  const int64_t steps = 10 * int64_t(StepTimes::kMost) + 3;
  for (int64_t step = 0; step < steps; ++step) times.add(double(step));
  REQUIRE(times.steps() == steps);
  REQUIRE(times.kept() <= int64_t(StepTimes::kMost));
  REQUIRE(2 * times.kept() >= int64_t(StepTimes::kMost));
  const double distance = double(steps) / double(times.kept());
  REQUIRE(std::abs(times.median() - double(steps) / 2) <= distance);
}

TEST_CASE("the times that a long run keeps begin with the first, and are all equally far apart") {
  StepTimes times;
  for (int64_t step = 0; step <= int64_t(StepTimes::kMost); ++step) times.add(double(step));
  // One more than are kept: steps 0, 2, 4 ... of which the last is kMost itself.
  REQUIRE(times.kept() == int64_t(StepTimes::kMost) / 2 + 1);
  REQUIRE(times.median() == double(StepTimes::kMost / 2));
}

TEST_CASE("of an even number of steps the median is the slower of the two in the middle") {
  StepTimes times;
  for (const double ms : {40, 10, 30, 20}) times.add(ms);
  REQUIRE(times.median() == 30);
}

TEST_CASE("a utilisation above 100 % says that it cannot be, and why") {
  REQUIRE(utilisation_text(1) == "100 %");
  const auto low = rows_of(speed_rows(five_steps(), 100));  // 20 GFLOP in 200 ms
  REQUIRE(low.at("MFU").starts_with("over 100 % (the peak was measured at a busy moment) of"));
  REQUIRE(low.at("HFU").starts_with("over 100 % (the peak was measured at a busy moment),"));
  // The book's count alone may be above: pairs behind the mask are counted and not computed.
  const auto book = rows_of(speed_rows(five_steps(), 205));
  REQUIRE(book.at("MFU").starts_with("73 % of"));
  REQUIRE(book.at("HFU").starts_with("88 %,"));
  REQUIRE(book.at("MFU, no mask").starts_with("110 %"));
  REQUIRE(book.at("MFU, no mask").find("nobody computes") != std::string::npos);
}

TEST_CASE("the report says where progress lines went by another peak") {
  RunFacts facts;
  for (const auto& [first, says] :
       std::map<double, bool>{{0, false}, {250, true}, {290, false}, {300, false}}) {
    facts.matmul_gflops = first;
    const std::string mfu = rows_of(make_report(facts, five_steps(), 300, {}, "").rows).at("MFU");
    REQUIRE(mfu.ends_with("; progress lines went by 250.0, measured before the run") == says);
  }
}

SkippedSteps skipped(std::initializer_list<int64_t> steps) {
  SkippedSteps all;
  for (int64_t step : steps) all.add(step);
  return all;
}

TEST_CASE("the report names the steps whose updates were left out") {
  RunSummary summary = five_steps();
  REQUIRE(rows_of(make_report({}, summary, 300, {}, "").rows).count("skipped updates") == 0);
  summary.skipped = skipped({2, 3, 4});
  const Report report = make_report({}, summary, 300, {}, "");
  REQUIRE(rows_of(report.rows).at("skipped updates") ==
          "3 of 5, the gradient was not finite: steps 2 to 4");
  REQUIRE(report.verdict.empty());
  REQUIRE(skipped({7}).text(9) == "1 of 9, the gradient was not finite: step 7");
  REQUIRE(skipped({1, 3, 4, 9, 10, 11}).text(12) ==
          "6 of 12, the gradient was not finite: steps 1, 3 to 4 and 9 to 11");
  summary.diverged = true;
  summary.val_loss = 1.0;
  REQUIRE(make_report({}, summary, 300, {}, "").verdict.find("diverged") != std::string::npos);
}

TEST_CASE("a run of many left-out updates keeps the first of them, and counts the others") {
  SkippedSteps every_second;
  for (int64_t step = 1; step <= 100'000; step += 2) every_second.add(step);
  REQUIRE(every_second.count() == 50'000);
  const std::string text = every_second.text(100'000);
  REQUIRE(text.starts_with("50000 of 100000, the gradient was not finite: steps 1, 3, 5, "));
  REQUIRE(text.ends_with(", 61, 63 and more from 65 on"));
  SkippedSteps all;
  for (int64_t step = 1; step <= 1000; ++step) all.add(step);
  REQUIRE(all.text(1000).ends_with("1000 of 1000, the gradient was not finite: steps 1 to 1000"));
}

TEST_CASE("the rate of the matmul library is that of its operations in their time") {
  const OnDevice cpu;
  DryEngine engine(/*rank=*/0, /*size=*/1);
  const Communicator world = Communicator::world(engine);
  const double gflops = measure_matmul_gflops(world, DType::f32, {{96, 96, 96}}, 0.01);
  REQUIRE(gflops > 0.01);
  REQUIRE(gflops < 1e5);
}

}  // namespace
}  // namespace usp::test
