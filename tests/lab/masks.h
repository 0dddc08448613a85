#pragma once

#include <string>

#include "lab/attention_case.h"

namespace usp::lab {

/// Where each query's document begins, [samples, queries]: documents begin at these positions, the
/// first of them 0; in each further sample four positions earlier.
inline std::vector<int32_t> begins_of(const Shape& x, const std::vector<int>& starts) {
  std::vector<int32_t> begins;
  for (int sample = 0; sample < x.samples; ++sample) {
    for (int query = 0; query < x.queries; ++query) {
      int begin = 0;
      for (const int start : starts) {
        const int own = std::max(0, start - 4 * sample);
        if (own <= x.query_at[query]) begin = own;
      }
      begins.push_back(begin);
    }
  }
  return begins;
}

/// Masks as documents and ring attention make them, for two samples of other documents and heads
/// that share keys.
class Masks {
 public:
  struct Mask {
    std::string name;
    Shape shape;  ///< its begins are of the Masks
  };

  /// In pieces of so many positions: a whole sample of two; two pieces of six, from front and back;
  /// the same with the keys of another rank, so that queries see none, all, or some of them; and
  /// two pieces with the keys of all six. With documents and without.
  explicit Masks(int piece, int width = 64) {
    using attention::Ranges;
    const Ranges outer{0, piece, 5 * piece}, inner{piece, piece, 4 * piece};
    const std::vector<int> starts = {0,         piece / 3, piece - 1,
                                     piece + 5, piece + 6, 4 * piece + piece / 2};
    const auto add = [&](const char* name, int queries, int keys, const Ranges& query_at,
                         const Ranges& key_at) {
      Shape x{2, queries, keys, 2, 1, width, true, query_at, key_at};
      masks_.push_back({std::string("causal: ") + name, x});
      begins_.push_back(begins_of(x, starts));
      x.begins = begins_.back().data();
      masks_.push_back({std::string("documents: ") + name, x});
    };
    add("a sample", 2 * piece, 2 * piece, {}, {});
    add("zig-zag", 2 * piece, 2 * piece, outer, outer);
    add("keys of the rank before", 2 * piece, 2 * piece, inner, outer);
    add("keys of the rank behind", 2 * piece, 2 * piece, outer, inner);
    add("two pieces of six", 2 * piece, 6 * piece, {3 * piece}, {});
  }

  auto begin() const { return masks_.begin(); }
  auto end() const { return masks_.end(); }

 private:
  std::vector<Mask> masks_;
  std::vector<std::vector<int32_t>> begins_;  // whose elements stay where they are
};

/// Blocks of so many queries by so many keys in which a query sees a key, by asking each pair: of
/// one head, in all samples.
inline int64_t tiles_with_a_pair(const Shape& x, int queries, int keys) {
  int64_t tiles = 0;
  for (int sample = 0; sample < x.samples; ++sample) {
    for (int top = 0; top < x.queries; top += queries) {
      for (int side = 0; side < x.keys; side += keys) {
        bool any = false;
        for (int i = top; i < std::min(top + queries, x.queries); ++i) {
          for (int j = side; j < std::min(side + keys, x.keys); ++j) {
            const int begin = x.begins == nullptr ? 0 : x.begins[sample * x.queries + i];
            any |= !x.causal || (begin <= x.key_at[j] && x.key_at[j] <= x.query_at[i]);
          }
        }
        tiles += any;
      }
    }
  }
  return tiles;
}

}  // namespace usp::lab
