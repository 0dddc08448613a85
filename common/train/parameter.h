#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensor/tensor.h"

namespace usp {

/// The part of a global tensor's axis that this rank holds.
struct Slice {
  int axis;
  int64_t offset;
  int64_t length;
};

/// What this rank updates of a parameter: elements [begin, end) of its flattened local part. That
/// is all of it, unless the ranks that hold the same part split the work.
struct Shard {
  int64_t begin = 0;
  int64_t end = 0;
  Tensor value;   ///< [end - begin], in the run's dtype
  Tensor master;  ///< [end - begin], acc dtype: `value` itself unless that is bf16
  Tensor grad;    ///< [end - begin]: of the main gradients

  int64_t numel() const { return end - begin; }
};

/// A weight: what it is called, which part of it lives here, and the tensors that train it.
/// Initialisation, gradient sums, the optimizer, checkpoints and export read this and nothing else.
///
/// Layers read `value` and write `grad`; the optimizer reads and writes `shard`. Where ranks shard
/// a weight, value and grad are undefined while no layer needs them.
struct Parameter {
  std::string name;           ///< Hugging Face name, such as "model.norm.weight"
  Shape global_shape;         ///< of the whole weight, over all ranks
  double init_std = 0;        ///< normal(0, init_std); 0: all ones
  std::vector<Slice> slices;  ///< this rank's part; none: all of it
  bool uneven = false;        ///< whether other ranks hold a longer or shorter part of it
  /// Groups of ranks over which its gradient is summed, as Mesh names them. The first holds the
  /// ranks that work on other tokens with the same part.
  std::vector<std::string> grad_groups = {"dp_cp"};
  /// Whether this rank enters its shard into the gradient norm, and into checkpoints. Where ranks
  /// hold copies of an element, exactly one of them does.
  bool counted = true;

  int64_t index = 0;             ///< position in its ParameterList
  int64_t block = -1;            ///< the model's block that added it; -1: none
  std::vector<int64_t> readers;  ///< blocks of the model that use it; several where it is tied
  int64_t flat_begin = 0;        ///< of its first element in the flat tensors
  int64_t uses = 0;     ///< layers that read it: contributions to its gradient per micro-batch
  int64_t version = 0;  ///< grows with every update, for whoever caches what is made of the weight

  Tensor value;  ///< [local_shape()], the run's dtype
  Tensor grad;   ///< [local_shape()]: what layers write
  /// [local_shape()], acc dtype: the sum of what layers wrote in each micro-batch; undefined where
  /// `grad` itself holds the sum.
  Tensor main_grad;
  Shard shard;

  Shape local_shape() const;  ///< of this rank's part
  /// Row-major index in the whole weight of element `local` of this rank's part, which has
  /// `local_shape`.
  int64_t global_index(int64_t local, const Shape& local_shape) const;
  /// Where this rank's part begins along an axis of the whole weight.
  int64_t offset(int axis) const;
};

/// In what dtype gradients are kept and summed over micro-batches, where weights are bf16.
enum class GradAccumulation {
  f32,   ///< in acc dtype: 4 bytes a parameter, which the matmuls of backward write
  bf16,  ///< in the weights' dtype: 2 bytes, each addition rounded
  both,  ///< a micro-batch's in the weights' dtype, then added to sums in acc dtype: 6 bytes
};

/// From a flag's value: "f32", "bf16" or "both".
GradAccumulation parse_grad_accumulation(std::string_view name);

/// All parameters of a rank, in the order in which they were added. The tensors that allocate()
/// gives them are slices of three flat ones, side by side in that order: parameters added one after
/// the other can be read by one matmul (adjacent()), and any range of the flat gradients can be
/// reduced as one message. Those with the same first group lie together, so that one message has
/// the same receivers.
class ParameterList {
 public:
  /// Throws Error if the name is taken.
  Parameter& add(std::string name, const Shape& global_shape, double init_std,
                 std::vector<Slice> slices = {});
  Parameter& find(std::string_view name);  ///< throws Error if there is none
  bool has(std::string_view name) const;   ///< whether there is one of this name
  /// In an order that does not depend on which other parameters a rank holds: ranks that sum the
  /// gradients of several do so in this order.
  std::vector<Parameter*> by_name() const;

  /// Gives every parameter its tensors and its initial values: element i of the global tensor is
  /// init_std * normal(seed, name, i), computed in f64 and rounded once. Call once, after the last
  /// add().
  void allocate(DType dtype, uint64_t seed, GradAccumulation accumulation = GradAccumulation::f32);

  int64_t numel() const;  ///< elements held here
  /// Elements of the shards that this rank counts: over all ranks, every element of the model once.
  int64_t counted() const;
  size_t size() const { return parameters_.size(); }
  Parameter& operator[](size_t index) { return *parameters_[index]; }
  const Parameter& operator[](size_t index) const { return *parameters_[index]; }

  const Tensor& flat_values() const { return values_; }     ///< [numel], run dtype
  const Tensor& flat_masters() const { return masters_; }   ///< [numel], acc dtype
  const Tensor& flat_grads() const { return main_grads_; }  ///< [numel]: what is reduced and read

  /// Says that what was added, and what layers began to read, since the last call is this block's.
  void end_block(int64_t block);

 private:
  std::vector<int64_t> uses_before_;  ///< of each parameter, by the blocks that have ended
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::unordered_map<std::string_view, Parameter*> by_its_name_;  ///< mixtures have many
  Tensor values_, masters_, grads_, main_grads_;
};

/// Gives the shard its initial values, and the rest of `value` too where this rank holds it.
void initialize(Parameter& parameter, uint64_t seed);
/// The initial values of elements [begin, begin + values.size()) of the parameter's local part.
void initial_values(const Parameter& parameter, uint64_t seed, int64_t begin,
                    std::span<double> values);

/// The parameters' tensors as one, such as their values: they were added to their list one after
/// the other and lie side by side. Throws Error where they do not.
Tensor stacked(const std::vector<Parameter*>& parameters, Tensor Parameter::*member);

}  // namespace usp
