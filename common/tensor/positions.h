#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace usp {

/// Which positions of a sample a sequence of rows holds, as at most two contiguous ranges. A whole
/// sample is [0, S); a rank that holds the i-th piece from the front and the i-th from the back has
/// two ranges. What is constexpr here runs on GPUs as well.
class Positions {
 public:
  Positions() = default;
  /// [begin, begin + length)
  Positions(int64_t begin, int64_t length) : ranges_{{{begin, length}, {0, 0}}} {}
  /// [begin0, begin0 + length0) followed by [begin1, begin1 + length1)
  Positions(int64_t begin0, int64_t length0, int64_t begin1, int64_t length1)
      : ranges_{{{begin0, length0}, {begin1, length1}}} {}

  /// Number of rows.
  constexpr int64_t count() const { return ranges_[0].length + ranges_[1].length; }
  /// Position of row `row`, 0 <= row < count().
  constexpr int64_t operator[](int64_t row) const {
    return row < ranges_[0].length ? ranges_[0].begin + row
                                   : ranges_[1].begin + row - ranges_[0].length;
  }
  /// How many rows from this one on hold consecutive positions.
  constexpr int64_t run_from(int64_t row) const {
    return row < ranges_[0].length ? ranges_[0].length - row : count() - row;
  }
  /// The largest position plus one; 0 if there are no rows.
  int64_t end() const;
  /// How many of these positions are at most `position`.
  int64_t count_up_to(int64_t position) const;

 private:
  friend int64_t causal_pairs(const Positions& queries, const Positions& keys);

  struct Range {
    int64_t begin = 0;
    int64_t length = 0;
  };
  std::array<Range, 2> ranges_;
};

/// The number of (query, key) pairs that causal attention looks at: keys at or before the query.
int64_t causal_pairs(const Positions& queries, const Positions& keys);
/// The same over several samples of documents: a query looks at no key before the position at which
/// its document begins; begins [samples, queries], row-major.
int64_t causal_pairs(const Positions& queries, const Positions& keys,
                     std::span<const int32_t> begins);

}  // namespace usp
