#pragma once

#include <span>

#include "comm/operation.h"

namespace usp {

/// out[i] = parts[0][i] + parts[1][i] + ..., in this order: the order of the ranks, whatever the
/// order in which their messages came. bf16 is summed in f32 and rounded once. `out` may be one of
/// the parts. Host memory.
void reduce_in_order(void* out, std::span<const void* const> parts, int64_t count, DType dtype,
                     ReduceOp op);

}  // namespace usp
