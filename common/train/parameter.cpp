#include "train/parameter.h"

#include <algorithm>

#include "base/rng.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// Elements of a flat tensor, the first of which is element `first` of the local part.
struct DrawnPart {
  int64_t first;
  Tensor tensor;
};

/// Fills the parts with the initial values, each drawn once: the first part contains the others.
void draw(const Parameter& parameter, uint64_t seed, const std::vector<DrawnPart>& parts) {
  constexpr int64_t kChunk = int64_t{1} << 20;
  std::vector<double> values;
  const DrawnPart& whole = parts.front();
  for (int64_t begin = 0; begin < whole.tensor.numel(); begin += kChunk) {
    values.resize(std::min(kChunk, whole.tensor.numel() - begin));
    const int64_t first = whole.first + begin, last = first + std::ssize(values);
    initial_values(parameter, seed, first, values);
    for (const auto& [part_first, tensor] : parts) {
      const int64_t from = std::max(first, part_first);
      const int64_t count = std::min(last, part_first + tensor.numel()) - from;
      if (count <= 0) continue;
      tensor.narrow(0, from - part_first, count)
          .assign(std::span(values).subspan(from - first, count));
    }
  }
}

}  // namespace

void initialize(Parameter& parameter, uint64_t seed) {
  const Shard& shard = parameter.shard;
  std::vector<DrawnPart> parts;
  if (parameter.value.defined()) {
    parts.push_back({0, parameter.value.view({parameter.value.numel()})});
  } else {
    parts.push_back({shard.begin, shard.value});
  }
  if (shard.master.dtype() != shard.value.dtype()) parts.push_back({shard.begin, shard.master});
  draw(parameter, seed, parts);
}

GradAccumulation parse_grad_accumulation(std::string_view name) {
  if (name == "bf16") return GradAccumulation::bf16;
  return name == "both" ? GradAccumulation::both : GradAccumulation::f32;
}

Shape Parameter::local_shape() const {
  Shape shape = global_shape;
  for (const Slice& slice : slices) shape[slice.axis] = slice.length;
  return shape;
}

int64_t Parameter::global_index(int64_t local, const Shape& local_shape) const {
  int64_t global = 0, stride = 1;
  for (int axis = local_shape.rank() - 1; axis >= 0; --axis) {
    global += (offset(axis) + local % local_shape[axis]) * stride;
    local /= local_shape[axis];
    stride *= global_shape[axis];
  }
  return global;
}

int64_t Parameter::offset(int axis) const {
  int64_t offset = 0;
  for (const Slice& slice : slices) {
    if (slice.axis == axis) offset += slice.offset;
  }
  return offset;
}

void initial_values(const Parameter& parameter, uint64_t seed, int64_t begin,
                    std::span<double> values) {
  if (parameter.init_std == 0) {
    std::fill(values.begin(), values.end(), 1.0);
    return;
  }
  const RandomStream stream(seed, parameter.name);
  const Shape shape = parameter.local_shape();
  const int64_t end = begin + std::ssize(values);
  // Neighbors in a row are neighbors in the whole.
  const int64_t row = std::max<int64_t>(1, shape[shape.rank() - 1]);
#pragma omp parallel for
  for (int64_t number = begin / row; number < (end + row - 1) / row; ++number) {
    const int64_t first = std::max(begin, number * row), last = std::min(end, (number + 1) * row);
    const auto part = values.subspan(first - begin, last - first);
    stream.normals(parameter.global_index(first, shape), part);
    for (double& value : part) value *= parameter.init_std;
  }
}

