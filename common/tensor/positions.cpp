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
  int64_t pairs = 0;
  for (int64_t row = 0; row < queries.count(); ++row) pairs += keys.count_up_to(queries[row]);
  return pairs;
}

}  // namespace usp
