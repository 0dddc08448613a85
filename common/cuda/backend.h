#pragma once

#include "cuda/attention_kernels.h"
#include "cuda/cuda_backend.h"
#include "cuda/device_limits.h"
#include "cuda/matmul.h"

namespace usp::cuda {

/// Hands the operands of every operation to its kernels.
class CudaBackend : public Backend {
 public:
  CudaBackend(cudaStream_t stream, BackendCounts& counts);
  void fuse(bool fused) override;
  void promise_values(int64_t value_dim) override { value_dim_ = value_dim; }
  bool fuses_attention(DType dtype, int64_t head_dim, int64_t value_dim) const override;

  // backend.cpp
  void fill(Tensor y, double value) override;
  void copy(Tensor y, const Tensor& x) override;
  void add(Tensor y, const Tensor& a, const Tensor& b) override;
  void accumulate(Tensor sum, const Tensor& x) override;
  void matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate) override;
  void matmul_add(Tensor c, const Tensor& a, const Tensor& b, const Tensor& addend) override;
  void embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens,
                         int64_t vocab_offset) override;
  void embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens,
                          int64_t vocab_offset, bool accumulate) override;
  void rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight,
                       double eps) override;
  void rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& weight,
                              const Tensor& rstd, const Tensor& dresidual) override;
  void rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x,
                               const Tensor& rstd, bool accumulate) override;
  void swiglu_forward(Tensor y, const Tensor& gate_up) override;
  void swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) override;
  void dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random,
               int64_t first_row) override;
  void cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                             const Tensor& logits, const Tensor& targets,
                             int64_t vocab_offset) override;
  void cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max) override;
  void cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max, const Tensor& row_sum,
                          const Tensor& target_logit, double scale) override;
  void cross_entropy_backward(Tensor dlogits, const Tensor& logits, const Tensor& targets,
                              const Tensor& lse, int64_t vocab_offset, double scale) override;
  void sum_squares(Tensor sum, std::span<const Tensor> xs, bool accumulate) override;
  void clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums,
                        double max_norm) override;
  void adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
             const AdamWSettings& settings) override;

  // backend_attention.cpp
  void rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions,
            bool inverse) override;
  void causal_softmax_forward(Tensor probs, Tensor lse, const Tensor& scores, double scale,
                              const Positions& queries, const Positions& keys,
                              const Tensor& begins) override;
  void causal_softmax_backward(Tensor dscores, const Tensor& dprobs, const Tensor& probs,
                               const Tensor& delta, double scale) override;
  void attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                         double scale, const Positions& queries, const Positions& keys,
                         const Tensor& begins) override;
  void attention_merge(Tensor out, Tensor lse, const Tensor& part_out,
                       const Tensor& part_lse) override;
  void attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse) override;
  void attention_delta(Tensor delta, const Tensor& dout, const Tensor& out) override;
  void attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout, const Tensor& q,
                          const Tensor& k, const Tensor& v, const Tensor& lse, const Tensor& delta,
                          double scale, const Positions& queries, const Positions& keys,
                          bool accumulate, const Tensor& begins) override;
  void naive_attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q,
                               const Tensor& k, const Tensor& v, double scale,
                               const Positions& queries, const Positions& keys,
                               const Tensor& begins) override;
  void naive_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dscores, const Tensor& dout,
                                const Tensor& probs, const Tensor& q, const Tensor& k,
                                const Tensor& v, const Tensor& delta, double scale,
                                bool accumulate) override;

  // backend_experts.cpp
  int64_t unit_of_rows(int64_t rows) const override;
  void router_scores(Tensor scores, const Tensor& logits, RouterScore kind) override;
  void router_scores_backward(Tensor dlogits, const Tensor& dscores, const Tensor& scores,
                              RouterScore kind) override;
  void choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias, int64_t groups,
                      int64_t allowed) override;
  void count_choices(Tensor counts, const Tensor& choices) override;
  void drop_choices(Tensor choices, const Tensor& before, int64_t capacity) override;
  void gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices, bool normalised,
                     double scale) override;
  void gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates,
                      const Tensor& scores, const Tensor& choices, bool normalised,
                      double scale) override;
  void assign_slots(Tensor slots, const Tensor& choices, std::span<const int64_t> counts) override;
  void permute(Tensor rows, const Tensor& x, const Tensor& slots) override;
  void unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
                 const Tensor& first) override;
  void unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy, const Tensor& rows,
                          const Tensor& slots, const Tensor& gates) override;
  void balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load, double scale,
                            bool normalised) override;
  void balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load, double scale,
                             bool normalised) override;
  void z_loss_forward(Tensor loss, const Tensor& logits, double scale) override;
  void z_loss_backward(Tensor dlogits, const Tensor& logits, double scale) override;
  void router_entropy(Tensor sum, const Tensor& scores) override;
  void balance_bias(Tensor bias, const Tensor& load, double rate) override;

 private:
  template <class T>
  void check_head_dim(int64_t D) const;
  /// Whether the program's own kernels have queued the operation.
  template <class T, class O>
  bool attend(const Heads<O>& out, accumulate_t<T>* lse, const AttentionProblem<T>& problem);
  template <class T, class O>
  bool attend_backward(const AttentionGradients<T, O>& gradients,
                       const AttentionProblem<T>& problem);

  cudaStream_t stream_;
  MatmulLibrary library_;
  DeviceLimits limits_;
  AttentionCalls& calls_;
  std::unique_ptr<AttentionKernels> attention_;  ///< nullptr: none for this GPU
  int64_t value_dim_ = 0;                        ///< what promise_values() says
};

}  // namespace usp::cuda
