#pragma once

#include <cstdint>
#include <string_view>

namespace usp {

/// Random numbers without state: each is a function of (seed, stream, index0, index1), so every
/// rank draws any part of any tensor alone and in any order. Philox4x32-10 (Salmon et al., 2011);
/// docs/reproducibility.md gives every constant.
class RandomStream {
 public:
  struct Bits {
    uint64_t a, b;
  };

  RandomStream(uint64_t seed, std::string_view name);

  Bits bits(uint64_t index0, uint64_t index1 = 0) const;       ///< 128 random bits
  double uniform(uint64_t index0, uint64_t index1 = 0) const;  ///< in [0, 1)
  double normal(uint64_t index0, uint64_t index1 = 0) const;   ///< mean 0, variance 1

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

/// The raw generator: four counter words and two key words to four random words.
struct Philox {
  uint32_t words[4];
  Philox(uint64_t counter0, uint64_t counter1, uint64_t key);
};

}  // namespace usp
