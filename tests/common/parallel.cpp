#include "cpu/parallel.h"

#include <set>

#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("every thread has an array of its own, whatever it is that it works on") {
  constexpr int64_t kSize = 100;
  for (int threads : {1, 2, 5}) {
    const Threads limit(threads);
    const OnDevice cpu;
    const cpu::PerThread<float> arrays(kSize);
    std::set<float*> begins;
#pragma omp parallel
    {
      float* mine = arrays.mine();
      std::fill_n(mine, kSize, 1.0F);
#pragma omp critical
      begins.insert(mine);
    }
    REQUIRE(std::ssize(begins) == num_threads());
    for (auto next = begins.begin(), begin = next++; next != begins.end(); begin = next++) {
      REQUIRE(*next - *begin >= kSize);
    }
  }
}

TEST_CASE("a parallel loop runs each of its iterations once") {
  for (int threads : {1, 2, 5}) {
    const Threads limit(threads);
    for (int64_t count : {0, 1, 2, 63, 64, 65, 1000}) {
      std::vector<int> times(count);
      cpu::parallel_for(count, cpu::kParallelWork, [&times](int64_t i) { ++times[i]; });
      REQUIRE(times == std::vector<int>(count, 1));
    }
  }
}

}  // namespace
}  // namespace usp::test
