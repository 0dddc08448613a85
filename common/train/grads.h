#pragma once

#include <functional>
#include <span>
#include <vector>

#include "train/parameter.h"

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
  /// A contribution to each of `parameters` (several where one matmul serves them all).
  struct Contribution {
    std::vector<Parameter*> parameters;
    Compute compute;
  };
  /// Contributions held back, in the order in which they were handed over.
  using Deferred = std::vector<Contribution>;

  explicit Grads(ParameterList& parameters);

  /// Starts a synchronisation window: each parameter expects uses * micro_batches contributions.
  /// With `rounds` above 1 each round expects that many: a parameter is ready at the end of every
  /// round, and the next round overwrites its gradient. Parameters go through rounds independently.
  void begin_window(int64_t micro_batches, int64_t rounds = 1);
  /// Computes the contribution, or keeps it where defer_to() says. Throws Error beyond the expected
  /// number.
  void add(std::vector<Parameter*> parameters, Compute compute);
  /// From here on contributions are kept in `deferred`; nullptr: computed at once, as in the
  /// beginning. A pipeline schedule sends the gradient of a layer's input on its way first, and
  /// computes the weights' when it has time.
  void defer_to(Deferred* deferred) { deferred_ = deferred; }
  /// Computes the contributions in `deferred` and empties it.
  void run(Deferred& deferred);
  /// Sees a parameter. Several observers are called in the order in which they were added.
  using Observer = std::function<void(Parameter&)>;
  /// Adds an observer of each parameter whose `grad` is about to be written for the first time in a
  /// round.
  void on_first(Observer observer) { on_first_.push_back(std::move(observer)); }
  /// Adds an observer of each parameter that becomes ready.
  void on_ready(Observer observer) { on_ready_.push_back(std::move(observer)); }
  /// Throws Error, naming the parameter, unless every one is ready.
  void end_window() const;

 private:
  void compute(const Contribution& contribution);
  /// Throws Error beyond the expected number, and where parameters of one matmul differ in it.
  void check_expected(const Contribution& contribution) const;
  /// No contribution of the running round has been computed, or all have been.
  bool between_rounds(const Parameter& parameter) const;

  ParameterList& parameters_;
  int64_t micro_batches_ = 0, rounds_ = 1;
  std::vector<int64_t> contributions_;  ///< per parameter, in this window
  Deferred* deferred_ = nullptr;
  std::vector<Observer> on_first_, on_ready_;
};

}  // namespace usp
