#include "tensor/backend.h"

namespace usp {

namespace {

/// Computes nothing: on meta a tensor has a shape and no data. The checks and counts of the
/// operations have already happened when a kernel is called. The composite defaults are replaced as
/// well, so that estimating a model of any size takes no time.
class MetaBackend : public Backend {
 public:
  void fill(Tensor, double) override {}
  void copy(Tensor, const Tensor&) override {}
  void add(Tensor, const Tensor&, const Tensor&) override {}
  void accumulate(Tensor, const Tensor&) override {}
  void matmul(Tensor, const Tensor&, const Tensor&, bool) override {}
  void matmul_add(Tensor, const Tensor&, const Tensor&, const Tensor&) override {}
  void embedding_forward(Tensor, const Tensor&, const Tensor&, int64_t) override {}
  void embedding_backward(Tensor, const Tensor&, const Tensor&, int64_t, bool) override {}
  void rmsnorm_forward(Tensor, Tensor, const Tensor&, const Tensor&, double) override {}
  void rmsnorm_backward_input(Tensor, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&) override {}
  void rmsnorm_backward_weight(Tensor, const Tensor&, const Tensor&, const Tensor&, bool) override {
  }
  void rope(Tensor, const Tensor&, const Tensor&, const Positions&, bool) override {}
  void swiglu_forward(Tensor, const Tensor&) override {}
  void swiglu_backward(Tensor, const Tensor&, const Tensor&) override {}
  void causal_softmax_forward(Tensor, Tensor, const Tensor&, double, const Positions&,
                              const Positions&, const Tensor&) override {}
  void causal_softmax_backward(Tensor, const Tensor&, const Tensor&, const Tensor&,
                               double) override {}
  void attention_forward(Tensor, Tensor, const Tensor&, const Tensor&, const Tensor&, double,
                         const Positions&, const Positions&, const Tensor&) override {}
  void attention_merge(Tensor, Tensor, const Tensor&, const Tensor&) override {}
  void attention_rescale(Tensor, const Tensor&, const Tensor&) override {}
  void attention_delta(Tensor, const Tensor&, const Tensor&) override {}
  void attention_backward(Tensor, Tensor, Tensor, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, const Tensor&, const Tensor&, double, const Positions&,
                          const Positions&, bool, const Tensor&) override {}
  void naive_attention_forward(Tensor, Tensor, Tensor, const Tensor&, const Tensor&, const Tensor&,
                               double, const Positions&, const Positions&, const Tensor&) override {
  }
  void naive_attention_backward(Tensor, Tensor, Tensor, Tensor, const Tensor&, const Tensor&,
                                const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                                bool) override {}
  void dropout(Tensor, const Tensor&, double, const RandomStream&, int64_t) override {}
  void cross_entropy_forward(Tensor, Tensor, Tensor, const Tensor&, const Tensor&,
                             int64_t) override {}
  void cross_entropy_rescale(Tensor, const Tensor&, const Tensor&) override {}
  void cross_entropy_loss(Tensor, Tensor, const Tensor&, const Tensor&, const Tensor&,
                          double) override {}
  void cross_entropy_backward(Tensor, const Tensor&, const Tensor&, const Tensor&, int64_t,
                              double) override {}
  void sum_squares(Tensor, std::span<const Tensor>, bool) override {}
  void clip_coefficient(Tensor, Tensor, const Tensor&, double) override {}
  void adamw(std::span<const AdamWRange>, const Tensor&, const AdamWSettings&) override {}
  void router_scores(Tensor, const Tensor&, RouterScore) override {}
  void router_scores_backward(Tensor, const Tensor&, const Tensor&, RouterScore) override {}
  void choose_experts(Tensor, const Tensor&, const Tensor&, int64_t, int64_t) override {}
  void count_choices(Tensor, const Tensor&) override {}
  void drop_choices(Tensor, const Tensor&, int64_t) override {}
  void gates_forward(Tensor, const Tensor&, const Tensor&, bool, double) override {}
  void gates_backward(Tensor, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                      double) override {}
  void assign_slots(Tensor, const Tensor&, std::span<const int64_t>) override {}
  void permute(Tensor, const Tensor&, const Tensor&) override {}
  void unpermute(Tensor, const Tensor&, const Tensor&, const Tensor&, const Tensor&) override {}
  void unpermute_backward(Tensor, Tensor, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&) override {}
  void grouped_linear_forward(Tensor, const Tensor&, const Tensor&,
                              std::span<const int64_t>) override {}
  void grouped_linear_backward_input(Tensor, const Tensor&, const Tensor&,
                                     std::span<const int64_t>) override {}
  void grouped_linear_backward_weight(Tensor, const Tensor&, const Tensor&,
                                      std::span<const int64_t>, bool) override {}
  void balance_loss_forward(Tensor, const Tensor&, const Tensor&, double, bool) override {}
  void balance_loss_backward(Tensor, const Tensor&, const Tensor&, double, bool) override {}
  void z_loss_forward(Tensor, const Tensor&, double) override {}
  void z_loss_backward(Tensor, const Tensor&, double) override {}
  void router_entropy(Tensor, const Tensor&) override {}
  void balance_bias(Tensor, const Tensor&, double) override {}
};

}  // namespace

std::unique_ptr<Backend> make_meta_backend() { return std::make_unique<MetaBackend>(); }

}  // namespace usp
