#include "run/progress.h"

#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("what is left of a run is said in seconds, minutes or hours") {
  REQUIRE(duration(0.2) == "0 s");
  REQUIRE(duration(59.4) == "59 s");
  REQUIRE(duration(59.6) == "1 min 00 s");
  REQUIRE(duration(3599.4) == "59 min 59 s");
  REQUIRE(duration(3599.6) == "1 h 00 min");
  REQUIRE(duration(7679) == "2 h 07 min");
  REQUIRE(duration(100 * 3600.0) == "100 h 00 min");
}

StepMetrics step_of(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = 2.5;
  metrics.has_val_loss = step == 50;
  metrics.val_loss = 2.6638;
  return metrics;
}

TEST_CASE("a validation loss stands in one line of a log, with the step that it is of") {
  OnDevice cpu;
  const std::string rest = "  grad norm 0.000  lr 0.00e+00  0 tokens/s";
  for (const bool terminal : {false, true}) {
    Progress progress(200, 0, terminal);
    REQUIRE(progress.line(step_of(49), 49) ==
            "step  49/200  loss 2.5000" + rest + "  2 min 31 s left");
    progress.show(step_of(50));  // is the first line that is due
    const std::string later = terminal ? "  val@50 2.6638" : "";
    REQUIRE(progress.line(step_of(55), 55) ==
            "step  55/200  loss 2.5000" + later + rest + "  2 min 25 s left");
  }
  Progress log(200, 0, /*terminal=*/false);
  log.show(step_of(1));
  log.show(step_of(50));  // too soon after the first to be shown
  REQUIRE(log.line(step_of(55), 55).find("  val@50 2.6638  ") != std::string::npos);
  REQUIRE(log.line(step_of(65), 65).find("val") == std::string::npos);
}

}  // namespace
}  // namespace usp::test
