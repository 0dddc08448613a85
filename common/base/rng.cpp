#include "base/rng.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

namespace usp {

namespace {

uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

uint64_t fnv1a64(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char byte : text) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

/// The first of the two numbers of Box and Muller (1958), https://doi.org/10.1214/aoms/1177706645.
double normal_of(const RandomStream::Bits& bits) {
  const double u1 = double((bits.a >> 11) + 1) * 0x1p-53;  // in (0, 1]: its logarithm is finite
  const double u2 = double(bits.b >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
}

}  // namespace

RandomStream::RandomStream(uint64_t seed, std::string_view name)
    : key_(mix64(seed) ^ fnv1a64(name)) {}

double RandomStream::normal(uint64_t index0, uint64_t index1) const {
  return normal_of(bits(index0, index1));
}

void RandomStream::normals(uint64_t index0, std::span<double> values) const {
  // The generator in a loop of its own, of which the compiler makes vectors.
  std::array<Bits, 64> drawn;
  for (size_t begin = 0; begin < values.size(); begin += drawn.size()) {
    const size_t count = std::min(drawn.size(), values.size() - begin);
    for (size_t i = 0; i < count; ++i) drawn[i] = bits(index0 + begin + i);
    for (size_t i = 0; i < count; ++i) values[begin + i] = normal_of(drawn[i]);
  }
}

Permutation::Permutation(uint64_t seed, std::string_view name, uint64_t size)
    : stream_(seed, name), size_(size) {
  while (half_bits_ < 32 && (uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

uint64_t Permutation::operator()(uint64_t epoch, uint64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = index >> half_bits_, right = index & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left ^= stream_.bits(right, 4 * epoch + round).a & mask;
      std::swap(left, right);
    }
    index = left << half_bits_ | right;
  } while (index >= size_);
  return index;
}

}  // namespace usp