Parameter& ParameterList::add(std::string name, const Shape& global_shape, double init_std,
                              std::vector<Slice> slices) {
  USP_CHECK(!has(name), "parameter {} is added twice", name);
  for (const Slice& slice : slices) {
    USP_CHECK(slice.axis < global_shape.rank() && slice.offset >= 0 && slice.length >= 0 &&
                  slice.offset + slice.length <= global_shape[slice.axis],
              "{}: slice [{}, +{}) of axis {} of {}", name, slice.offset, slice.length, slice.axis,
              global_shape.to_string());
  }
  auto parameter = std::make_unique<Parameter>();
  parameter->name = std::move(name);
  parameter->global_shape = global_shape;
  parameter->init_std = init_std;
  parameter->slices = std::move(slices);
  parameter->index = static_cast<int64_t>(parameters_.size());
  parameters_.push_back(std::move(parameter));
  Parameter& added = *parameters_.back();
  by_its_name_.emplace(added.name, &added);
  return added;
}

Parameter& ParameterList::find(std::string_view name) {
  const auto found = by_its_name_.find(name);
  if (found == by_its_name_.end()) fail("there is no parameter {}", name);
  return *found->second;
}

bool ParameterList::has(std::string_view name) const { return by_its_name_.contains(name); }

std::vector<Parameter*> ParameterList::by_name() const {
  std::vector<Parameter*> sorted;
  for (const auto& parameter : parameters_) sorted.push_back(parameter.get());
  std::ranges::sort(sorted, {}, &Parameter::name);
  return sorted;
}

int64_t ParameterList::numel() const {
  int64_t numel = 0;
  for (const auto& parameter : parameters_) numel += parameter->local_shape().numel();
  return numel;
}

int64_t ParameterList::counted() const {
  int64_t counted = 0;
  for (const auto& parameter : parameters_) {
    if (parameter->counted) counted += parameter->shard.numel();
  }
  return counted;
}

void ParameterList::allocate(DType dtype, uint64_t seed, GradAccumulation accumulation) {
  const DType acc = accumulate_dtype(dtype);
  {
    const CategoryScope scope(Category::weights);
    values_ = Tensor::empty({numel()}, dtype);
  }
  {
    const CategoryScope scope(Category::optimizer);
    masters_ = dtype == acc ? values_ : Tensor::empty({numel()}, acc);
  }
  {
    const CategoryScope scope(Category::gradients);
    // The first contribution overwrites.
    grads_ = Tensor::empty({numel()}, accumulation == GradAccumulation::f32 ? acc : dtype);
    main_grads_ = accumulation == GradAccumulation::both ? Tensor::empty({numel()}, acc) : grads_;
  }
  std::vector<Parameter*> order;
  std::vector<std::string> groups;  // in the order of their first parameters
  for (const auto& parameter : parameters_) {
    order.push_back(parameter.get());
    groups.push_back(parameter->grad_groups.front());
  }
  std::ranges::stable_sort(order, {}, [&](const Parameter* parameter) {
    return std::ranges::find(groups, parameter->grad_groups.front()) - groups.begin();
  });
  int64_t offset = 0;
  for (Parameter* parameter : order) {
    const Shape shape = parameter->local_shape();
    const auto part = [&](const Tensor& flat) { return flat.narrow(0, offset, shape.numel()); };
    parameter->flat_begin = offset;
    parameter->shard = {0, shape.numel(), part(values_), part(masters_), part(main_grads_)};
    parameter->value = parameter->shard.value.view(shape);
    parameter->grad = part(grads_).view(shape);
    if (accumulation == GradAccumulation::both) {
      parameter->main_grad = parameter->shard.grad.view(shape);
    }
    offset += shape.numel();
    if (values_.device() != Device::meta) initialize(*parameter, seed);
  }
}

void ParameterList::end_block(int64_t block) {
  const size_t added_before = uses_before_.size();
  uses_before_.resize(size());
  for (size_t i = 0; i < size(); ++i) {
    Parameter& parameter = (*this)[i];
    if (i >= added_before) parameter.block = block;
    if (parameter.uses > uses_before_[i]) parameter.readers.push_back(block);
    uses_before_[i] = parameter.uses;
  }
}

Tensor stacked(const std::vector<Parameter*>& parameters, Tensor Parameter::*member) {
  std::vector<Tensor> parts;
  for (const Parameter* parameter : parameters) parts.push_back(parameter->*member);
  return adjacent(parts);
}

}  // namespace usp
