#include "zero.h"

#include <algorithm>
#include <utility>

#include "ops.h"
#include "runtime.h"
#include "zero_accountant.h"

namespace usp {

namespace {

constexpr int64_t kRoot = 0;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Neighbouring ranks share out a copy: they lie within a node.
Communicator ranks_of_a_copy(const DataParallelConfig& config, const Communicator& dp) {
  const auto size = static_cast<int>(shard_size(config));
  if (size == dp.size()) return dp;
  return dp.split("shard", [size](int rank) { return rank / size; });
}

Communicator holders_of_a_shard(const DataParallelConfig& config, const Communicator& dp) {
  const auto size = static_cast<int>(shard_size(config));
  return dp.split("replica", [size](int rank) { return rank % size; });
}

/// An empty tensor of one axis; `name`: in the memory profile.
Tensor buffer(Category category, int64_t numel, DType dtype, std::string_view name = {}) {
  const CategoryScope scope(category);
  return Tensor::empty({numel}, dtype, name);
}

Tensor zeros(Category category, int64_t numel, DType dtype) {
  const CategoryScope scope(category);
  return Tensor::zeros({numel}, dtype);
}

}  // namespace

// [unit]
/// Parameters whose weights are gathered, and whose gradients are reduced, as one message.
struct Zero::Unit {
  std::vector<Parameter*> parameters;
  int64_t numel = 0;   ///< of the parameters; padding follows
  int64_t length = 0;  ///< of a rank's part

  Tensor values;        ///< [S length]; stage 3: while they are gathered
  Tensor value_shard;   ///< [length]: this rank's part of them
  Tensor master_shard;  ///< [length], acc dtype
  Handle gathering;
  int64_t version = 0;  ///< of the weights in `values`

  Tensor gradient;    ///< [S length]; stages 2 and 3: while it is written and reduced
  Tensor grad_shard;  ///< [length]: this rank's part of the sum
  Tensor addend;      ///< [length]: what a reduction returns where it has to be added to the sum
  Handle reduction;
  size_t begun = 0, ready = 0;  ///< parameters whose gradients are, in this round
  int64_t rounds_done = 0;      ///< in this step

  /// Lets a tensor of each parameter be its part of `flat`, or nothing.
  void slice_into(Tensor Parameter::*member, const Tensor& flat) {
    int64_t offset = 0;
    for (Parameter* parameter : parameters) {
      const Shape shape = parameter->local_shape();
      parameter->*member =
          flat.defined() ? flat.narrow(0, offset, shape.numel()).view(shape) : Tensor();
      offset += shape.numel();
    }
  }
};
// [unit]

// [boundary]
/// The first or the last segment of a block: between the two its weights are there. Going forward
/// they are freed after the last one, going backward after the first.
class Zero::Boundary : public Segment {
 public:
  enum End { first, last };

  Boundary(Zero& zero, int64_t unit, End end) : zero_(zero), unit_(unit), end_(end) {}
  std::string_view name() const override { return end_ == first ? "gather" : "free"; }

  Tensor forward(const Tensor& x, Saved&, const Pass& pass) override {
    const bool in_backward = pass.mode == Pass::Mode::recompute;
    Unit& unit = zero_.units_[unit_];
    if (end_ == first) {
      // A pass without a backward has left the root there; a text that grows uses it again.
      if (unit_ == kRoot && pass.mode != Pass::Mode::decode) zero_.free(unit);
      zero_.prepare(unit_, in_backward ? unit_ - 1 : unit_ + 1);
    } else if (!in_backward) {
      // Backward begins with the last block.
      const bool last_block = unit_ + 1 == std::ssize(zero_.units_);
      if (!last_block || pass.mode != Pass::Mode::train) zero_.free(unit);
    }
    return x;
  }

  Tensor backward(const Tensor& dy, Saved&, Grads&, const Pass&) override {
    if (end_ == last) {
      zero_.prepare(unit_, unit_ - 1);
    } else {
      zero_.free(zero_.units_[unit_]);
    }
    return dy;
  }

