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

}  // namespace
}  // namespace usp::test
