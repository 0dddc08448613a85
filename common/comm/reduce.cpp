#include "comm/reduce.h"

#include <algorithm>

namespace usp {

namespace {

/// Small enough to stay in the first-level cache between one part and the next.
constexpr int64_t kBlock = 1024;

template <class T>
void reduce_typed(T* out, std::span<const void* const> parts, int64_t count, ReduceOp op) {
  using A = accumulate_t<T>;
  A sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(parts[0]) + begin;
    for (int64_t i = 0; i < length; ++i) sum[i] = static_cast<A>(first[i]);
    for (const void* part : parts.subspan(1)) {
      const T* x = static_cast<const T*>(part) + begin;
      if (op == ReduceOp::sum) {
        for (int64_t i = 0; i < length; ++i) sum[i] += static_cast<A>(x[i]);
      } else {
        for (int64_t i = 0; i < length; ++i) sum[i] = std::max(sum[i], static_cast<A>(x[i]));
      }
    }
    for (int64_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
}

}  // namespace

void reduce_in_order(void* out, std::span<const void* const> parts, int64_t count, DType dtype,
                     ReduceOp op) {
  if (dtype == DType::i32) {
    reduce_typed(static_cast<int32_t*>(out), parts, count, op);
  } else {
    dispatch(dtype,
             [&](auto zero) { reduce_typed(static_cast<decltype(zero)*>(out), parts, count, op); });
  }
}

}  // namespace usp
