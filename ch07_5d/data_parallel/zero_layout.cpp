#include "data_parallel/zero_layout.h"

#include <algorithm>

#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// An empty tensor of one axis, zeroed so that padding is.
Tensor zeros(Category category, int64_t numel, DType dtype) {
  const CategoryScope scope(category);
  return Tensor::zeros({numel}, dtype);
}

/// A tied embedding: on some stages other parameters of its block lie beside it, on others none.
bool on_several_stages(const Parameter& parameter) {
  const auto has = [&](const char* group) {
    return std::ranges::find(parameter.grad_groups, group) != parameter.grad_groups.end();
  };
  return has("embedding") || parameter.readers.size() > 1;
}

bool of_one_unit(const Parameter& a, const Parameter& b) {
  return a.block == b.block && a.grad_groups.front() == b.grad_groups.front() &&
         a.uneven == b.uneven && !on_several_stages(a) && !on_several_stages(b);
}

}  // namespace

bool Unit::serves(int64_t block) const {
  return std::ranges::any_of(parameters, [&](const Parameter* parameter) {
    return std::ranges::find(parameter->readers, block) != parameter->readers.end();
  });
}

void Unit::slice_into(Tensor Parameter::*member, const Tensor& flat) {
  int64_t offset = 0;
  for (Parameter* parameter : parameters) {
    const Shape shape = parameter->local_shape();
    parameter->*member =
        flat.defined() ? flat.narrow(0, offset, shape.numel()).view(shape) : Tensor();
    offset += shape.numel();
  }
}

std::vector<Unit> cut_into_units(ParameterList& parameters) {
  std::vector<Unit> units;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i == 0 || !of_one_unit(parameters[i - 1], parameters[i])) units.emplace_back();
    Unit& unit = units.back();
    unit.parameters.push_back(&parameters[i]);
    unit.numel += parameters[i].local_shape().numel();
    unit.length = unit.numel;
  }
  return units;
}

int64_t rounds_of_step(const DataParallelConfig& config, int64_t micro_batches) {
  const bool once = kKept[config.zero_stage].gradients == Kept::whole;
  return once || config.reduce_after == "step" ? 1 : micro_batches;
}

bool adds_up_before_reduction(const TrainConfig& config) {
  return kKept[config.data_parallel.zero_stage].gradients == Kept::shard &&
         config.data_parallel.reduce_after == "step" && config.grad_accumulation == "both";
}

DType dtype_of_reduction(const TrainConfig& config) {
  // Reduced micro-batch by micro-batch, gradients travel before they are added to anything.
  const bool not_added = kKept[config.data_parallel.zero_stage].gradients == Kept::shard &&
                         config.data_parallel.reduce_after == "micro_batch";
  if (not_added && config.grad_accumulation == "both") return parse_dtype(config.dtype);
  return dtype_of_gradient_sum(config);
}

DType dtype_of_gradient_sum(const TrainConfig& config) {
  const DType dtype = parse_dtype(config.dtype);
  const bool weights_dtype =
      parse_grad_accumulation(config.grad_accumulation) == GradAccumulation::bf16;
  return weights_dtype ? dtype : accumulate_dtype(dtype);
}

ZeroLayout::ZeroLayout(const TrainConfig& config, ParameterList& parameters, const Mesh& mesh)
    : kept_(kKept[config.data_parallel.zero_stage]),
      dtype_(parse_dtype(config.dtype)),
      reduced_(dtype_of_reduction(config)),
      sum_(dtype_of_gradient_sum(config)),
      units_(cut_into_units(parameters)),
      unit_of_(parameters.size()) {
  for (Unit& unit : units_) {
    const std::string& group = unit.parameters.front()->grad_groups.front();
    const Groups& groups = groups_of(group, config.data_parallel, mesh);
    unit.shard_group = &groups.shard;
    unit.replicas = &groups.replicas;
    unit.length = (unit.numel + groups.shard.size() - 1) / groups.shard.size();
    allocate_weights(unit);
    allocate_gradients(unit, config.grad_accumulation == "both");
    share_out(unit);
    for (Parameter* parameter : unit.parameters) {
      unit_of_[parameter->index] = &unit - units_.data();
      if (unit.value_shard.device() != Device::meta) initialize(*parameter, config.seed);
    }
  }
  check_copies(parameters, mesh);
}

