#include "ladder.h"

#include <algorithm>

#include "base/check.h"

namespace usp::attention {

namespace {

/// Two ranges of `count` rows have to ascend; `what` they are of.
void check_ascending(const Ranges& at, int count, const char* what) {
  if (at.length >= count) return;
  if (at.length < 1 || at.second < at.begin + at.length) {
    usage_error("positions of {} begin again at {}, behind {} from {} on: they must ascend; try {}",
                what, at.second, at.length, at.begin, at.begin + std::max(at.length, 1));
  }
}

}  // namespace

std::span<const Rung<float>* const> f32_rungs() {
  static constexpr const Rung<float>* kRungs[] = {&kNaive, &kFlash1, &kBlockwise};
  return kRungs;
}

std::span<const Rung<bf16>* const> bf16_rungs() {
  static constexpr const Rung<bf16>* kRungs[] = {&kFlash2, &kFlash3, &kFlash4};
  return kRungs;
}

std::span<const Rung<bf16>* const> rungs_by_block() {
  static constexpr const Rung<bf16>* kRungs[] = {&kFlash2Of32, &kFlash2Of64, &kFlash2};
  return kRungs;
}

std::span<const Rung<bf16>* const> decoding_rungs() {
  static constexpr const Rung<bf16>* kRungs[] = {&kFlashDecode};
  return kRungs;
}

std::span<const Rung<bf16, Gradients<bf16>>* const> backward_rungs() {
  static constexpr const Rung<bf16, Gradients<bf16>>* kRungs[] = {&kFlash2Backward,
                                                                  &kFlash3Backward};
  return kRungs;
}

void check(const Shape& x, int widest) {
  if (x.width > widest || (x.width != 64 && x.width != kWidestValues && x.width != kWidestKeys)) {
    usage_error("width={} must be {}; try {}", x.width,
                widest < kWidestKeys ? "64 or 128" : "64, 128 or 192", x.width < 96 ? 64 : 128);
  }
  if (x.kv_heads < 1 || x.heads < x.kv_heads || x.heads % x.kv_heads != 0) {
    usage_error("kv_heads={} must divide heads={}; try 1", x.kv_heads, x.heads);
  }
  if (x.samples < 1 || x.queries < 1 || x.keys < 1) {
    usage_error("samples={}, queries={} and keys={} must be at least 1; try 1, 128 and 128",
                x.samples, x.queries, x.keys);
  }
  if (x.splits < 1 || (x.splits > 1 && x.queries > 1)) {
    usage_error("splits={} must be 1 for queries={}: keys are split for one query alone; try 1",
                x.splits, x.queries);
  }
  check_ascending(x.query_at, x.queries, "queries");
  check_ascending(x.key_at, x.keys, "keys");
  if (x.begins != nullptr && !x.causal) {
    usage_error("documents of causal=false must be whole samples; try causal=true");
  }
}

}  // namespace usp::attention
