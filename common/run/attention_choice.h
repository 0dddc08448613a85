#pragma once

#include <cstdint>
#include <string>

#include "tensor/dtype.h"

namespace usp {

struct RunConfig;

/// What a rank's attention works on in one layer and one micro-batch.
struct AttentionShape {
  double scores = 0;    ///< pairs of a query and a key, over all samples and heads
  double head_dim = 0;  ///< D: channels of a head
  double batches = 0;   ///< products that naive attention does one by one: samples times the
                        ///< query heads that share a kv head
  DType dtype = DType::f32;
  bool fused = false;  ///< kernels for tensor cores that a run may take compute it blockwise
};
/// Shape of a run's attention, on each of its ranks, where no kernels are fused.
AttentionShape attention_shape(const RunConfig& config);

/// Estimated seconds of forward and backward on an H100.
double naive_attention_seconds(const AttentionShape& shape);
/// The same where no probabilities are kept.
double blockwise_attention_seconds(const AttentionShape& shape);

/// Whether a run may take fused kernels. A chapter that has any sets this before main().
using AsksForFusedKernels = bool (*)(const RunConfig& config);
inline AsksForFusedKernels asks_for_fused_kernels = nullptr;

/// A value of --attention, and in words why it is the one.
struct AttentionChoice {
  std::string attention;
  std::string why;
};

/// What a GPU computes attention by where no flag says it: blockwise where it has fused kernels for
/// that, else what is estimated to be faster at this shape; and blockwise where a run with naive
/// attention needs more bytes than there are.
AttentionChoice choose_attention(const AttentionShape& shape, double bytes_of_naive,
                                 double available_bytes);

}  // namespace usp
