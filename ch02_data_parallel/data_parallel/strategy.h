#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/args.h"
#include "comm/mesh.h"
#include "run/traffic.h"
#include "train/grads.h"

namespace usp {

struct TrainConfig;

/// Who shares the work of a batch, and how their gradients travel.
struct DataParallelConfig {
  int64_t dp_size = 1;  ///< ranks that split a batch's samples
  std::string grad_sync = "bucketed";
  double bucket_mb = 25;  ///< MiB of gradients in a bucket
  int64_t zero_stage = 0;
  int64_t shard_size = 0;  ///< ranks that shard one copy of the model; 0: all of dp
  std::string gather_overlap = "forward";
  std::string reduce_after = "micro_batch";
  std::string reshard_after = "block";

  void bind(Args& args);
  /// All ranks split a batch's samples, unless the command line says otherwise.
  void spread_over(int64_t world_size, const MeshSizes& mesh, const Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where shards do not fill the ranks, or a flag would change nothing.
  void check(const TrainConfig& run) const;
};

/// How ranks that work on other samples divide what they would all hold a copy of.
class DataParallelStrategy {
 public:
  DataParallelStrategy(ParameterList& parameters, Grads& grads, const Mesh& mesh)
      : parameters_(parameters), grads_(grads), mesh_(mesh) {}
  virtual ~DataParallelStrategy() = default;
  DataParallelStrategy(const DataParallelStrategy&) = delete;
  DataParallelStrategy& operator=(const DataParallelStrategy&) = delete;

  // [strategy]
  /// Opens the gradients' window of a step of this many micro-batches, each of which runs in
  /// `parts` pieces.
  virtual void begin_step(int64_t micro_batches, int64_t parts = 1) {
    grads_.begin_window(micro_batches * parts);
  }
  /// Returns when the gradient of every shard is the sum over the ranks. Throws Error if one is not
  /// ready.
  virtual void finish() = 0;
  /// The optimizer has updated this rank's shards.
  virtual void after_update() {}
  // [strategy]

  virtual int64_t num_buckets() const = 0;    ///< messages in which gradients travel
  virtual Operations operations() const = 0;  ///< that carry gradients and weights

 protected:
  /// Copies of one weight may also lie on ranks that do other work for the same tokens.
  void sum_over_further_groups();

  ParameterList& parameters_;
  Grads& grads_;
  const Mesh& mesh_;
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
  Operations operations() const override;

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
  /// Buckets in which the parameter's gradient lies: neighbors, found by halving.
  std::span<Bucket> buckets_of(const Parameter& parameter);
  void on_ready(const Parameter& parameter);

  std::vector<Bucket> buckets_;  ///< from the end of the flat gradients to their beginning
};

}  // namespace usp
