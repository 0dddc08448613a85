#pragma once

#include <map>
#include <string>

#include "rehearsal_trainer.h"
#include "technique/data_parallel/data_parallel_parity.h"

/// What training leaves behind, and how a rank's part of it compares with the whole.
namespace usp::rehearsal {

using test::expect_close;
using Values = std::vector<double>;

/// State of one parameter: the gradient before clipping, both moments, the weight.
struct Trained {
  Shape shape;
  Values grad, m, v, value;
};

struct State {
  Values losses, grad_norms;
  std::map<std::string, Trained> parameters;  ///< by name
};

/// Weights far from their initial values, at which many a mistake is too small to see: a function
/// of the name and the element, whoever holds it.
inline void spread_weights(ParameterList& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter wide = parameters[i];
    const bool norm = wide.init_std == 0;
    wide.init_std = norm ? 0.3 : 0.5;
    Values values(wide.shard.numel());
    initial_values(wide, /*seed=*/9, wide.shard.begin, values);
    for (double& value : values) value += norm ? 1 : 0;
    wide.shard.value.assign(values);
    ++parameters[i].version;
  }
}

/// Calls visit(parameter, its first and second moments) for all.
template <class Visit>
void each_parameter(ParameterList& parameters, const Optimizer& optimizer, Visit visit) {
  int64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t numel = parameters[i].shard.numel();
    const auto part = [&](const Tensor& flat) { return flat.narrow(0, offset, numel).items(); };
    visit(parameters[i], part(optimizer.first_moments()), part(optimizer.second_moments()));
    offset += numel;
  }
}

/// Trains and keeps everything; for a process that holds the whole model.
template <class AnyTrainer>
State train_whole(AnyTrainer& trainer, int64_t steps) {
  State state;
  spread_weights(trainer.parameters());
  for (int64_t step = 0; step < steps; ++step) {
    trainer.train_step(step);
    state.losses.push_back(trainer.loss());
    state.grad_norms.push_back(trainer.grad_norm());
  }
  each_parameter(trainer.parameters(), trainer.optimizer(),
                 [&](const Parameter& p, const Values& m, const Values& v) {
                   state.parameters[p.name] = {p.global_shape, p.shard.grad.items(), m, v,
                                               p.shard.value.items()};
                 });
  return state;
}

/// Elements of the whole tensor that a rank's shard of the parameter holds.
inline Values part_of(const Values& whole, const Parameter& parameter) {
  Tensor tensor = Tensor::from_host(whole, parameter.global_shape, DType::f64);
  for (const Slice& slice : parameter.slices) {
    tensor = tensor.narrow(slice.axis, slice.offset, slice.length);
  }
  const Values local = tensor.items();
  return {local.begin() + parameter.shard.begin, local.begin() + parameter.shard.end};
}

/// Trains over the ranks and throws Error at the first difference from `expected`.
inline void check_same_training(RehearsalTrainer& trainer, const State& expected,
                                const std::string& what, double tolerance = 1e-10) {
  spread_weights(trainer.parameters());
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    trainer.train_step(static_cast<int64_t>(step));
    expect_close({trainer.loss()}, {expected.losses[step]}, tolerance, what + ": loss");
    expect_close({trainer.grad_norm()}, {expected.grad_norms[step]}, tolerance, what + ": norm");
  }
  int64_t counted = 0, total = 0;
  each_parameter(trainer.parameters(), trainer.optimizer(),
                 [&](const Parameter& p, const Values& m, const Values& v) {
                   const Trained& whole = expected.parameters.at(p.name);
                   const std::string name = what + ": " + p.name;
                   expect_close(p.shard.grad.items(), part_of(whole.grad, p), tolerance,
                                name + ".grad");
                   expect_close(m, part_of(whole.m, p), tolerance, name + ".m");
                   expect_close(v, part_of(whole.v, p), tolerance, name + ".v");
                   expect_close(p.shard.value.items(), part_of(whole.value, p), tolerance, name);
                   if (p.counted) counted += p.shard.numel();
                 });
  for (const auto& [name, parameter] : expected.parameters) total += parameter.shape.numel();
  const double counted_anywhere = trainer.mesh().world().sum(double(counted));
  USP_CHECK(counted_anywhere == double(total), "{}: {} elements counted, the model has {}", what,
            counted_anywhere, total);
}

}  // namespace usp::rehearsal
