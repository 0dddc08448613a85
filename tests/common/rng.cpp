#include "base/rng.h"

#include <algorithm>
#include <array>

#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("Philox gives the known answers of the Random123 distribution") {
  struct Known {
    uint64_t counter0, counter1, key;
    std::array<uint32_t, 4> words;
  };
  const Known answers[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {~0ULL, ~0ULL, ~0ULL, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x85a308d3'243f6a88,
       0x03707344'13198a2e,
       0x299f31d0'a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& known : answers) {
    const Philox philox(known.counter0, known.counter1, known.key);
    REQUIRE(std::equal(known.words.begin(), known.words.end(), philox.words));
  }
}

TEST_CASE("a stream's key is splitmix64 of the seed xor FNV-1a of the name") {
  const uint64_t splitmix64_of_0 = 0xE220A8397B1DCDAF, splitmix64_of_1234567 = 0x599ED017FB08FC85;
  const uint64_t fnv1a_of_nothing = 0xCBF29CE484222325, fnv1a_of_foobar = 0x85944171F73967E8;
  const auto check = [](const RandomStream& stream, uint64_t key) {
    const auto [a, b] = stream.bits(3, 1ULL << 40);
    const Philox philox(3, 1ULL << 40, key);
    REQUIRE(a == (philox.words[0] | uint64_t{philox.words[1]} << 32));
    REQUIRE(b == (philox.words[2] | uint64_t{philox.words[3]} << 32));
  };
  check(RandomStream(0, "foobar"), splitmix64_of_0 ^ fnv1a_of_foobar);
  check(RandomStream(1234567, ""), splitmix64_of_1234567 ^ fnv1a_of_nothing);
}

TEST_CASE("uniform and normal follow from the bits by the published formulas") {
  const RandomStream stream(7, "x");
  for (uint64_t i = 0; i < 1000; ++i) {
    const auto [a, b] = stream.bits(i, 5);
    const double uniform = double(a >> 11) / 0x1p53;
    REQUIRE(stream.uniform(i, 5) == uniform);
    const double radius = std::sqrt(-2 * std::log(uniform + 0x1p-53));
    const double normal = radius * std::cos(2 * std::acos(-1.0) * (double(b >> 11) / 0x1p53));
    REQUIRE(std::abs(stream.normal(i, 5) - normal) <= 1e-14);
  }
}

TEST_CASE("normals are the normals of as many indices, to the bit") {
  const RandomStream stream(7, "x");
  std::vector<double> some(150);
  stream.normals(1000, some);
  for (size_t i = 0; i < some.size(); ++i) REQUIRE(some[i] == stream.normal(1000 + i));
}

/// Mean of x^power over n draws.
template <class Draw>
double moment(int n, int power, const Draw& draw) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += std::pow(draw(i), power);
  return sum / n;
}

TEST_CASE("normals have the moments of a standard normal, uniforms those of [0, 1)") {
  constexpr int n = 100'000;  // standard errors: 1, sqrt(2), sqrt(15), sqrt(96) over sqrt(n)
  const double sigma = 1 / std::sqrt(double(n));
  for (uint64_t seed : {0, 1, 1 << 20}) {
    CAPTURE(seed);
    const RandomStream stream(seed, "model.norm.weight");
    const auto normal = [&](int i) { return stream.normal(i); };
    REQUIRE(std::abs(moment(n, 1, normal)) < 5 * sigma);
    REQUIRE(std::abs(moment(n, 2, normal) - 1) < 5 * std::sqrt(2) * sigma);
    REQUIRE(std::abs(moment(n, 3, normal)) < 5 * std::sqrt(15) * sigma);
    REQUIRE(std::abs(moment(n, 4, normal) - 3) < 5 * std::sqrt(96) * sigma);
    const auto uniform = [&](int i) { return stream.uniform(i); };
    REQUIRE(std::abs(moment(n, 1, uniform) - 0.5) < 5 * std::sqrt(1.0 / 12) * sigma);
    REQUIRE(std::abs(moment(n, 2, uniform) - 1.0 / 3) < 5 * std::sqrt(4.0 / 45) * sigma);
  }
}

TEST_CASE("seeds, streams and both indices give unrelated numbers") {
  constexpr int n = 20'000;
  const RandomStream base(1, "a");
  const auto correlation = [&](const auto& other) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += base.normal(i, 1) * other(i);
    return sum / n;
  };
  const double limit = 5 / std::sqrt(double(n));
  REQUIRE(std::abs(correlation([](int i) { return RandomStream(2, "a").normal(i, 1); })) < limit);
  REQUIRE(std::abs(correlation([](int i) { return RandomStream(1, "b").normal(i, 1); })) < limit);
  REQUIRE(std::abs(correlation([&](int i) { return base.normal(i + 1, 1); })) < limit);
  REQUIRE(std::abs(correlation([&](int i) { return base.normal(i, 2); })) < limit);
  REQUIRE(correlation([&](int i) { return base.normal(i, 1); }) > 0.9);
}

TEST_CASE("a permutation maps 0 .. size-1 onto itself in every epoch") {
  std::vector<uint64_t> sizes = {255, 256, 257, 1000, 4096, 4097, 65536};
  for (uint64_t size = 1; size <= 70; ++size) sizes.push_back(size);
  for (uint64_t size : sizes) {
    const Permutation permutation(3, "data.order", size);
    for (uint64_t epoch : {0, 1, 1000}) {
      CAPTURE(size, epoch);
      std::vector<bool> seen(size);
      for (uint64_t i = 0; i < size; ++i) seen.at(permutation(epoch, i)) = true;
      REQUIRE(std::count(seen.begin(), seen.end(), true) == static_cast<int64_t>(size));
    }
  }
}

TEST_CASE("permutations differ between epochs, seeds and from the identity") {
  constexpr uint64_t kSize = 1000;
  const Permutation permutation(3, "data.order", kSize), other(4, "data.order", kSize);
  int unmoved = 0, same_epoch = 0, same_seed = 0;
  for (uint64_t i = 0; i < kSize; ++i) {
    unmoved += permutation(0, i) == i;
    same_epoch += permutation(0, i) == permutation(1, i);
    same_seed += permutation(0, i) == other(0, i);
  }
  // Of two random permutations about one element agrees.
  REQUIRE(unmoved < 10);
  REQUIRE(same_epoch < 10);
  REQUIRE(same_seed < 10);
}

}  // namespace
}  // namespace usp::test
