#include "base/rng.h"
#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

constexpr int64_t kRows = 40, kColumns = 50;

Tensor dropped(const Tensor& x, double rate, int64_t first_row, uint64_t seed = 3) {
  const Tensor y = Tensor::empty(x.shape(), x.dtype());
  ops::dropout(y, x, rate, RandomStream(seed, "mask"), first_row);
  return y;
}

TEST_CASE("dropout zeroes about a rate of the elements and scales the others up") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    const Tensor ones = Tensor::from_host(Values(kRows * kColumns, 1), {kRows, kColumns}, dtype);
    for (double rate : {0.0, 0.25, 0.9}) {
      CAPTURE(name(dtype), rate);
      int64_t zeros = 0;
      for (double value : dropped(ones, rate, 0).items()) {
        if (value == 0) {
          ++zeros;
        } else {
          CHECK(std::abs(value * (1 - rate) - 1) <= tolerance_of(dtype));
        }
      }
      // Five standard deviations of 2,000 draws.
      CHECK(std::abs(double(zeros) / (kRows * kColumns) - rate) <= 5 * 0.5 / std::sqrt(2000.0));
    }
  }
}

TEST_CASE("which elements are dropped depends on row, column and seed, on no more") {
  const OnDevice cpu;
  Random random(2);
  const Tensor x = random.tensor({kRows, kColumns}, DType::f64);
  const Tensor whole = dropped(x, 0.5, 7);
  const Tensor part = dropped(x.narrow(0, 30, 10), 0.5, 7 + 30);
  REQUIRE(same_bits(part, whole.narrow(0, 30, 10).to_contiguous()));
  REQUIRE(!same_bits(dropped(x, 0.5, 8), whole));
  REQUIRE(!same_bits(dropped(x, 0.5, 7, 4), whole));
  const Tensor in_place = clone(x);
  ops::dropout(in_place, in_place, 0.5, RandomStream(3, "mask"), 7);
  REQUIRE(same_bits(in_place, whole));
}

TEST_CASE("dropout refuses a rate that leaves nothing") {
  const OnDevice cpu;
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  for (double rate : {1.0, -0.1}) check_throws<Error>([&] { dropped(x, rate, 0); }, {"dropout"});
}

}  // namespace
}  // namespace usp::test
