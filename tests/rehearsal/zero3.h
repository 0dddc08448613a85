#pragma once

#include <optional>

#include "comm/mesh.h"
#include "model.h"
#include "ops.h"
#include "runtime.h"

/// ZeRO-3: a rank keeps 1/dp of every block's weights, gradients and optimizer states, and has the
/// whole of a block only while it runs.
namespace usp::rehearsal {

class Zero3 {
 public:
  Zero3(const Communicator& dp, Grads& grads) : dp_(dp) {
    grads.on_first([this](Parameter& parameter) { begin_gradient(unit_of(parameter)); });
    grads.on_ready([this](Parameter& parameter) { end_gradient(unit_of(parameter)); });
  }
  Zero3(const Zero3&) = delete;
  Zero3& operator=(const Zero3&) = delete;

  /// Gives parameters [first, end) of the list their shards: one unit, gathered as a whole.
  void add_unit(ParameterList& parameters, size_t first, size_t end, uint64_t seed) {
    Unit& unit = units_.emplace_back();
    for (size_t i = first; i < end; ++i) {
      unit.parameters.push_back(&parameters[i]);
      unit.numel += parameters[i].local_shape().numel();
    }
    const int64_t length = (unit.numel + dp_.size() - 1) / dp_.size();  // the last has padding
    unit.values = zeros(length, Category::weights);
    unit.grads = zeros(length, Category::gradients);
    const int64_t begin = dp_.rank() * length, after = std::min(begin + length, unit.numel);
    int64_t offset = 0;
    for (Parameter* parameter : unit.parameters) {
      const int64_t numel = parameter->local_shape().numel();
      Shard& shard = parameter->shard;
      shard.begin = std::clamp<int64_t>(begin - offset, 0, numel);
      shard.end = std::max(shard.begin, std::clamp<int64_t>(after - offset, 0, numel));
      const int64_t at =
          std::clamp<int64_t>(offset + shard.begin - begin, 0, length - shard.numel());
      shard.value = shard.master = unit.values.narrow(0, at, shard.numel());
      shard.grad = unit.grads.narrow(0, at, shard.numel());
      if (shard.value.device() != Device::meta) {
        std::vector<double> initial(shard.numel());
        initial_values(*parameter, seed, shard.begin, initial);
        shard.value.assign(initial);
      }
      offset += numel;
      unit_of_.push_back(&unit - units_.data());
    }
  }

  /// Makes `value` of the unit's parameters whole, until release(). Calls may nest.
  void gather(size_t unit_index) {
    Unit& unit = units_[unit_index];
    if (unit.users++ > 0) return;
    {
      const CategoryScope scope(Category::weights);
      unit.gathered = Tensor::empty({unit.values.numel() * dp_.size()}, DType::f64);
    }
    dp_.all_gather(unit.gathered, unit.values);
    point(unit, unit.gathered, &Parameter::value);
    most_gathered_ = std::max(most_gathered_, ++gathered_);
  }
  void release(size_t unit_index) {
    Unit& unit = units_[unit_index];
    if (--unit.users > 0) return;
    point(unit, {}, &Parameter::value);
    unit.gathered = {};
    --gathered_;
  }

  /// Before a step: nothing has been added to the gradients.
  void begin_step() {
    for (Unit& unit : units_) ops::fill(unit.grads, 0);
  }

  /// After a step's last micro-batch: sums shards over groups beyond the first.
  void finish(const Mesh& mesh) {
    for (Unit& unit : units_) {
      for (Parameter* parameter : unit.parameters) {
        for (size_t g = 1; g < parameter->grad_groups.size(); ++g) {
          mesh.group(parameter->grad_groups[g]).all_reduce(parameter->shard.grad);
        }
      }
    }
  }

  int64_t most_gathered() const { return most_gathered_; }  ///< units at a time, ever

 private:
  struct Unit {
    std::vector<Parameter*> parameters;
    int64_t numel = 0;
    Tensor values, grads;       ///< this rank's share
    Tensor gathered, gradient;  ///< of the whole unit, while in use
    int64_t users = 0;
    size_t ready = 0;
  };

  static Tensor zeros(int64_t numel, Category category) {
    const CategoryScope scope(category);
    return Tensor::zeros({numel}, DType::f64);
  }

  Unit& unit_of(const Parameter& parameter) { return units_[unit_of_[parameter.index]]; }

  /// Lets a tensor of every parameter be its part of `flat`, or nothing.
  static void point(Unit& unit, const Tensor& flat, Tensor Parameter::*member) {
    int64_t offset = 0;
    for (Parameter* parameter : unit.parameters) {
      const Shape shape = parameter->local_shape();
      parameter->*member =
          flat.defined() ? flat.narrow(0, offset, shape.numel()).view(shape) : flat;
      offset += shape.numel();
    }
  }

  void begin_gradient(Unit& unit) {
    if (unit.gradient.defined()) return;
    unit.gradient = zeros(unit.grads.numel() * dp_.size(), Category::gradients);
    point(unit, unit.gradient, &Parameter::grad);
  }

  /// One micro-batch's gradients are complete: every rank gets the sum of its own share.
  void end_gradient(Unit& unit) {
    if (++unit.ready < unit.parameters.size()) return;
    Tensor sum = Tensor::empty(unit.grads.shape(), DType::f64);
    dp_.reduce_scatter(sum, unit.gradient);
    ops::add(unit.grads, unit.grads, sum);
    point(unit, {}, &Parameter::grad);
    unit.gradient = {};
    unit.ready = 0;
  }

  Communicator dp_;
  std::vector<Unit> units_;
  std::vector<size_t> unit_of_;  ///< by parameter
  int64_t gathered_ = 0, most_gathered_ = 0;
};

/// A segment whose weights are there while it runs.
class GatheredSegment : public Segment {
 public:
  /// `zero` comes to life after the model.
  GatheredSegment(std::unique_ptr<Segment> segment, std::optional<Zero3>& zero,
                  std::vector<size_t> units)
      : segment_(std::move(segment)), zero_(zero), units_(std::move(units)) {}
  std::string_view name() const override { return segment_->name(); }

  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) override {
    for (size_t unit : units_) zero_->gather(unit);
    Tensor y = segment_->forward(x, saved, pass);
    for (size_t unit : units_) zero_->release(unit);
    return y;
  }

  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) override {
    for (size_t unit : units_) zero_->gather(unit);
    Tensor dx = segment_->backward(dy, saved, grads, pass);
    for (size_t unit : units_) zero_->release(unit);
    return dx;
  }

 private:
  std::unique_ptr<Segment> segment_;
  std::optional<Zero3>& zero_;
  std::vector<size_t> units_;
};

}  // namespace usp::rehearsal
