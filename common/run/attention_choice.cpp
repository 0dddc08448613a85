#include "run/attention_choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "run/memory_check.h"

namespace usp {

namespace {

// Estimates on paper of one H100, from the loops of our kernels: no card has been timed yet. The
// row of attention.cu in docs/gpu_first_contact.md has what they add up to for a step of 1B.

/// Either way, from one kernel to the next.
constexpr double kLaunchSeconds = 2e-6;

/// Forward writes the scores, reads and writes them as probabilities, and reads these once more;
/// backward writes the scores' gradients, reads and writes these beside the probabilities, and
/// reads each of them again for two products.
constexpr double kPassesOverScores = 11;
constexpr double kBytesASecond = 2.6e12;
constexpr double kSoftmaxSeconds = 2e-12;  ///< of a score: what exponentials take beside the bytes
/// Two products forward and four backward, of all pairs: no tile behind the mask is left out.
constexpr double kNaiveProducts = 6;

/// What cuBLASLt's products reach in FLOP/s: tensor cores but for f32, where TF32 is not allowed.
double product_rate(DType dtype) { return dtype == DType::bf16 ? 600e12 : 50e12; }

/// Two products forward and seven backward, which makes the scores again for each kernel of it;
/// half of the pairs are behind the causal mask.
constexpr double kBlockwiseProducts = 9;
constexpr double kPairsBelowTheMask = 0.5;

/// The kernels read shared memory at full speed for this rate in FLOP/s, a fifth of what the CUDA
/// cores could do. Numbers in f64 are twice as wide.
double blockwise_rate(DType dtype) { return dtype == DType::f64 ? 6.85e12 : 13.7e12; }

}  // namespace

AttentionShape attention_shape(const RunConfig& config) {
  const ModelConfig& m = config.model;
  const MeshSizes mesh = config.mesh();
  const double samples = double(config.micro_batch_size), length = double(config.seq_len);
  const double heads = double(std::max<int64_t>(1, m.num_heads / mesh.tp));
  return {.scores = samples * heads * length * length / double(mesh.cp),
          .head_dim = double(m.head_dim()),
          .batches = samples * double(m.num_heads / m.num_kv_heads),
          .dtype = parse_dtype(config.dtype)};
}

double naive_attention_seconds(const AttentionShape& shape) {
  const double bytes = kPassesOverScores * double(bytes_of(shape.dtype));
  const double flops = kNaiveProducts * 2 * shape.head_dim;
  const double of_score =
      bytes / kBytesASecond + kSoftmaxSeconds + flops / product_rate(shape.dtype);
  constexpr double kOtherKernels = 3;  // two softmaxes and the delta
  return shape.scores * of_score +
         (kNaiveProducts * shape.batches + kOtherKernels) * kLaunchSeconds;
}

double blockwise_attention_seconds(const AttentionShape& shape) {
  const double flops = kBlockwiseProducts * 2 * shape.head_dim * kPairsBelowTheMask;
  constexpr double kKernels = 4;  // forward, delta, of queries, of keys
  return shape.scores * flops / blockwise_rate(shape.dtype) + kKernels * kLaunchSeconds;
}

AttentionChoice choose_attention(const AttentionShape& shape, double bytes_of_naive,
                                 double available_bytes) {
  // Nine products of half of the pairs, where naive attention does six of all; no score in memory.
  if (shape.fused) return {"blockwise", "this GPU has fused kernels for it, on tensor cores"};
  const double ratio = blockwise_attention_seconds(shape) / naive_attention_seconds(shape);
  if (ratio <= 1) {
    return {"blockwise",
            fmt::format("estimated to be {:.1f} times as fast as naive at this shape", 1 / ratio)};
  }
  const std::string faster = fmt::format("estimated to be {:.1f} times as fast", ratio);
  if (bytes_of_naive <= available_bytes) {
    return {"naive", fmt::format("{} as blockwise at this shape", faster)};
  }
  return {"blockwise",
          fmt::format("naive is {} at this shape, but needs {} of memory, and {} are available",
                      faster, in_units(bytes_of_naive), in_units(available_bytes))};
}

}  // namespace usp
