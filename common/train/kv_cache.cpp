#include "train/kv_cache.h"

#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

// [append]
Tensor KvCache::append(const void* layer, const Tensor& kv, const Positions& positions) {
  const int64_t count = positions.count(), end = positions.end(), begin = end - count;
  Entry& entry = entries_[layer];
  USP_CHECK(count > 0 && positions[0] == begin, "a cache takes consecutive positions");
  USP_CHECK(begin <= entry.length && end <= capacity_,
            "positions [{}, {}) for a cache that holds {} of {}", begin, end, entry.length,
            capacity_);
  if (!entry.kv.defined()) {
    const CategoryScope scope(Category::activations);
    entry.kv = Tensor::empty({kv.size(0), capacity_, kv.size(2), kv.size(3)}, kv.dtype());
  }
  ops::copy(entry.kv.narrow(1, begin, count), kv);
  entry.length = end;
  return entry.kv.narrow(1, 0, end);
}
// [append]

}  // namespace usp
