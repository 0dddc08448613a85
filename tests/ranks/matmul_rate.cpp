#include "run/matmul_rate.h"

#include "comm/launch.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("the matmul rate of several ranks is that of the slowest, and all report it") {
  std::vector<double> rates(2);
  run_threads(2, [&](const Communicator& world) {
    const int64_t rows = world.rank() == 0 ? 64 : 8192;  // 128 times as much for the second
    // No least time: the number of rounds is fixed, so the ranks meet whatever each measures.
    rates[world.rank()] = measure_matmul_gflops(world, DType::f32, {{rows, 64, 64}}, 0);
  });
  // As if each rank did what it does, in the time that the second takes.
  check_close(Values{rates[1] / rates[0]}, Values{128.0}, 1e-6,
              "rate of a rank over that of the other");
}

}  // namespace
}  // namespace usp::test
