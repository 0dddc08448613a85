#include "ex3_zigzag.h"

#include "judge/todo.h"

namespace usp {

/// The share of a rank of cp in a sample of S tokens, S a multiple of 2 cp: one early piece and one
/// late piece of the sample, so that under the causal mask all ranks have as many pairs of a query
/// and a key. A query sees the keys at or before its own position.
ZigzagShare zigzag_share(int64_t S, int64_t cp, int64_t rank) {
  ZigzagShare share;
  // SOLUTION BEGIN (about 5 lines): the early piece and its mirror image, then the pairs
  const int64_t piece = S / (2 * cp);
  share.positions = Positions(rank * piece, piece, (2 * cp - 1 - rank) * piece, piece);
  for (int64_t row = 0; row < share.positions.count(); ++row) {
    share.pairs += share.positions[row] + 1;
  }
  // SOLUTION END
  return share;
}

}  // namespace usp
