#pragma once

#include <algorithm>
#include <cstdint>

#include "emulator/emulator.h"

/// What keeps a multiprocessor's multipliers waiting before any latency does.
namespace usp::lab {

/// Instructions of warps that a kernel issues for a product in f32: FMAs, and requests to memory.
struct Requests {
  /// What an H100's multiprocessor begins in a cycle: each of its four schedulers an FMA, all four
  /// together one request. NVIDIA, "How does the LSU execute load/store instructions"
  /// (https://forums.developer.nvidia.com/t/273699/8).
  static constexpr int kFmasOfACycle = 4, kRequestsOfACycle = 1;

  int64_t fmas, global, shared;

  double fmas_of_each() const {
    return static_cast<double>(fmas) / static_cast<double>(global + shared);
  }
  /// Percent of the peak, where each address takes its turn and nothing else is waited for.
  double most_percent() const {
    return std::min(100.0, 100 * fmas_of_each() * kRequestsOfACycle / kFmasOfACycle);
  }
};

inline Requests requests_of(const emulator::Counters& counted, int64_t m, int64_t n, int64_t k) {
  return {m * n * k / 32, counted.load_requests + counted.store_requests, counted.shared_requests};
}

}  // namespace usp::lab
