#include "base/rng.h"

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

}  // namespace

Philox::Philox(uint64_t counter0, uint64_t counter1, uint64_t key)
    : words{uint32_t(counter0), uint32_t(counter0 >> 32), uint32_t(counter1),
            uint32_t(counter1 >> 32)} {
  uint32_t key0 = uint32_t(key), key1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * words[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * words[2];
    words[0] = uint32_t(product1 >> 32) ^ words[1] ^ key0;
    words[1] = uint32_t(product1);
    words[2] = uint32_t(product0 >> 32) ^ words[3] ^ key1;
    words[3] = uint32_t(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

RandomStream::RandomStream(uint64_t seed, std::string_view name)
    : key_(mix64(seed) ^ fnv1a64(name)) {}

RandomStream::Bits RandomStream::bits(uint64_t index0, uint64_t index1) const {
  const Philox w(index0, index1, key_);
  return {w.words[0] | uint64_t{w.words[1]} << 32, w.words[2] | uint64_t{w.words[3]} << 32};
}

double RandomStream::uniform(uint64_t index0, uint64_t index1) const {
  return double(bits(index0, index1).a >> 11) * 0x1p-53;
}

double RandomStream::normal(uint64_t index0, uint64_t index1) const {
  const auto [a, b] = bits(index0, index1);
  const double u1 = double((a >> 11) + 1) * 0x1p-53;  // in (0, 1]: its logarithm is finite
  const double u2 = double(b >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
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