/// Neighboring ranks shard a copy: they lie within a node.
const ZeroLayout::Groups& ZeroLayout::groups_of(const std::string& name,
                                                const DataParallelConfig& config,
                                                const Mesh& mesh) {
  const auto found = groups_.find(name);
  if (found != groups_.end()) return found->second;
  const Communicator& all = mesh.group(name);
  const int size = config.shard_size == 0 ? all.size() : static_cast<int>(config.shard_size);
  if (all.size() % size != 0) {
    usage_error("shard_size={} must divide the {} ranks of {}; try {}", size, all.size(), name,
                list_divisors(all.size()));
  }
  const Communicator replicas = all.split("replica", [size](int rank) { return rank % size; });
  const Communicator shard =
      size == all.size() ? all : all.split("shard", [size](int rank) { return rank / size; });
  return groups_.emplace(name, Groups{shard, replicas}).first->second;
}

// [allocate_weights]
/// Whole weights, of which the shard is a part; or the shard, and the layers' `value` is undefined.
void ZeroLayout::allocate_weights(Unit& unit) {
  const int64_t whole = unit.length * unit.shard_group->size();
  const int64_t begin = unit.length * unit.shard_group->rank();
  if (kept_.weights == Kept::whole) {
    unit.values = zeros(Category::weights, whole, dtype_);
    unit.value_shard = unit.values.narrow(0, begin, unit.length);
    unit.slice_into(&Parameter::value, unit.values);
  } else {
    unit.value_shard = zeros(Category::weights, unit.length, dtype_);
  }
  const DType acc = accumulate_dtype(dtype_);
  unit.master_shard =
      dtype_ == acc ? unit.value_shard : zeros(Category::optimizer, unit.length, acc);
}
// [allocate_weights]

/// The same of gradients. With `both`, each micro-batch's have memory of their own as well.
void ZeroLayout::allocate_gradients(Unit& unit, bool both) {
  const int64_t whole = unit.length * unit.shard_group->size();
  const int64_t begin = unit.length * unit.shard_group->rank();
  if (kept_.gradients == Kept::shard) {
    unit.grad_shard = zeros(Category::gradients, unit.length, sum_);
    return;
  }
  unit.gradient = zeros(Category::gradients, whole, sum_);
  unit.grad_shard = unit.gradient.narrow(0, begin, unit.length);
  unit.slice_into(both ? &Parameter::main_grad : &Parameter::grad, unit.gradient);
  if (both) unit.slice_into(&Parameter::grad, zeros(Category::gradients, unit.numel, dtype_));
}

/// Which elements of each parameter this rank updates, and where they lie in its parts.
void ZeroLayout::share_out(Unit& unit) {
  const int64_t begin = unit.shard_group->rank() * unit.length;  // of the unit
  const int64_t end = std::min(begin + unit.length, unit.numel);
  int64_t offset = 0;
  for (Parameter* parameter : unit.parameters) {
    const int64_t numel = parameter->local_shape().numel();
    Shard& shard = parameter->shard;
    shard.begin = std::clamp<int64_t>(begin - offset, 0, numel);
    shard.end = std::max(shard.begin, std::clamp<int64_t>(end - offset, 0, numel));
    const int64_t at = shard.numel() == 0 ? 0 : offset + shard.begin - begin;
    shard.value = unit.value_shard.narrow(0, at, shard.numel());
    shard.master = unit.master_shard.narrow(0, at, shard.numel());
    shard.grad = unit.grad_shard.narrow(0, at, shard.numel());
    if (unit.replicas->rank() > 0) parameter->counted = false;
    offset += numel;
  }
}

/// Ranks that add up the shards of a weight must hold the same elements of it.
void ZeroLayout::check_copies(const ParameterList& parameters, const Mesh& mesh) {
  for (const Parameter* parameter : parameters.by_name()) {
    for (size_t g = 1; g < parameter->grad_groups.size(); ++g) {
      const Communicator& copies = mesh.group(parameter->grad_groups[g]);
      if (copies.size() == 1 || copies.engine().dry()) continue;
      const auto begin = double(parameter->shard.begin), end = double(parameter->shard.end);
      const HostScope on_host;
      const CategoryScope scope(Category::communication);
      const Tensor bounds =
          Tensor::from_host(std::vector<double>{begin, -begin, end, -end}, {4}, DType::f64);
      copies.all_reduce(bounds, ReduceOp::max);
      USP_CHECK(bounds.item(0) == -bounds.item(1) && bounds.item(2) == -bounds.item(3),
                "{}: the ranks of {} would shard it in different ways, for the parameters "
                "beside it are not cut evenly",
                parameter->name, parameter->grad_groups[g]);
    }
  }
}

}  // namespace usp
