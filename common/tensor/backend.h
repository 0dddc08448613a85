#pragma once

#include <memory>
#include <span>

#include "tensor/positions.h"
#include "tensor/tensor.h"

namespace usp {

class RandomStream;
enum class RouterScore;

/// Hyper-parameters of one AdamW update.
struct AdamWSettings {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;  ///< where it is not given for each range
  int64_t step = 1;         ///< 1 for the first update (bias correction)
};

/// A flat range of one parameter, as adamw() in ops.h updates it.
struct AdamWRange {
  Tensor value, master, m, v, grad;
  double weight_decay = 0;
};

/// The kernels of one device. ops.h and expert_ops.h document each operation, check shapes and
/// dtypes, and are the only callers: an implementation may rely on its checks and must accept zero
/// rows.
///
/// Operations that are compositions of others have a default here; a device overrides them
/// where one fused kernel does better.
class Backend {
 public:
  virtual ~Backend() = default;

  /// From now on several operations may be one, and run on faster kernels that the program adds for
  /// this device. Both round otherwise. false: no longer.
  virtual void fuse(bool fused) { fused_ = fused; }
  bool fused() const { return fused_; }
  /// Whether fuse() finds such kernels for attention with heads this wide, and with this promise.
  virtual bool fuses_attention(DType /*dtype*/, int64_t /*head_dim*/,
                               int64_t /*value_dim*/ = 0) const {
    return false;
  }

  ///@{
  /// The operation of this name in ops.h. `begins` are those of its documents, or undefined.
  virtual void fill(Tensor y, double value) = 0;
  virtual void copy(Tensor y, const Tensor& x) = 0;
  virtual void add(Tensor y, const Tensor& a, const Tensor& b) = 0;
  virtual void accumulate(Tensor sum, const Tensor& x) = 0;
  virtual void matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate) = 0;
  /// c = addend + a b; addend has c's shape and dtype. Default: a copy, and a product added to it.
  virtual void matmul_add(Tensor c, const Tensor& a, const Tensor& b, const Tensor& addend);

