#include "cpu/simd.h"

#include "testing.h"

/// The loops that the kernels of a row are made of, at counts on both sides of a whole stride.
namespace usp::test {
namespace {

constexpr int64_t kCounts[] = {0, 1, 15, 63, 64, 65, 127, 128, 200};

TEST_CASE("a SIMD loop visits every element of its row once and no other") {
  for (int64_t count : kCounts) {
    CAPTURE(count);
    std::vector<int> visits(300);
    int* visit = visits.data();
    cpu::simd_loop(
        count, [=](int64_t i) { ++visit[i]; }, visit + count);
    std::vector<int> expected(300);
    std::fill_n(expected.begin(), count, 1);
    REQUIRE(visits == expected);
  }
}

TEST_CASE("a SIMD sum has every term once, in one partial sum or in many") {
  for (int64_t count : kCounts) {
    CAPTURE(count);
    const auto term = [](int64_t i) { return static_cast<float>(i + 1); };
    const auto expected = static_cast<float>(count * (count + 1) / 2);
    REQUIRE(cpu::simd_sum<float, cpu::kStride>(count, term) == expected);
    REQUIRE(cpu::simd_sum<float, 1>(count, term) == expected);
  }
}

TEST_CASE("a sum of doubles is in index order") {
  const Values x = {1e16, 1, -1e16, 1};  // 1 is lost in the first sum alone
  const auto term = [&](int64_t i) { return x[i]; };
  REQUIRE(cpu::simd_sum<double, cpu::kPartialSums<double>>(4, term) == 1);
}

TEST_CASE("exp in f32 is within 3 ulp, and 0, infinity or NaN where it should be") {
  const auto ulps = [](float x) {
    const double exact = std::exp(static_cast<double>(x));
    const auto nearest = static_cast<float>(exact);
    const double ulp = std::nextafter(nearest, HUGE_VALF) - nearest;
    return std::abs(cpu::exp(x) - exact) / ulp;
  };
  double worst = 0;
  for (float x = -86.8F; x < 88.7F; x += 1e-3F) worst = std::max(worst, ulps(x));
  REQUIRE(worst <= 3);
  REQUIRE(worst > 0);
  REQUIRE(cpu::exp(0.0F) == 1);
  REQUIRE(cpu::exp(-87.0F) == 0);
  REQUIRE(cpu::exp(-HUGE_VALF) == 0);
  REQUIRE(cpu::exp(89.0F) == HUGE_VALF);
  REQUIRE(cpu::exp(HUGE_VALF) == HUGE_VALF);
  REQUIRE(std::isnan(cpu::exp(static_cast<float>(kNaN))));
}

}  // namespace
}  // namespace usp::test
