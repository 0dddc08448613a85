#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace usp {

/// The raw generator: four counter words and two key words to four random words.
struct Philox {
  uint32_t words[4];
  constexpr Philox(uint64_t counter0, uint64_t counter1, uint64_t key)
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
};

/// Random numbers without state: each is a function of (seed, stream, index0, index1), so every
/// rank draws any part of any tensor alone and in any order. Philox4x32-10 (Salmon et al., 2011,
/// https://doi.org/10.1145/2063384.2063405); docs/reproducibility.md gives every constant. What is
/// constexpr here runs on GPUs as well.
class RandomStream {
 public:
  /// 128 random bits, in two words.
  struct Bits {
    uint64_t a, b;
  };

  RandomStream(uint64_t seed, std::string_view name);

  /// 128 random bits
  constexpr Bits bits(uint64_t index0, uint64_t index1 = 0) const {
    const Philox w(index0, index1, key_);
    return {w.words[0] | uint64_t{w.words[1]} << 32, w.words[2] | uint64_t{w.words[3]} << 32};
  }
  /// In [0, 1).
  constexpr double uniform(uint64_t index0, uint64_t index1 = 0) const {
    return double(bits(index0, index1).a >> 11) * 0x1p-53;
  }
  double normal(uint64_t index0, uint64_t index1 = 0) const;  ///< mean 0, variance 1
  /// normal() of as many indices from `index0` on, faster than one after the other.
  void normals(uint64_t index0, std::span<double> values) const;

 private:
  uint64_t key_;
};

/// A permutation of 0 .. size-1 for every epoch, computed element by element in O(1) memory: a
/// four-round Feistel network, walked until it lands below size.
class Permutation {
 public:
  Permutation(uint64_t seed, std::string_view name, uint64_t size);

  uint64_t operator()(uint64_t epoch, uint64_t index) const;  ///< index < size

 private:
  RandomStream stream_;
  uint64_t size_;
  int half_bits_ = 1;
};

}  // namespace usp
