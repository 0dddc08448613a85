#pragma once

#include <memory>

#include "context_parallel/group.h"

namespace usp {

/// How the keys and values of a ring's n places come by. In step s a rank has those of its place -
/// s: its own first, and every other place's once.
class KeyExchange {
 public:
  virtual ~KeyExchange() = default;
  /// Keys and values of the next step: [B, S', 2G, D], S' positions of one place.
  virtual Tensor next() = 0;
};

/// How their gradients, to which every place adds a share, come home.
class GradientExchange {
 public:
  virtual ~GradientExchange() = default;
  /// Zeros [B, S', 2G, D]: for this rank's share of the gradient of the step's keys and values.
  virtual Tensor share() = 0;
  /// The step is over: its share is in `share`.
  virtual void pass_on(const Tensor& share) = 0;
  /// The gradient of this rank's own keys and values, summed over all places.
  virtual Tensor own() = 0;
};

/// Keys and values travel around the ring, one place further in each step, while the block that is
/// here is computed. Two blocks are here at a time. Liu et al. (2023),
/// https://arxiv.org/abs/2310.01889.
class RingKeys : public KeyExchange {
 public:
  RingKeys(const ContextGroup& group, Tensor own) : group_(group), here_(std::move(own)) {}
  Tensor next() override;

 private:
  const ContextGroup& group_;
  Tensor here_, coming_;
  Handle passing_;
  int step_ = -1;
};

/// Each block's gradient goes after its block, one step behind: what the places before have added
/// arrives while this one computes its own share. The owner's share stays at home.
class RingGradients : public GradientExchange {
 public:
  RingGradients(const ContextGroup& group, const Shape& shape, DType dtype)
      : group_(group), shape_(shape), dtype_(dtype) {}
  Tensor share() override { return Tensor::zeros(shape_, dtype_); }
  void pass_on(const Tensor& share) override;
  Tensor own() override;

 private:
  const ContextGroup& group_;
  Shape shape_;
  DType dtype_;
  Tensor own_, coming_;
  Handle passing_;
  int step_ = 0;
};

/// All keys and values at once, by one all-gather, under which the own block is computed. All n
/// blocks are here at a time. The way of Llama 3 (Grattafiori et al., 2024,
/// https://arxiv.org/abs/2407.21783).
class GatheredKeys : public KeyExchange {
 public:
  GatheredKeys(const ContextGroup& group, Tensor own);
  Tensor next() override;

 private:
  const ContextGroup& group_;
  Tensor own_, all_;
  Handle gathering_;
  int step_ = 0;
};

/// The shares of all blocks lie side by side until the last is there; one reduce-scatter sums them.
class ScatteredGradients : public GradientExchange {
 public:
  ScatteredGradients(const ContextGroup& group, const Shape& shape, DType dtype);
  Tensor share() override;
  void pass_on(const Tensor&) override { ++step_; }
  Tensor own() override;

 private:
  const ContextGroup& group_;
  Shape shape_;
  Tensor all_;
  int step_ = 0;
};

/// Exchange by the run's cp_method. `own`: this rank's keys and values [B, S', 2G, D], contiguous.
std::unique_ptr<KeyExchange> exchange_keys(const ContextGroup& group, Tensor own);
/// For gradients of that shape.
std::unique_ptr<GradientExchange> exchange_gradients(const ContextGroup& group, const Shape& shape,
                                                     DType dtype);

}  // namespace usp
