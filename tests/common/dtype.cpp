#include "tensor/dtype.h"

#include "testing.h"

namespace usp::test {
namespace {

/// Nearest bf16, ties to even, by comparing distances in double.
uint16_t nearest_bf16(double value) {
  uint16_t best = 0;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  // A double's exponent and its first 7 fraction bits: the two candidates are this and the next.
  uint16_t low = 0, high = 0x7F80;
  while (high - low > 1) {  // magnitudes of bf16 are ordered like their bits
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    bf16 candidate;
    candidate.bits = middle;
    (double(candidate) <= std::abs(value) ? low : high) = middle;
  }
  bf16 below, above;
  below.bits = low;
  above.bits = high;
  // Beyond the largest number, infinity stands where the next one would be.
  const double next = high == 0x7F80 ? 0x1p128 : double(above);
  const double down = std::abs(value) - double(below), up = next - std::abs(value);
  best = down < up || (down == up && low % 2 == 0) ? low : high;
  return best | sign;
}

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

TEST_CASE("bfloat16 rounds to nearest even: every number, both sides of it, every tie") {
  int wrong = 0;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    if ((upper & 0x7F80) == 0x7F80) continue;  // infinities and NaN
    for (uint32_t lower : {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF}) {
      const float value = float_of(upper << 16 | lower);
      wrong += bf16(value).bits != nearest_bf16(double(value));
    }
  }
  REQUIRE(wrong == 0);
}

TEST_CASE("bfloat16 keeps infinities, overflows to them, and keeps NaN a NaN") {
  REQUIRE(bf16(float(kInf)).bits == 0x7F80);
  REQUIRE(bf16(float(-kInf)).bits == 0xFF80);
  REQUIRE(bf16(float_of(0x7F7F'7FFF)).bits == 0x7F7F);  // rounds down to the largest number
  REQUIRE(bf16(float_of(0x7F7F'8000)).bits == 0x7F80);  // the tie above it
  REQUIRE(bf16(-0.0F).bits == 0x8000);
  for (uint32_t sign : {0x0000'0000U, 0x8000'0000U}) {
    for (uint32_t payload : {0x1U, 0xFFFFU, 0x1'0000U, 0x40'0000U, 0x7F'FFFFU}) {
      const bf16 rounded(float_of(sign | 0x7F80'0000U | payload));
      CAPTURE(sign, payload, rounded.bits);
      REQUIRE(std::isnan(float(rounded)));
      REQUIRE(std::signbit(float(rounded)) == (sign != 0));
    }
  }
}

TEST_CASE("a double is rounded to bfloat16 once") {
  Random random(1);
  int wrong = 0;
  for (uint32_t upper : {0x3F80U, 0x3F81U, 0x4049U, 0x0001U, 0x0080U, 0xBDCCU, 0x7F7EU}) {
    const double tie = double(float_of(upper << 16 | 0x8000));
    // Just beside a tie, where rounding to f32 on the way would land on it.
    for (double relative : {-0x1p-30, 0.0, 0x1p-30, 0x1p-50, -0x1p-50}) {
      const double value = tie * (1 + relative);
      wrong += bf16(value).bits != nearest_bf16(value);
    }
  }
  for (int i = 0; i < 100'000; ++i) {
    const double value = random.normal();
    wrong += bf16(value).bits != nearest_bf16(value);
  }
  REQUIRE(wrong == 0);
  REQUIRE(std::isnan(double(bf16(kNaN))));
  REQUIRE(double(bf16(-kInf)) == -kInf);
  REQUIRE(double(bf16(1e300)) == kInf);
}

TEST_CASE("bfloat16 widens to f32 and f64 exactly") {
  for (uint32_t upper = 0; upper < 0x7F80; upper += 7) {
    bf16 value;
    value.bits = static_cast<uint16_t>(upper);
    REQUIRE(std::bit_cast<uint32_t>(float(value)) == upper << 16);
    REQUIRE(double(value) == double(float(value)));
    REQUIRE(bf16(double(value)).bits == upper);
  }
}

TEST_CASE("the table of dtypes is in the order of the enumeration") {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    REQUIRE(static_cast<size_t>(kDTypes[i].dtype) == i);
    if (kDTypes[i].dtype != DType::i32) {
      REQUIRE(parse_dtype(kDTypes[i].name) == kDTypes[i].dtype);
      dispatch(kDTypes[i].dtype, [&]<class T>(T) {
        REQUIRE(dtype_of<T> == kDTypes[i].dtype);
        REQUIRE(sizeof(T) == kDTypes[i].bytes);
        REQUIRE(dtype_of<accumulate_t<T>> == kDTypes[i].accumulate);
      });
    }
  }
  check_throws<UsageError>([] { parse_dtype("f16"); }, {"dtype=f16", "f32, bf16 or f64"});
  check_throws<UsageError>([] { parse_dtype("i32"); }, {"dtype=i32"});
  check_throws<Error>([] { dispatch(DType::i32, [](auto) {}); }, {"i32"});
}

}  // namespace
}  // namespace usp::test
