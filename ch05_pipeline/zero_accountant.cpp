#include "zero_accountant.h"

#include <algorithm>

#include "comm/algorithms.h"
#include "model.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// A unit of the whole model.
struct UnitShape {
  int64_t numel;        ///< as padded to a multiple of Z
  int64_t first, last;  ///< of the blocks that read it
};

/// The units of a rank's model that has no memory.
struct Shapes {
  std::vector<UnitShape> units;  ///< from the embedding's to the head's
  std::vector<int64_t> parameters;
  int64_t held = 0;  ///< elements of all parameters
  int64_t blocks;

  explicit Shapes(const TrainConfig& config) {
    Runtime runtime(Device::meta);
    const Runtime::Use use(runtime);
    Model model(config);
    blocks = config.model.num_layers + 2;
    const int64_t Z = shard_size(config);
    for (const Unit& unit : cut_into_units(model.parameters())) {
      units.push_back({(unit.numel + Z - 1) / Z * Z, blocks, 0});
      for (const Parameter* parameter : unit.parameters) {
        units.back().first = std::min(units.back().first, parameter->readers.front());
        units.back().last = std::max(units.back().last, parameter->readers.back());
        parameters.push_back(parameter->local_shape().numel());
        held += parameters.back();
      }
    }
  }

  int64_t all() const {
    return sum([](const UnitShape&) { return true; });
  }
  int64_t largest() const { return std::ranges::max(units, {}, &UnitShape::numel).numel; }

  template <class Condition>
  int64_t sum(const Condition& condition) const {
    int64_t numel = 0;
    for (const UnitShape& unit : units) numel += condition(unit) ? unit.numel : 0;
    return numel;
  }
};

/// Elements that are unsharded at a time: a block's and the next one's.
int64_t unsharded(const Shapes& shapes) {
  int64_t most = 0;
  for (int64_t block = 0; block + 1 < shapes.blocks; ++block) {
    const auto read = [block](const UnitShape& unit) {
      return (unit.first >= block && unit.first <= block + 1) ||
             (unit.last >= block && unit.last <= block + 1);
    };
    most = std::max(most, shapes.sum(read));
  }
  return most;
}

/// The backward passes of a step: when gradients of a unit are begun, and when they are complete.
struct Backward {
  int64_t most = 0;              ///< elements of gradients that are written or reduced at once
  std::vector<int64_t> reduced;  ///< elements of each message of a pass, in order

  Backward(const Shapes& shapes, int64_t passes) {
    const UnitShape* reducing = nullptr;
    int64_t there = 0;
    const auto complete = [&] {
      if (reducing != nullptr) there -= reducing->numel;
      reducing = nullptr;
    };
    for (int64_t pass = 0; pass < passes; ++pass) {
      reduced.clear();
      for (int64_t block = shapes.blocks; block-- > 0;) {
        for (const UnitShape& unit : shapes.units) {
          if (unit.last != block) continue;
          if (reducing == &unit) complete();
          there += unit.numel;
        }
        most = std::max(most, there);
        for (const UnitShape& unit : shapes.units) {
          if (unit.first != block) continue;
          complete();  // one is reduced while the next one's are written
          reducing = &unit;
          reduced.push_back(unit.numel);
        }
      }
    }
  }
};

int64_t scratch_of(int64_t ranks, int64_t numel, DType dtype) {
  return algorithms::reduction_scratch(static_cast<int>(ranks), /*rank=*/0, numel, dtype,
                                       Engine::kScratchLimit);
}

/// Scratch of reductions that are under way at once. They share it: only one that needs more than
/// all before it has its own.
class SharedScratch {
 public:
  SharedScratch(int64_t ranks, DType dtype) : ranks_(ranks), dtype_(dtype) {}
  void add(int64_t numel) {
    const int64_t bytes = scratch_of(ranks_, numel, dtype_);
    if (bytes > largest_) bytes_ += largest_ = bytes;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t ranks_;
  DType dtype_;
  int64_t bytes_ = 0, largest_ = 0;
};

/// Elements of each bucket of plain data parallelism, in the order in which they leave.
std::vector<int64_t> buckets(const TrainConfig& config, const Shapes& shapes) {
  const DataParallelConfig& dp = config.data_parallel;
  if (dp.grad_sync == "overlapped") return {shapes.parameters.rbegin(), shapes.parameters.rend()};
  int64_t rest = shapes.held, size = rest;
  if (dp.grad_sync == "bucketed") {
    const auto bytes = static_cast<int64_t>(dp.bucket_mb * (1 << 20));
    size = std::max<int64_t>(1, bytes / bytes_of(dtype_of_reduction(config)));
  }
  std::vector<int64_t> sizes;
  for (; rest > 0; rest -= size) sizes.push_back(std::min(rest, size));
  return sizes;
}

// [scratch]
int64_t scratch(const TrainConfig& config, const Shapes& shapes) {
  const int64_t Z = shard_size(config), R = config.mesh().dp_cp() / Z;
  const DType reduced = dtype_of_reduction(config);
  SharedScratch all(Z, reduced), copies(R, dtype_of_gradient_sum(config));
  if (config.data_parallel.zero_stage == 0) {
    for (int64_t numel : buckets(config, shapes)) all.add(numel);
    return all.bytes();
  }
  int64_t most = 0;
  for (int64_t numel : Backward(shapes, 1).reduced) {
    all.add(numel);
    // The shards before are on their way to the copies already.
    most = std::max(most, scratch_of(Z, numel, reduced) + copies.bytes());
    copies.add(numel / Z);
  }
  // Nothing waits for a reduction before the step's end where no memory and no copy does.
  if (config.data_parallel.zero_stage == 1 && R == 1) return all.bytes();
  return std::max(most, copies.bytes());
}
// [scratch]

}  // namespace

