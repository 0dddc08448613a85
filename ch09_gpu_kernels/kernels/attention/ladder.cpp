#include "ladder.h"

#include <algorithm>

#include "base/check.h"

namespace usp::attention {

std::span<const Rung<float>* const> f32_rungs() {
  static constexpr const Rung<float>* kRungs[] = {&kNaive, &kFlash1, &kBlockwise};
  return kRungs;
}

std::span<const Rung<bf16>* const> bf16_rungs() {
  static constexpr const Rung<bf16>* kRungs[] = {&kFlash2, &kFlash3, &kFlash4};
  return kRungs;
}

std::span<const Rung<bf16, Gradients<bf16>>* const> backward_rungs() {
  static constexpr const Rung<bf16, Gradients<bf16>>* kRungs[] = {&kFlash2Backward};
  return kRungs;
}

void check(const Shape& x) {
  if (x.width != 64 && x.width != 128) {
    usage_error("width={} must be 64 or 128; try {}", x.width, x.width < 96 ? 64 : 128);
  }
  if (x.kv_heads < 1 || x.heads < x.kv_heads || x.heads % x.kv_heads != 0) {
    usage_error("kv_heads={} must divide heads={}; try 1", x.kv_heads, x.heads);
  }
  if (x.samples < 1 || x.queries < 1 || x.keys < 1) {
    usage_error("samples={}, queries={} and keys={} must be at least 1; try 1, 128 and 128",
                x.samples, x.queries, x.keys);
  }
}

int64_t tiles_of(const Shape& x, int queries, int keys) {
  int64_t tiles = 0;
  for (int first = 0; first < x.queries; first += queries) {
    const int last = std::min(first + queries, x.queries) - 1;
    tiles += (x.seen_by(last) + keys - 1) / keys;
  }
  return tiles;
}

int64_t tiles_of_keys(const Shape& x, int keys, int queries) {
  int64_t tiles = 0;
  for (int first = 0; first < x.keys; first += keys) {
    tiles += std::max(0, (x.queries + queries - 1) / queries - x.first_to_see(first) / queries);
  }
  return tiles;
}

}  // namespace usp::attention
