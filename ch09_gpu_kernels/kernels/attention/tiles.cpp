#include "ladder.h"

/// What formulas count: here, because a trainer has rungs without having all of them.
namespace usp::attention {

Count count_tiles(const Shape& x, int queries, int keys) {
  Count all{};
  for (int sample = 0; sample < x.samples; ++sample) {
    for (int first = 0; first < x.queries; first += queries) {
      const int tiles = x.tiles_seen(sample, first, queries, keys).count;
      all.tiles += tiles;
      all.blocks += tiles > 0;
    }
  }
  return all;
}

Count count_tiles_of_keys(const Shape& x, int keys, int queries) {
  Count all{};
  for (int sample = 0; sample < x.samples; ++sample) {
    for (int first = 0; first < x.keys; first += keys) {
      const int tiles = x.tiles_seeing(sample, first, keys, queries).count;
      all.tiles += tiles;
      all.blocks += tiles > 0;
    }
  }
  return all;
}

int64_t stretches_of(const Shape& x, const Ranges& at, int count, int rows) {
  const bool turns = at.length < count && at.length % rows != 0;
  return int64_t{x.samples} * ((count + rows - 1) / rows + turns);
}

}  // namespace usp::attention
