#include "ex3_zigzag.h"

#include "judge/todo.h"

namespace usp {

/// The share of a rank of cp in a sample of S tokens, S a multiple of 2 cp: one early piece and one
/// late piece of the sample, so that under the causal mask all ranks have as many pairs of a query
/// and a key. A query sees the keys at or before its own position.
ZigzagShare zigzag_share(int64_t S, int64_t cp, int64_t rank) {
  ZigzagShare share;
  // TODO (about 5 lines): the early piece and its mirror image, then the pairs
  USP_TODO("ch04.ex3");
  return share;
}

}  // namespace usp
