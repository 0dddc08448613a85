#include "train/whole_state.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace usp {

namespace {

/// Calls body(kind, parameter, values) with all that this rank updates of each parameter: kind 0
/// are gradients, 1 weights, the others what the optimizer keeps.
void each_tensor(const TrainState& state,
                 const std::function<void(size_t, const Parameter&, const Tensor&)>& body) {
  int64_t begin = 0;  // in the optimizer's states, which lie side by side
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    const Parameter& parameter = state.parameters[i];
    const int64_t numel = parameter.shard.numel();
    if (numel == 0) continue;
    body(0, parameter, parameter.shard.grad);
    body(1, parameter, parameter.shard.master);
    for (size_t kind = 0; kind < state.optimizer.size(); ++kind) {
      body(2 + kind, parameter, state.optimizer[kind].values.narrow(0, begin, numel));
    }
    begin += numel;
  }
  for (const Parameter* buffer : state.buffers) body(1, *buffer, buffer->shard.master);
}

}  // namespace

WholeState::WholeState(const TrainState& alone) {
  for (const char* what : {"gradient", "weight"}) kinds_.push_back({what, {}});
  for (const OptimizerState& kept : alone.optimizer) kinds_.push_back({kept.name, {}});
  each_tensor(alone, [&](size_t kind, const Parameter& parameter, const Tensor& values) {
    Whole& whole = kinds_[kind].of[parameter.name];
    whole.values = values.items();
    USP_CHECK(std::ssize(whole.values) == parameter.global_shape.numel(),
              "{} is not whole on this rank", parameter.name);
    for (double value : whole.values) whole.scale = std::max(whole.scale, std::abs(value));
  });
  for (Kind& kind : kinds_) {
    double largest = 0;
    for (const auto& [name, whole] : kind.of) largest = std::max(largest, whole.scale);
    for (auto& [name, whole] : kind.of) whole.scale = std::max(whole.scale, 1e-5 * largest);
  }
}

WholeState::Comparison WholeState::compare(const TrainState& state, double tolerance) const {
  Comparison comparison;
  each_tensor(state, [&](size_t kind, const Parameter& parameter, const Tensor& values) {
    const Whole& whole = kinds_[kind].of.at(parameter.name);
    const std::vector<double> items = values.items();
    const Shape local_shape = parameter.local_shape();
    const size_t order = kind << 32 | size_t(parameter.index);
    double worst = 0;
    Difference difference{order, parameter.name, kinds_[kind].what, 0, 0, 0};
    for (size_t i = 0; i < items.size(); ++i) {
      const int64_t element =
          parameter.global_index(parameter.shard.begin + int64_t(i), local_shape);
      const double expected = whole.values[element], off = std::abs(items[i] - expected);
      const double relative = off == 0 ? 0 : std::isnan(off) ? HUGE_VAL : off / whole.scale;
      if (!(relative > worst)) continue;
      worst = relative;
      difference.element = element;
      difference.found = items[i];
      difference.expected = expected;
    }
    comparison.largest = std::max(comparison.largest, worst);
    if (worst <= tolerance) return;
    if (!comparison.first || order < comparison.first->order) comparison.first = difference;
  });
  return comparison;
}

}  // namespace usp