int64_t shard_size(const TrainConfig& config) {
  const DataParallelConfig& dp = config.data_parallel;
  return dp.shard_size > 0 && dp.zero_stage > 0 ? dp.shard_size : config.mesh().dp_cp();
}

StateBytes sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const Shapes shapes(config);
  if (stage == 0) return whole_states(shapes.held, config);
  // [states]
  const KeptByStage& kept = kKept[stage];
  const DType dtype = parse_dtype(config.dtype);
  const int64_t weight = bytes_of(dtype), acc = bytes_of(accumulate_dtype(dtype));
  const int64_t whole = shapes.all(), shard = whole / shard_size(config);
  const auto elements = [&](Kept part) { return part == Kept::whole ? whole : shard; };
  StateBytes states{};
  states.weights = elements(kept.weights) * weight;
  states.gradients = elements(kept.gradients) * bytes_of(dtype_of_gradient_sum(config));
  if (kept.gradients == Kept::whole && config.grad_accumulation == "both") {
    states.gradients += shapes.held * weight;
  }
  states.optimizer = elements(kept.optimizer) * ((weight == acc ? 0 : acc) + 2 * acc);
  // [states]
  return states;
}

std::vector<LiveBytes> zero_buffers(const TrainConfig& config) {
  const KeptByStage& kept = kKept[config.data_parallel.zero_stage];
  const Shapes shapes(config);
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  std::vector<LiveBytes> buffers;
  if (kept.weights == Kept::shard) {
    const int64_t weight = bytes_of(parse_dtype(config.dtype));
    buffers.push_back({-1, "gathered weights", unsharded(shapes) * weight});
  }
  if (kept.gradients == Kept::shard) {
    const Backward backward(shapes, std::min<int64_t>(2, config.grad_acc_steps));
    buffers.push_back({-1, "gradients to reduce", backward.most * gradient});
    const bool added =
        config.grad_acc_steps > 1 || dtype_of_reduction(config) != dtype_of_gradient_sum(config);
    const int64_t part = shapes.largest() / shard_size(config);
    if (added) buffers.push_back({-1, "reduced gradients", part * gradient});
  }
  if (config.mesh().dp_cp() > 1) {
    buffers.push_back({-1, "scratch of reductions", scratch(config, shapes)});
  }
  return buffers;
}

double book_sharded_states(const TrainConfig& config) {
  const int64_t stage = config.data_parallel.zero_stage;
  const double Z = double(shard_size(config));
  const double gradients = config.grad_accumulation == "both" ? 6 : 2;
  const double bytes =
      2 / (stage == 3 ? Z : 1) + gradients / (stage >= 2 ? Z : 1) + 12 / (stage >= 1 ? Z : 1);
  // [book_states]
  return bytes * double(num_parameters(config.model)) / double(config.tensor_parallel.tp_size);
  // [book_states]
}

ZeroTraffic predict_traffic(const TrainConfig& config) {
  const DataParallelConfig& dp = config.data_parallel;
  const int64_t weight = bytes_of(parse_dtype(config.dtype));
  const int64_t gradient = bytes_of(dtype_of_reduction(config));
  const Shapes shapes(config);
  const int64_t copies = config.mesh().dp_cp();
  if (dp.zero_stage == 0) return {.all_reduce = 2 * (copies - 1) * shapes.held * gradient};
  const int64_t Z = shard_size(config), R = copies / Z, M = config.grad_acc_steps;
  // [traffic]
  const int64_t P = shapes.all();
  const int64_t reductions = kKept[dp.zero_stage].gradients == Kept::whole ? 1 : M;
  int64_t gathered = P;
  if (kKept[dp.zero_stage].weights == Kept::shard) {
    // A tied embedding is gathered at both ends of forward. Backward gathers neither the last two
    // blocks, which are still there, nor the embedding: the backward of a lookup reads no weight.
    const int64_t twice = shapes.sum([](const UnitShape& u) { return u.last - u.first > 2; });
    const int64_t backward =
        shapes.sum([&](const UnitShape& u) { return u.first > 0 && u.last + 2 < shapes.blocks; });
    gathered = M * (P + twice + backward);
  }
  return {.reduce_scatter = (Z - 1) * R * reductions * P * gradient,
          .all_gather = (Z - 1) * R * gathered * weight,
          .all_reduce = 2 * (R - 1) * P * bytes_of(dtype_of_gradient_sum(config))};
  // [traffic]
}

}  // namespace usp
