#include "train/kv_cache.h"

#include <algorithm>

#include "tensor/ops.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"

namespace usp {

// [append]
Tensor KvCache::append(const void* layer, const Tensor& kv, const Positions& positions,
                       const Share& share) {
  const int64_t count = positions.count(), end = positions.end(), begin = end - count;
  Entry& entry = entries_[layer];
  USP_CHECK(count > 0 && positions[0] == begin, "a cache takes consecutive positions");
  USP_CHECK(begin <= entry.length && end <= capacity_,
            "positions [{}, {}) for a cache that holds {} of {}", begin, end, entry.length,
            capacity_);
  if (!entry.kv.defined()) {
    const CategoryScope scope(Category::activations);
    entry.kv = Tensor::empty({kv.size(0), room(share), kv.size(2), kv.size(3)}, kv.dtype());
  }
  entry.length = end;
  const int64_t first = first_position(share),
                held = std::clamp<int64_t>(end - first, 0, room(share));
  const int64_t from = std::max(begin, first);  // of the new ones, the first that belongs here
  if (from < first + held) {
    const RecordedPhase takes_own("own positions");
    ops::copy(entry.kv.narrow(1, from - first, first + held - from),
              kv.narrow(1, from - begin, first + held - from));
  }
  return entry.kv.narrow(1, 0, held);
}
// [append]

}  // namespace usp
