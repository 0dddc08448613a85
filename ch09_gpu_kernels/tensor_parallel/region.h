#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/args.h"
#include "base/stretch.h"
#include "comm/mesh.h"
#include "run/run_config.h"
#include "tensor_parallel/batch_halves.h"
#include "train/parameter.h"
#include "train/pass.h"

namespace usp {

struct TrainConfig;

/// Who shares one layer, and what they send while they compute.
struct TensorParallelConfig {
  int64_t tp_size = 1;             ///< ranks that shard every block's weights
  bool sequence_parallel = false;  ///< they shard the tokens between the blocks' linears too
  std::string gathered_input = "again";
  std::string tp_overlap = "weight_grad";
  double dropout = 0;

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Ranks that shard the rows of the residual stream.
  int64_t row_shares() const { return sequence_parallel ? tp_size : 1; }
  /// Sizes of the run's mesh, with this many data-parallel ranks.
  MeshSizes mesh(int64_t dp_size, const ModelConfig& model) const;
  /// Parts of a micro-batch that run in turns.
  int64_t halves() const { return tp_overlap == "batch_halves" && tp_size > 1 ? 2 : 1; }
  /// Throws UsageError where the model, its samples or its shards do not divide.
  void check(const TrainConfig& run) const;
};

// [pending]
/// A tensor that is complete when wait() has returned.
class Pending {
 public:
  explicit Pending(Tensor tensor, Turns* turns = nullptr)
      : tensor_(std::move(tensor)), turns_(turns) {}
  void add(Handle handle) { handles_.push_back(std::move(handle)); }

  /// The tensor, complete. Throws Error if one of the messages failed.
  Tensor wait() {
    if (turns_ != nullptr && !handles_.empty()) turns_->yield();
    for (Handle& handle : handles_) handle.wait();
    handles_.clear();
    return tensor_;
  }

 private:
  Tensor tensor_;
  std::vector<Handle> handles_;
  Turns* turns_;
};
// [pending]

// [region]
/// The part of a block in which each of t ranks works with its own slice of the weights, and what
/// crosses the ranks at its two edges. Shoeybi et al. (2019), https://arxiv.org/abs/1909.08053;
/// Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198.
///
/// |       | at         | forward        | backward       |                                     |
/// |-------|------------|----------------|----------------|-------------------------------------|
/// | f     | the entry  | nothing        | all-reduce     | tensor parallelism                  |
/// | f*    | the exit   | all-reduce     | nothing        |                                     |
/// | g     | the entry  | all-gather     | reduce-scatter | with sequence parallelism: outside, |
/// | g*    | the exit   | reduce-scatter | all-gather     | a rank has T/t of the T tokens      |
///
/// Inside, tensors are [T, ...]; outside [T, H], or [T/t, H] under sequence parallelism: rows r T/t
/// to (r+1) T/t on rank r. A default region is that of a single rank, where nothing is sent.
class TensorRegion {
 public:
  TensorRegion() = default;
  TensorRegion(const TensorParallelConfig& config, const Communicator& tp);

  Pending enter(const Tensor& x, const Pass& pass) const;  ///< f, or g
  Pending enter_backward(const Tensor& dx) const;          ///< dx [T, H]: this rank's partial sum
  Pending leave(const Tensor& y, const Pass& pass) const;  ///< f*, or g*; y [T, H]: its partial sum
  Pending leave_backward(const Tensor& dy) const;          ///< -> dy [T, H]

  Pending gather(const Tensor& x) const;  ///< [T/t, ...] -> [T, ...]
  /// A tensor to which messages may be added; who waits for it lets the other half compute.
  Pending on_its_way(Tensor tensor) const { return Pending(std::move(tensor), turns_.get()); }

  // [chunks]
  /// Computes rows [begin, begin + count) of a tensor into `rows`.
  using ComputeRows = std::function<void(int64_t begin, int64_t count, const Tensor& rows)>;
  /// The sum over ranks of a tensor [T, H], as leave() makes it: its rows are computed in chunks,
  /// each of which travels while the next one is computed.
  Pending sum_in_chunks(const Shape& shape, DType dtype, const ComputeRows& compute,
                        bool shares_rows) const;
  /// Hands the rows of the whole of x [T/t, ...] to `use` as they arrive: rows begin to begin +
  /// count.
  void gather_in_chunks(const Tensor& x, const ComputeRows& use) const;
  // [chunks]
  /// x = the sum (max) of all ranks' x: for numbers that cross neither edge.
  void reduce(const Tensor& x, ReduceOp op = ReduceOp::sum) const;

  int64_t rank() const { return tp_ ? tp_->rank() : 0; }
  int64_t size() const { return config_.tp_size; }
  const TensorParallelConfig& config() const { return config_; }
  /// Heads of a rank, of this many in all: at least one.
  int64_t heads(int64_t number) const { return std::max<int64_t>(1, number / size()); }
  /// Whether a rank has but a part of the rows outside. A text that grows has one token at a time:
  /// too few to shard.
  bool shares_rows(const Pass& pass) const {
    return shares_rows() && pass.mode != Pass::Mode::decode;
  }
  bool shares_rows() const { return config_.sequence_parallel && size() > 1; }
  /// Whether a linear that enters the region keeps its own rows of x for backward, and not all.
  bool gathers_again() const { return shares_rows() && config_.gathered_input == "again"; }
  /// Whether what does not need a tensor that is on its way is computed before it has arrived.
  bool overlaps() const { return config_.tp_overlap != "none"; }
  bool in_chunks() const { return config_.tp_overlap == "chunks" && size() > 1; }

  // [halves]
  /// body(pass), or with batch_halves body of each half of its samples, in turns.
  void each_half(const Pass& pass, const std::function<void(const Pass&)>& body) const;
  /// Runs both: where one waits for what crosses the ranks, the other one computes.
  void in_turns(const std::function<void()>& first, const std::function<void()>& second) const;
  // [halves]
  /// The rows of x [T, ...] that are this rank's outside: all of them without sequence parallelism.
  Tensor own_rows(const Tensor& x) const;
  /// The first of this many rows that are this rank's outside.
  int64_t first_row(int64_t rows, const Pass& pass) const {
    return shares_rows(pass) ? rank() * rows : 0;
  }

  // [weights]
  /// Leaves this rank its part of an axis of a weight; the parts differ by one at most.
  void share(Parameter& weight, int axis) const;
  /// Leaves it, of the rows of G kv heads, those that its query heads read: at least one head, of
  /// which t/G ranks then hold copies, whose gradients are summed.
  void share_kv_heads(Parameter& weight, int64_t G) const;
  /// Every rank has all of the weight. Each sees all tokens, and so the whole gradient; under
  /// sequence parallelism it sees its own rows, and the gradients are summed.
  void replicate(Parameter& weight) const;
  // [weights]

 private:
  Pending all_reduce(const Tensor& x) const;
  Pending reduce_scatter(const Tensor& x) const;  ///< [T, ...] -> [T/t, ...]

  std::optional<Communicator> tp_;
  TensorParallelConfig config_;
  std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
};
// [region]

}  // namespace usp
