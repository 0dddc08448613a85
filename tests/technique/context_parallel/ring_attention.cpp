#include "context_parallel/ring_attention.h"

#if __has_include("examples/ring_self_attention.h")
#include "technique/context_parallel/ring_self_attention_parity.h"

namespace usp::test {
namespace {

TEST_CASE("ring self-attention over ranks is serial attention, forward and backward") {
  for (int ranks : {1, 2, 3, 4}) {
    for (uint64_t seed : {1, 2}) {
      run_threads(ranks,
                  [&](const Communicator& world) { check_ring_self_attention(world, seed); });
    }
  }
}

TEST_CASE("ring self-attention keeps whole rows of scores, ring attention none") {
  constexpr int64_t B = 2, S = 48, N = 3, D = 4;
  for (int n : {2, 3, 4, 8}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      CAPTURE(n, name(dtype));
      const int64_t own = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
      const Shape rows{B, S / n, N, D};
      const auto first = AttentionCosts::ring_self_attention(B, S, N, D, n, own);
      const AttentionCounts counted = count_ring_self_attention(n, rows, dtype);
      CHECK(counted.kept == first.kept);
      CHECK(counted.peak == first.peak);
      CHECK(counted.sent == first.sent);
      CHECK(counted.messages == 4 * (n - 1) + 2);
      const auto ring = AttentionCosts::ring_attention(B, S, N, D, n, own, acc);
      const AttentionCounts ring_counted = count_ring_attention(n, rows, dtype);
      CHECK(ring_counted.kept == ring.kept);
      CHECK(ring_counted.sent == ring.sent);
      CHECK(ring_counted.messages == 3 * (n - 1));
      CHECK(ring_counted.kept < counted.kept);
    }
  }
}

}  // namespace
}  // namespace usp::test
#endif
