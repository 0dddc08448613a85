#pragma once

#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "comm/mesh.h"
#include "grads.h"

namespace usp {

struct DataParallelConfig {
  int64_t dp_size = 1;  ///< ranks that share the work of a batch
  std::string grad_sync = "bucketed";
  double bucket_mb = 25;  ///< MiB of gradients in a bucket

  void bind(Args& args);
  void validate(const Args& args) const;
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
class DataParallel {
 public:
  /// From here on `grads` reports to this object each parameter that becomes ready.
  DataParallel(const DataParallelConfig& config, ParameterList& parameters, Grads& grads,
               const Mesh& mesh);
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Returns when every gradient is the sum over the ranks. Throws Error if a bucket is still open.
  void finish();

  int64_t num_buckets() const { return std::ssize(buckets_); }
  /// For the report: gradient bytes that this rank has sent per step, beside 2 (dp-1)/dp of P.
  std::pair<std::string, std::string> traffic_row(int64_t steps) const;

 private:
  /// A stretch of the flat gradients, which may begin and end inside a parameter.
  struct Bucket {
    int64_t begin, end;
    const Communicator* group;
    int64_t parameters;  ///< that lie in it, wholly or in part
    int64_t missing;     ///< of those, not ready in this step
    Handle handle;

    bool overlaps(const Parameter& parameter) const {
      return parameter.flat_begin < end && parameter.flat_begin + parameter.grad.numel() > begin;
    }
  };

  void cut(const DataParallelConfig& config);
  void on_ready(const Parameter& parameter);

  ParameterList& parameters_;
  const Mesh& mesh_;
  std::vector<Bucket> buckets_;  ///< from the end of the flat gradients to their beginning
};

}  // namespace usp