  virtual void embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens,
                                 int64_t vocab_offset) = 0;
  virtual void embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens,
                                  int64_t vocab_offset, bool accumulate) = 0;

  virtual void rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight,
                               double eps) = 0;
  virtual void rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x,
                                      const Tensor& weight, const Tensor& rstd,
                                      const Tensor& dresidual) = 0;
  virtual void rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x,
                                       const Tensor& rstd, bool accumulate) = 0;

  virtual void rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions,
                    bool inverse) = 0;

  virtual void swiglu_forward(Tensor y, const Tensor& gate_up) = 0;
  virtual void swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) = 0;

  virtual void causal_softmax_forward(Tensor probs, Tensor lse, const Tensor& scores, double scale,
                                      const Positions& queries, const Positions& keys,
                                      const Tensor& begins) = 0;
  virtual void causal_softmax_backward(Tensor dscores, const Tensor& dprobs, const Tensor& probs,
                                       const Tensor& delta, double scale) = 0;
  virtual void attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k,
                                 const Tensor& v, double scale, const Positions& queries,
                                 const Positions& keys, const Tensor& begins) = 0;
  virtual void attention_merge(Tensor out, Tensor lse, const Tensor& part_out,
                               const Tensor& part_lse) = 0;
  virtual void attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse) = 0;
  virtual void attention_delta(Tensor delta, const Tensor& dout, const Tensor& out) = 0;
  virtual void attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                  const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& lse, const Tensor& delta, double scale,
                                  const Positions& queries, const Positions& keys, bool accumulate,
                                  const Tensor& begins) = 0;
  /// Default: one matmul per sample and head, softmax, another matmul.
  virtual void naive_attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q,
                                       const Tensor& k, const Tensor& v, double scale,
                                       const Positions& queries, const Positions& keys,
                                       const Tensor& begins);
  /// dk and dv take sums over the query heads that share a kv head; dscores [B, N, S, K] (dtype of
  /// probs) is a workspace.
  virtual void naive_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dscores,
                                        const Tensor& dout, const Tensor& probs, const Tensor& q,
                                        const Tensor& k, const Tensor& v, const Tensor& delta,
                                        double scale, bool accumulate);

  virtual void dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random,
                       int64_t first_row) = 0;

  virtual void cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                                     const Tensor& logits, const Tensor& targets,
                                     int64_t vocab_offset) = 0;
  virtual void cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max) = 0;
  virtual void cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max,
                                  const Tensor& row_sum, const Tensor& target_logit,
                                  double scale) = 0;
  virtual void cross_entropy_backward(Tensor dlogits, const Tensor& logits, const Tensor& targets,
                                      const Tensor& lse, int64_t vocab_offset, double scale) = 0;

  virtual void sum_squares(Tensor sum, std::span<const Tensor> xs, bool accumulate) = 0;
  virtual void clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums,
                                double max_norm) = 0;
  virtual void adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
                     const AdamWSettings& settings) = 0;
  ///@}

  ///@{
  /// The operation of this name in expert_ops.h.
  virtual void router_scores(Tensor scores, const Tensor& logits, RouterScore kind) = 0;
  virtual void router_scores_backward(Tensor dlogits, const Tensor& dscores, const Tensor& scores,
                                      RouterScore kind) = 0;
  virtual void choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias,
                              int64_t groups, int64_t allowed) = 0;
  virtual void count_choices(Tensor counts, const Tensor& choices) = 0;
  virtual void drop_choices(Tensor choices, const Tensor& before, int64_t capacity) = 0;
  virtual void gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices,
                             bool normalised, double scale) = 0;
  virtual void gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates,
                              const Tensor& scores, const Tensor& choices, bool normalised,
                              double scale) = 0;

  virtual void assign_slots(Tensor slots, const Tensor& choices,
                            std::span<const int64_t> counts) = 0;
  virtual void permute(Tensor rows, const Tensor& x, const Tensor& slots) = 0;
  /// first: what each sum begins with, of y's shape and maybe y itself; undefined: 0.
  virtual void unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
                         const Tensor& first) = 0;
  virtual void unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy, const Tensor& rows,
                                  const Tensor& slots, const Tensor& gates) = 0;

  /// Default: a matmul per expert, of whole units of rows and perhaps a rest.
  virtual void grouped_linear_forward(Tensor y, const Tensor& x, const Tensor& weights,
                                      std::span<const int64_t> counts);
  virtual void grouped_linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weights,
                                             std::span<const int64_t> counts);
  virtual void grouped_linear_backward_weight(Tensor dweights, const Tensor& dy, const Tensor& x,
                                              std::span<const int64_t> counts, bool accumulate);
  /// Unit of which products over this many rows take multiples. Above 1 where each shape has to be
  /// prepared: an expert's rows depend on what tokens chose, so hardly a shape would come again.
  virtual int64_t unit_of_rows(int64_t /*rows*/) const { return 1; }

  virtual void balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load,
                                    double scale, bool normalised) = 0;
  virtual void balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load,
                                     double scale, bool normalised) = 0;
  virtual void z_loss_forward(Tensor loss, const Tensor& logits, double scale) = 0;
  virtual void z_loss_backward(Tensor dlogits, const Tensor& logits, double scale) = 0;
  virtual void router_entropy(Tensor sum, const Tensor& scores) = 0;
  virtual void balance_bias(Tensor bias, const Tensor& load, double rate) = 0;
  ///@}

  /// A promise that in each head whose keys are wider, values and the gradient of outputs are 0
  /// from this channel on, so that a kernel may leave these out; 0: no promise.
  virtual void promise_values(int64_t /*value_dim*/) {}

 private:
  bool fused_ = false;
};

/// The kernels for CPUs: oneDNN for matrix products, OpenMP and SIMD for the rest.
std::unique_ptr<Backend> make_cpu_backend();
/// Kernels that compute nothing, for tensors that have shapes alone.
std::unique_ptr<Backend> make_meta_backend();

}  // namespace usp
