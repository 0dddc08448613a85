#include "cpu/simd.h"

#include "base/rng.h"
#include "testing.h"

/// The loops that the kernels of a row are made of, at counts on both sides of a whole stride, and
/// their arithmetic. Compiled for this CPU and for any: see tests/CMakeLists.txt.
namespace usp::test {
namespace {

using Floats = std::vector<float>;

constexpr int64_t kCounts[] = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 200};

/// 0, 1, 2, ... in T.
template <class T>
std::vector<T> counting(int64_t count) {
  std::vector<T> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = T(float(i));
  return x;
}

/// exp<T>() of all x at once, as a kernel computes it.
template <class T>
Floats exp_of(const Floats& x) {
  Floats y(x.size());
  const float* in = x.data();
  cpu::simd_map(y.data(), std::ssize(x), [=](auto i) { return cpu::exp<T>(cpu::load(in, i)); });
  return y;
}

TEMPLATE_TEST_CASE("a SIMD loop visits every element of its row once and no other", "", float, bf16,
                   double) {
  for (int64_t count : kCounts) {
    CAPTURE(count);
    std::vector<TestType> row = counting<TestType>(count + 70), expected = row;
    TestType* x = row.data();
    cpu::simd_loop<TestType>(
        count, [=](auto i) { cpu::store(x, i, cpu::load(x, i) + 1); }, x + count);
    for (int64_t i = 0; i < count; ++i) expected[i] = TestType(float(i + 1));
    for (int64_t i = 0; i < count + 70; ++i) REQUIRE(float(row[i]) == float(expected[i]));
  }
}

TEST_CASE("a SIMD sum has every term once, in one partial sum or in many") {
  const Floats row = counting<float>(200);
  const auto term = [x = row.data()](auto i) { return cpu::load(x, i) + 1; };
  for (int64_t count : kCounts) {
    CAPTURE(count);
    const auto expected = static_cast<float>(count * (count + 1) / 2);
    REQUIRE(cpu::simd_sum<float, cpu::kStride>(count, term) == expected);
    REQUIRE(cpu::simd_sum<float, 1>(count, term) == expected);
  }
}

TEST_CASE("a SIMD sum of floats adds in one order, whatever the instruction set") {
  Floats row(200);
  for (size_t i = 0; i < row.size(); ++i) row[i] = float(std::sin(double(i)) * std::exp2(i % 24));
  const auto term = [x = row.data()](auto i) { return cpu::load(x, i); };
  for (int64_t count : kCounts) {
    CAPTURE(count);
    Floats partial(cpu::kStride);
    for (int64_t i = 0; i < count; ++i) partial[i % cpu::kStride] += row[i];
    for (int64_t half = cpu::kStride / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) partial[i] += partial[half + i];
    }
    REQUIRE(cpu::simd_sum<float, cpu::kStride>(count, term) == partial[0]);
  }
}

TEST_CASE("a sum of doubles is in index order") {
  const Values x = {1e16, 1, -1e16, 1};  // 1 is lost in the first sum alone
  const auto term = [&](int64_t i) { return x[i]; };
  REQUIRE(cpu::simd_sum<double, cpu::kPartials<double>>(4, term) == 1);
}

TEST_CASE("a SIMD maximum is the largest of all elements, wherever it stands; NaN is passed over") {
  for (int64_t count : kCounts) {
    for (int64_t at = 0; at < count; ++at) {
      Floats row(count, -3);
      row[at] = -2;
      if (count > 1) row[(at + 1) % count] = float(kNaN);
      const auto term = [x = row.data()](auto i) { return cpu::load(x, i); };
      REQUIRE(cpu::simd_max(count, -HUGE_VALF, term) == -2);
      REQUIRE(cpu::simd_max(count, -1.0F, term) == -1);
    }
  }
}

TEST_CASE("storing bf16 rounds to nearest even, and keeps infinity and NaN") {
  Floats row = {1,     -1,        0x1.01p0F,  0x1.03p0F, 0x1.010002p0F,
                3e38F, HUGE_VALF, -HUGE_VALF, 0,         1e-30F};
  const RandomStream random(1, "bf16");
  while (row.size() < 200) row.push_back(float(random.normal(row.size()) * 100));
  std::vector<bf16> rounded(200);
  const auto value = [x = row.data()](auto i) { return cpu::load(x, i); };
  cpu::simd_map(rounded.data(), 200, value);
  for (size_t i = 0; i < row.size(); ++i) {
    CAPTURE(row[i]);
    REQUIRE(rounded[i].bits == bf16(row[i]).bits);
  }
  // All kinds of NaN: quiet and signalling, of both signs, with a payload in any half.
  for (uint32_t bits : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFF80FFFFU}) {
    const auto nan = std::bit_cast<float>(bits);
    const auto nans = [x = &nan](auto i) { return cpu::load(x, i); };
    cpu::simd_map(rounded.data(), 1, nans);
    CAPTURE(bits);
    REQUIRE(std::isnan(float(rounded[0])));
  }
}

TEMPLATE_TEST_CASE("e^x of x <= 0 is as exact as T can tell, and 0 or NaN where it should be", "",
                   float, bf16) {
  Floats x;
  for (float value = -86.8F; value <= 0; value += 1e-3F) x.push_back(value);
  x.push_back(0);
  const Floats y = exp_of<TestType>(x);
  double worst_ulp = 0, worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i])), error = std::abs(y[i] - exact);
    const auto nearest = static_cast<float>(exact);
    worst_ulp = std::max(worst_ulp, error / (std::nextafter(nearest, HUGE_VALF) - nearest));
    worst = std::max(worst, error / exact);
    REQUIRE(y[i] == cpu::exp<TestType>(x[i]));  // one element alone or in a row
  }
  if constexpr (std::is_same_v<TestType, float>) {
    REQUIRE(worst_ulp <= 3);
  } else {
    REQUIRE(worst <= 5e-6);
  }
  REQUIRE(worst > 0);
  REQUIRE(exp_of<TestType>({0, -0.0F, -88, -1e30F, -HUGE_VALF}) == Floats{1, 1, 0, 0, 0});
  for (uint32_t bits : {0x7FC00000U, 0xFFC00000U, 0x7F800001U, 0x7FFFFFFFU, 0xFFC001FFU}) {
    REQUIRE(std::isnan(exp_of<TestType>({std::bit_cast<float>(bits)})[0]));
  }
}

TEST_CASE("sigmoid stays between 0 and 1, and NaN stays NaN") {
  const Floats x = {0, 1, -1, 200, -200, HUGE_VALF, -HUGE_VALF, float(kNaN)};
  Floats y(x.size());
  const float* in = x.data();
  cpu::simd_map(y.data(), std::ssize(x),
                [=](auto i) { return cpu::sigmoid<float>(cpu::load(in, i)); });
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    CAPTURE(x[i]);
    REQUIRE(y[i] == Approx(1 / (1 + std::exp(-double(x[i])))).epsilon(1e-6).margin(1e-37));
  }
  REQUIRE(std::isnan(y.back()));
}

}  // namespace
}  // namespace usp::test
