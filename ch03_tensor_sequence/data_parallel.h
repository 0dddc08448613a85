#pragma once

#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/args.h"
#include "comm/mesh.h"
#include "train/grads.h"

namespace usp {

/// Who shares the work of a batch, and how their gradients travel.
struct DataParallelConfig {
  int64_t dp_size = 1;  ///< ranks that share the work of a batch
  std::string grad_sync = "bucketed";
  double bucket_mb = 25;  ///< MiB of gradients in a bucket
  int64_t zero_stage = 0;
  int64_t shard_size = 0;  ///< ranks that share out one copy of the model; 0: all of dp
  std::string gather_overlap = "forward";
  std::string reduce_after = "micro_batch";
  std::string reshard_after = "block";

  void bind(Args& args);
  void validate(const Args& args) const;
};

// [traffic]
/// What this rank sends in training steps, by the ledger: nothing that validation, sampling or
/// checkpoints send between them.
class StepTraffic {
 public:
  /// From here on these operations of the communicator are counted.
  void count(const Communicator& group, CommKind kind) { counted_.insert({group.name(), kind}); }
  void begin_step() { before_ = in_ledger(); }
  void end_step() { bytes_ += in_ledger() - before_; }
  int64_t bytes() const { return bytes_; }  ///< of all steps that have ended

 private:
  int64_t in_ledger() const;

  std::set<std::pair<std::string, CommKind>> counted_;
  int64_t before_ = 0, bytes_ = 0;
};
// [traffic]

/// How ranks that work on other samples divide what they would all hold a copy of.
class DataParallelStrategy {
 public:
  DataParallelStrategy(ParameterList& parameters, Grads& grads, const Mesh& mesh)
      : parameters_(parameters), grads_(grads), mesh_(mesh) {}
  virtual ~DataParallelStrategy() = default;
  DataParallelStrategy(const DataParallelStrategy&) = delete;
  DataParallelStrategy& operator=(const DataParallelStrategy&) = delete;

  // [strategy]
  /// Opens the gradients' window of a step of so many micro-batches, each of which runs in so many
  /// parts.
  virtual void begin_step(int64_t micro_batches, int64_t parts = 1) {
    traffic_.begin_step();
    grads_.begin_window(micro_batches * parts);
  }
  /// Returns when the gradient of every shard is the sum over the ranks. Throws Error if one is not
  /// ready.
  virtual void finish() = 0;
  /// The optimizer has updated this rank's shards.
  virtual void after_update() { traffic_.end_step(); }
  // [strategy]

  virtual int64_t num_buckets() const = 0;                 ///< messages in which gradients travel
  const StepTraffic& traffic() const { return traffic_; }  ///< of gradients and weights
  /// For the report: bytes that this rank has sent per step, beside the formula's.
  virtual std::pair<std::string, std::string> traffic_row(int64_t steps) const = 0;

 protected:
  /// Copies of one weight may also lie on ranks that do other work for the same tokens.
  void sum_over_further_groups();

  ParameterList& parameters_;
  Grads& grads_;
  const Mesh& mesh_;
  StepTraffic traffic_;
};

/// Keeps the gradients of the data-parallel ranks equal: after every backward pass each rank holds
/// the sum over all of them.
///
/// |            | one GPU                | rank r of dp                                     |
/// |------------|------------------------|--------------------------------------------------|
/// | weights    | all                    | all, the same on every rank                      |
/// | samples    | the global batch, B    | B/dp of them                                     |
/// | gradients  | of the loss over B     | of its samples' share, then the sum over ranks   |
///
/// A step all-reduces P elements, P = number of parameters: a rank sends 2 (dp-1)/dp P of them,
/// whatever the size of the batch and the number of micro-batches in it.
///
/// The flat gradients are cut into buckets, each a message of its own, which is sent as soon as the
/// last parameter in it is ready. A bucket holds parameters that are summed over the same ranks
/// (Parameter::grad_groups). What the book calls naive, overlapped and bucketed differs in nothing
/// but where the cuts are.
class DataParallel : public DataParallelStrategy {
 public:
  /// From here on `grads` reports to this object each parameter that becomes ready.
  DataParallel(const DataParallelConfig& config, ParameterList& parameters, Grads& grads,
               const Mesh& mesh);

  void finish() override;

  int64_t num_buckets() const override { return std::ssize(buckets_); }
  std::pair<std::string, std::string> traffic_row(int64_t steps) const override;

 private:
  /// A stretch of the flat gradients, which may begin and end inside a parameter.
  struct Bucket {
    int64_t begin, end;
    const Communicator* group;
    int64_t parameters;  ///< that lie in it, wholly or in part
    int64_t missing;     ///< of those, not ready in this step
    Handle handle;
  };

  void cut(const DataParallelConfig& config);
  /// Those in which the parameter's gradient lies: neighbours, found by halving.
  std::span<Bucket> buckets_of(const Parameter& parameter);
  void on_ready(const Parameter& parameter);

  std::vector<Bucket> buckets_;  ///< from the end of the flat gradients to their beginning
};

}  // namespace usp
