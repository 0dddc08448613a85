#include "ex3_shard.h"

#include <algorithm>

#include "judge/todo.h"

namespace usp {

/// Which elements of a parameter rank `rank` of `ranks` updates. The parameters of a unit lie side
/// by side and have `total` elements together; this one has `numel` of them and begins at `offset`.
/// Padding fills the unit up to a multiple of `ranks`; rank s owns part s of `ranks` equal ones,
/// wherever in a parameter that begins and ends.
ShardBounds shard_bounds(int64_t total, int64_t offset, int64_t numel, int rank, int ranks) {
  // SOLUTION BEGIN (about 4 lines): the rank's part of the unit, then what of it is this
  // parameter's
  const int64_t length = (total + ranks - 1) / ranks;
  const int64_t begin = std::clamp<int64_t>(rank * length - offset, 0, numel);
  const int64_t end = std::clamp<int64_t>((rank + 1) * length - offset, begin, numel);
  return {begin, end};
  // SOLUTION END
}

}  // namespace usp
