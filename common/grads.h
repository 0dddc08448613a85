#pragma once

#include <functional>
#include <span>
#include <vector>

#include "parameter.h"

namespace usp {

/// Where layers deliver their weight gradients.
///
/// A parameter's gradient is a sum of contributions: one per layer that uses it (a tied embedding
/// is used twice) and micro-batch. A layer hands over each contribution as a closure, so that this
/// object decides whether it overwrites or adds, and when it runs. After the last expected
/// contribution the parameter is ready: its gradient is final and may be reduced, whichever
/// micro-batch or layer came last.
class Grads {
 public:
  /// Computes one contribution into the parameters' `grad`: overwriting it, or adding to it.
  using Compute = std::function<void(bool accumulate)>;

  explicit Grads(ParameterList& parameters);

  /// Starts a synchronisation window: each parameter expects uses * micro_batches contributions.
  void begin_window(int64_t micro_batches);
  /// One contribution to each of `parameters` (several where one matmul serves them all). Throws
  /// Error beyond the expected number.
  void add(std::span<Parameter* const> parameters, const Compute& compute);
  /// Called with each parameter as it becomes ready.
  void on_ready(std::function<void(Parameter&)> callback) { on_ready_ = std::move(callback); }
  /// Throws Error, naming the parameter, unless every one is ready.
  void end_window() const;

 private:
  ParameterList& parameters_;
  int64_t micro_batches_ = 0;
  std::vector<int64_t> contributions_;  ///< per parameter, in this window
  std::function<void(Parameter&)> on_ready_;
};

}  // namespace usp