 private:
  Zero& zero_;
  int64_t unit_;
  End end_;
};
// [boundary]

// [share_out]
Zero::Zero(const TrainConfig& config, Model& model, Grads& grads, Optimizer& optimizer,
           const Mesh& mesh)
    : DataParallelStrategy(model.parameters(), grads, mesh),
      config_(config),
      stage_(config.data_parallel.zero_stage),
      dtype_(parse_dtype(config.dtype)),
      reduced_dtype_(dtype_of_reduction(config)),
      sum_dtype_(dtype_of_gradient_sum(config)),
      shard_group_(ranks_of_a_copy(config.data_parallel, mesh.dp_cp())),
      replicas_(holders_of_a_shard(config.data_parallel, mesh.dp_cp())) {
  cut_into_units();
  for (Unit& unit : units_) {
    allocate(unit);
    share_out(unit);
    for (Parameter* parameter : unit.parameters) {
      if (unit.value_shard.device() != Device::meta) initialize(*parameter, config.seed);
    }
  }
  surround_blocks(model);
  grads.on_first([this](Parameter& parameter) { begin_gradient(unit_of(parameter)); });
  grads.on_ready([this](Parameter& parameter) { reduce_gradient(unit_of(parameter)); });
  if (stage_ < 3 && config.data_parallel.gather_overlap == "optimizer") {
    optimizer.on_updated([this](const Parameter& parameter) {
      Unit& unit = unit_of(parameter);
      if (&parameter == unit.parameters.back()) gather(unit);
    });
  }
}

Zero::~Zero() = default;

int64_t Zero::num_buckets() const { return std::ssize(units_); }

void Zero::cut_into_units() {
  const int64_t blocks = config_.model.num_layers;
  units_.resize(1 + blocks);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Unit& unit = unit_of(parameters_[i]);
    USP_CHECK(parameters_[i].grad_groups.front() == "dp_cp", "{}: summed over {}",
              parameters_[i].name, parameters_[i].grad_groups.front());
    unit.parameters.push_back(&parameters_[i]);
    unit.numel += parameters_[i].local_shape().numel();
  }
  for (Unit& unit : units_) unit.length = divide_up(unit.numel, shard_group_.size());
}

/// Which elements of each parameter this rank updates, and where they lie in its parts.
void Zero::share_out(Unit& unit) {
  const int64_t begin = shard_group_.rank() * unit.length;  // of the unit
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
    if (replicas_.rank() > 0) parameter->counted = false;
    offset += numel;
  }
}
// [share_out]

void Zero::allocate(Unit& unit) {
  const int64_t whole = unit.length * shard_group_.size();
  const int64_t begin = unit.length * shard_group_.rank();
  if (stage_ == 3) {
    unit.value_shard = zeros(Category::weights, unit.length, dtype_);
  } else {
    unit.values = zeros(Category::weights, whole, dtype_);
    unit.value_shard = unit.values.narrow(0, begin, unit.length);
    unit.slice_into(&Parameter::value, unit.values);
  }
  const DType acc = accumulate_dtype(dtype_);
  unit.master_shard =
      dtype_ == acc ? unit.value_shard : zeros(Category::optimizer, unit.length, acc);
  if (stage_ >= 2) {
    unit.grad_shard = zeros(Category::gradients, unit.length, sum_dtype_);
    return;
  }
  unit.gradient = zeros(Category::gradients, whole, sum_dtype_);
  unit.grad_shard = unit.gradient.narrow(0, begin, unit.length);
  if (config_.grad_accumulation == "both") {
    unit.slice_into(&Parameter::main_grad, unit.gradient);
    unit.slice_into(&Parameter::grad, buffer(Category::gradients, unit.numel, dtype_));
  } else {
    unit.slice_into(&Parameter::grad, unit.gradient);
  }
}

void Zero::surround_blocks(Model& model) {
  std::vector<Block>& blocks = model.chunk(0);
  const auto boundary = [this](int64_t unit, Boundary::End end) {
    return std::make_unique<Boundary>(*this, unit, end);
  };
  blocks.front().insert(blocks.front().begin(), boundary(kRoot, Boundary::first));
  for (int64_t unit = 1; unit < std::ssize(units_); ++unit) {
    blocks[unit].insert(blocks[unit].begin(), boundary(unit, Boundary::first));
    if (stage_ == 3) blocks[unit].push_back(boundary(unit, Boundary::last));
  }
}

Zero::Unit& Zero::unit_of(const Parameter& parameter) {
  const bool of_a_block = parameter.block > 0 && parameter.block < std::ssize(units_);
  return units_[of_a_block ? parameter.block : kRoot];
}

// [weights]
void Zero::prepare(int64_t unit, int64_t next) {
  gather(units_[unit]);
  // The next one's come while this one computes; the root is there all the time.
  if (next > kRoot && next < std::ssize(units_)) gather(units_[next]);
  units_[unit].gathering.wait();
}

void Zero::gather(Unit& unit) {
  const int64_t version = unit.parameters.front()->version;
  if (unit.values.defined() && unit.version == version) return;
  free(unit);
  if (stage_ == 3) {
    const BlockScope block(unit.parameters.front()->block);
    unit.values = buffer(Category::communication, unit.length * shard_group_.size(), dtype_,
                         "gathered weights");
    unit.slice_into(&Parameter::value, unit.values);
  }
  unit.gathering = shard_group_.all_gather_async(unit.values, unit.value_shard);
  unit.version = version;
}

void Zero::free(Unit& unit) {
  if (stage_ < 3) return;
  unit.gathering.wait();
  unit.slice_into(&Parameter::value, {});
  unit.values = {};
}

