#include "tensor/positions.h"

#include <algorithm>

namespace usp {

int64_t Positions::end() const {
  int64_t end = 0;
  for (const Range& range : ranges_) {
    if (range.length > 0) end = std::max(end, range.begin + range.length);
  }
  return end;
}

int64_t Positions::count_up_to(int64_t position) const {
  int64_t count = 0;
  for (const Range& range : ranges_) {
    count += std::clamp<int64_t>(position + 1 - range.begin, 0, range.length);
  }
  return count;
}

int64_t causal_pairs(const Positions& queries, const Positions& keys) {
  // Of m keys the first query from their beginning on sees 1, the next 2, and so on up to m.
  const auto seen_by_first = [](int64_t count, int64_t m) {
    const int64_t growing = std::clamp<int64_t>(count, 0, m);
    return growing * (growing + 1) / 2 + std::max<int64_t>(0, count - m) * m;
  };
  int64_t pairs = 0;
  for (const auto& query : queries.ranges_) {
    for (const auto& key : keys.ranges_) {
      const int64_t before = query.begin - key.begin;
      pairs += seen_by_first(before + query.length, key.length) - seen_by_first(before, key.length);
    }
  }
  return pairs;
}

int64_t causal_pairs(const Positions& queries, const Positions& keys,
                     std::span<const int32_t> begins) {
  int64_t pairs = 0, row = 0;
  for (int32_t begin : begins) {
    const int64_t hidden = keys.count_up_to(begin - 1);
    pairs += std::max<int64_t>(0, keys.count_up_to(queries[row]) - hidden);
    if (++row == queries.count()) row = 0;
  }
  return pairs;
}

}  // namespace usp
