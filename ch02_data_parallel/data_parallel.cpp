#include "data_parallel.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime.h"

namespace usp {

void DataParallelConfig::bind(Args& args) {
  args.group("Data parallelism");
  args.bind("dp_size", dp_size, "ranks that share the work of a batch; default: all");
  args.bind("grad_sync", grad_sync, {"naive", "overlapped", "bucketed"},
            "all-reduce after the backward pass, per parameter under it, or per bucket");
  args.bind("bucket_mb", bucket_mb, "MiB of gradients in a bucket");
}

void DataParallelConfig::validate(const Args&) const {
  check_range("dp_size", double(dp_size), 1, HUGE_VAL);
  if (!(bucket_mb > 0)) usage_error("bucket_mb={} must be above 0; try 25", bucket_mb);
}

// [buckets]
DataParallel::DataParallel(const DataParallelConfig& config, ParameterList& parameters,
                           Grads& grads, const Mesh& mesh)
    : parameters_(parameters), mesh_(mesh) {
  cut(config);
  for (Bucket& bucket : buckets_) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!bucket.overlaps(parameters[i])) continue;
      bucket.group = &mesh.group(parameters[i].grad_groups.front());
      ++bucket.parameters;
    }
    bucket.missing = bucket.parameters;
  }
  grads.on_ready([this](Parameter& parameter) { on_ready(parameter); });
}

/// Backward reaches the last layer first, so the first bucket is the last stretch.
void DataParallel::cut(const DataParallelConfig& config) {
  const Tensor& flat = parameters_.flat_grads();
  std::vector<int64_t> cuts = {flat.numel()};
  if (config.grad_sync == "overlapped") {
    for (size_t i = 0; i < parameters_.size(); ++i) cuts.push_back(parameters_[i].flat_begin);
  } else if (config.grad_sync == "bucketed") {
    const auto bytes = static_cast<int64_t>(config.bucket_mb * (1 << 20));
    const int64_t size = std::max<int64_t>(1, bytes / bytes_of(flat.dtype()));
    while (cuts.back() > 0) cuts.push_back(std::max<int64_t>(0, cuts.back() - size));
  } else {
    cuts.push_back(0);  // one bucket: it is full when the backward pass is over
  }
  std::set<std::string> groups;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool first = groups.insert(parameters_[i].grad_groups.front()).second;
    if (first) cuts.push_back(parameters_[i].flat_begin);  // other ranks sum what lies before
  }
  std::ranges::sort(cuts, std::greater());
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] < cuts[i - 1]) buckets_.push_back({cuts[i], cuts[i - 1], nullptr, 0, 0, {}});
  }
}
// [buckets]

// [on_ready]
void DataParallel::on_ready(const Parameter& parameter) {
  for (Bucket& bucket : buckets_) {
    if (!bucket.overlaps(parameter) || --bucket.missing > 0) continue;
    // Final on this rank, and nobody writes it any more: it may travel while backward goes on.
    const Tensor range =
        parameters_.flat_grads().narrow(0, bucket.begin, bucket.end - bucket.begin);
    bucket.handle = bucket.group->all_reduce_async(range);  // the gradients in it, once per step
  }
}
// [on_ready]

// [finish]
void DataParallel::finish() {
  for (Bucket& bucket : buckets_) {
    USP_CHECK(bucket.missing == 0, "{} parameters of a bucket are not ready", bucket.missing);
    bucket.handle.wait();
    bucket.missing = bucket.parameters;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // Copies of one weight may also lie on ranks that do other work for the same tokens.
    for (size_t g = 1; g < parameters_[i].grad_groups.size(); ++g) {
      mesh_.group(parameters_[i].grad_groups[g]).all_reduce(parameters_[i].grad);
    }
  }
}
// [finish]

std::pair<std::string, std::string> DataParallel::traffic_row(int64_t steps) const {
  const Communicator& dp = mesh_.dp();
  const double ranks = dp.size();
  const double predicted = 2 * (ranks - 1) / ranks * double(parameters_.flat_grads().bytes());
  const Ledger::Entry sent = Runtime::current().ledger().get(dp.name(), CommKind::all_reduce);
  const double measured = double(sent.wire_bytes) / double(std::max<int64_t>(1, steps));
  return {"gradients sent",
          fmt::format(
              "{:.0f} bytes a step by rank 0, buckets: {}; 2 (dp-1)/dp of the gradients: {:.0f}",
              measured, num_buckets(), predicted)};
}

}  // namespace usp
