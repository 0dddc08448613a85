#pragma once

#include <memory>

#include "../kernels/attention/ladder.h"
#include "cuda/attention_kernels.h"

namespace usp::attention {

/// A rung that makes gradients.
using BackwardRung = Rung<bf16, Gradients<bf16>>;

/// The trainer's attention by two rungs that this GPU runs; the heads that `backward` does not take
/// have flash_2's gradients. `forward` and `backward` have to outlive it.
std::unique_ptr<cuda::AttentionKernels> attention_by(const Rung<bf16>& forward,
                                                     const BackwardRung& backward,
                                                     const cuda::DeviceLimits& limits);

}  // namespace usp::attention