void Zero::after_update() {
  sent_in_steps_ += sent_bytes() - sent_before_step_;
  if (stage_ == 3) return;
  for (Unit& unit : units_) gather(unit);
  if (config_.data_parallel.gather_overlap == "forward") return;  // where a block begins, it waits
  for (Unit& unit : units_) unit.gathering.wait();
}
// [weights]

// [gradients]
void Zero::begin_step(int64_t micro_batches) {
  sent_before_step_ = sent_bytes();
  rounds_ = stage_ == 1 ? 1 : micro_batches;
  if (stage_ == 1) {
    grads_.begin_window(micro_batches);
  } else {
    grads_.begin_window(1, rounds_);
  }
}

void Zero::begin_gradient(Unit& unit) {
  if (reducing_ == &unit) complete_reduction();  // the last micro-batch's
  ++unit.begun;
  USP_CHECK(unit.begun <= unit.parameters.size(), "block {}: a round begins before the last ends",
            unit.parameters.front()->block);
  if (unit.gradient.defined()) return;
  const BlockScope block(unit.parameters.front()->block);
  const int64_t whole = unit.length * shard_group_.size();
  unit.gradient = buffer(Category::communication, whole, reduced_dtype_, "gradients to reduce");
  ops::fill(unit.gradient.narrow(0, unit.numel, whole - unit.numel), 0);
  unit.slice_into(&Parameter::grad, unit.gradient);
}

void Zero::reduce_gradient(Unit& unit) {
  if (++unit.ready < unit.parameters.size()) return;
  unit.begun = unit.ready = 0;
  complete_reduction();  // of the unit before: never more than one is on its way
  Tensor output = unit.grad_shard;
  if (stage_ >= 2 && (unit.rounds_done > 0 || reduced_dtype_ != sum_dtype_)) {
    output = unit.addend =
        buffer(Category::communication, unit.length, reduced_dtype_, "reduced gradients");
  }
  unit.reduction = shard_group_.reduce_scatter_async(output, unit.gradient);
  reducing_ = &unit;
}

void Zero::complete_reduction() {
  if (reducing_ == nullptr) return;
  Unit& unit = *std::exchange(reducing_, nullptr);
  unit.reduction.wait();
  if (unit.addend.defined()) {
    if (unit.rounds_done == 0) ops::fill(unit.grad_shard, 0);
    if (reduced_dtype_ == sum_dtype_) {
      ops::add(unit.grad_shard, unit.grad_shard, unit.addend);
    } else {
      ops::accumulate(unit.grad_shard, unit.addend);
    }
    unit.addend = {};
  }
  if (stage_ >= 2) {
    unit.slice_into(&Parameter::grad, {});
    unit.gradient = {};
  }
  if (++unit.rounds_done < rounds_) return;
  unit.rounds_done = 0;
  unit.reduction = replicas_.all_reduce_async(unit.grad_shard);
}

void Zero::finish() {
  complete_reduction();
  for (Unit& unit : units_) {
    USP_CHECK(unit.ready == 0 && unit.rounds_done == 0, "gradients of block {} are not reduced",
              unit.parameters.front()->block);
    unit.reduction.wait();
  }
  sum_over_further_groups();
}
// [gradients]

std::pair<std::string, std::string> Zero::traffic_row(int64_t steps) {
  sent_before_step_ = sent_bytes();
  for (Unit& unit : units_) unit.gathering.wait();  // the last step's, if nobody has
  sent_in_steps_ += sent_bytes() - sent_before_step_;
  const double ranks = double(config_.data_parallel.dp_size);
  return {"gradients, weights sent",
          fmt::format("{:.0f} bytes a step by rank 0, by formula {:.0f}",
                      double(sent_in_steps_) / double(std::max<int64_t>(1, steps)),
                      double(predict_traffic(config_).total()) / ranks)};
}

int64_t Zero::sent_bytes() const {
  const Ledger& ledger = Runtime::current().ledger();
  return ledger.get(shard_group_.name(), CommKind::reduce_scatter).wire_bytes +
         ledger.get(shard_group_.name(), CommKind::all_gather).wire_bytes +
         ledger.get(replicas_.name(), CommKind::all_reduce).wire_bytes;
}

std::unique_ptr<DataParallelStrategy> make_data_parallel(const TrainConfig& config, Model& model,
                                                         Grads& grads, Optimizer& optimizer,
                                                         const Mesh& mesh) {
  if (config.data_parallel.zero_stage > 0) {
    return std::make_unique<Zero>(config, model, grads, optimizer, mesh);
  }
  model.parameters().allocate(parse_dtype(config.dtype), config.seed,
                              parse_grad_accumulation(config.grad_accumulation));
  return std::make_unique<DataParallel>(config.data_parallel, model.parameters(), grads, mesh);
}

}  // namespace usp
