#pragma once

#include <memory>
#include <string_view>

#include "cuda/device_limits.h"
#include "cuda/kernels.h"

namespace usp::cuda {

/// Kernels of attention that a program has beside the blockwise ones of attention.cu. They take
/// bf16, some f32, the shapes that they are written for, and parts of the keys as well as all.
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;

  /// Whether they take heads with this many channels, of which values fill `value_dim`, or all (0).
  virtual bool takes_heads_of(int64_t head_dim, int64_t value_dim) const = 0;
  /// As the report has it.
  virtual std::string_view name_of_forward() const = 0;
  virtual std::string_view name_of_decoding() const = 0;  ///< where each sample has one query
  /// As the report has it, of heads so wide.
  virtual std::string_view name_of_backward(int64_t head_dim) const = 0;

  ///@{
  /// Bytes of memory that forward() needs besides its operands.
  virtual int64_t workspace(const AttentionProblem<bf16>& problem) const = 0;
  virtual int64_t workspace(const AttentionProblem<float>& /*problem*/) const { return 0; }
  ///@}
  ///@{
  /// Queues what Attention::forward() does; false, and nothing is queued, where operands lie as no
  /// kernel takes them.
  virtual bool forward(cudaStream_t stream, const Heads<bf16>& out, float* lse,
                       const AttentionProblem<bf16>& problem, void* workspace) = 0;
  virtual bool forward(cudaStream_t stream, const Heads<float>& out, float* lse,
                       const AttentionProblem<bf16>& problem, void* workspace) = 0;
  virtual bool forward(cudaStream_t /*stream*/, const Heads<float>& /*out*/, float* /*lse*/,
                       const AttentionProblem<float>& /*problem*/, void* /*workspace*/) {
    return false;
  }
  ///@}

  ///@{
  /// Bytes of memory that backward() needs besides its operands; -1 where it does not take them.
  virtual int64_t workspace(const AttentionGradients<bf16, bf16>& gradients,
                            const AttentionProblem<bf16>& problem) const = 0;
  virtual int64_t workspace(const AttentionGradients<bf16, float>& gradients,
                            const AttentionProblem<bf16>& problem) const = 0;
  ///@}
  ///@{
  /// Queues what AttentionGradients::backward() does.
  virtual void backward(cudaStream_t stream, const AttentionGradients<bf16, bf16>& gradients,
                        const AttentionProblem<bf16>& problem, void* workspace) = 0;
  virtual void backward(cudaStream_t stream, const AttentionGradients<bf16, float>& gradients,
                        const AttentionProblem<bf16>& problem, void* workspace) = 0;
  ///@}
};

/// Makes those of the program for a GPU, or nullptr where it runs none of them. A program that has
/// any sets this before main().
using MakeAttentionKernels = std::unique_ptr<AttentionKernels> (*)(const DeviceLimits& limits);
inline MakeAttentionKernels make_attention_kernels = nullptr;

}  // namespace usp::cuda
