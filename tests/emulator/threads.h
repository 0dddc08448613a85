#pragma once

#include "internal.h"

#define USP_INLINE [[gnu::always_inline]] inline  // on the way of each access, and of each turn

namespace usp::emulator {

/// One thread of the running block, as hooks and checks see it.
struct KernelThread {
  uint3 index{};
  int number = 0, lane = 0;  // in its block, in its warp
  uint16_t clock = 0;        // operations of its warp since the last barrier, as far as it knows
  std::vector<Event>* log = nullptr;
  const void* stack_end = nullptr;
};

/// What a block may ask for on a device of compute capability 9.0.
inline constexpr size_t kMaxDynamicBytes = size_t{227} << 10;

}  // namespace usp::emulator
