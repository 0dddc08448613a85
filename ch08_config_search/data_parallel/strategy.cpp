#include "data_parallel/strategy.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/rules.h"
#include "config.h"
#include "tensor/runtime.h"

namespace usp {

void DataParallelConfig::bind(Args& args) {
  args.group("Data parallelism");
  args.bind("dp_size", dp_size, "ranks that split a batch's samples; default: all")
      .may_differ_on_resume();
  args.bind("grad_sync", grad_sync, {"naive", "overlapped", "bucketed"},
            "all-reduce after the backward pass, per parameter under it, or per bucket")
      .may_differ_on_resume();
  args.bind("bucket_mb", bucket_mb, "MiB of gradients in a bucket").may_differ_on_resume();
  args.bind("zero_stage", zero_stage,
            "shard nothing (0), optimizer states (1), gradients too (2), weights too (3)")
      .may_differ_on_resume();
  args.bind("shard_size", shard_size, "ranks that shard one copy; 0: all of dp")
      .may_differ_on_resume();
  args.bind("gather_overlap", gather_overlap, {"none", "optimizer", "forward"},
            "what hides the all-gather of updated weights in stages 1 and 2")
      .may_differ_on_resume();
  args.bind("reduce_after", reduce_after, {"micro_batch", "step"},
            "when stages 2 and 3 reduce gradients and free them")
      .may_differ_on_resume();
  args.bind("reshard_after", reshard_after, {"block", "chunk", "step"},
            "when stage 3 frees gathered weights; chunk: before a pass of another one")
      .may_differ_on_resume();
}

void DataParallelConfig::spread_over(int64_t world_size, const MeshSizes& mesh, const Args& args) {
  if (!args.given("dp_size")) dp_size = std::max<int64_t>(1, world_size / mesh.ranks_of_a_copy());
}

void DataParallelConfig::validate(const Args&) const {
  check_range("dp_size", double(dp_size), 1, 1 << 16);
  if (!(bucket_mb > 0 && bucket_mb <= 1e6)) {
    usage_error("bucket_mb={} must lie above 0 and be at most 1e6; try 25", bucket_mb);
  }
  check_range("zero_stage", double(zero_stage), 0, 3);
  check_range("shard_size", double(shard_size), 0, HUGE_VAL);
}

void DataParallelConfig::check(const TrainConfig& run) const {
  const DataParallelConfig unset;
  const auto needs_stage = [&](const char* flag, bool is_set, int64_t first, int64_t last) {
    if (!is_set || (zero_stage >= first && zero_stage <= last)) return;
    refuse_silent("stage_of_flag", {fmt::format("leave out --{}", flag)},
                  "{} is for zero_stage {}, not {}", flag,
                  first == last ? fmt::format("{}", last) : fmt::format("{} to {}", first, last),
                  zero_stage);
  };
  needs_stage("grad_sync", grad_sync != unset.grad_sync, 0, 0);
  needs_stage("bucket_mb", bucket_mb != unset.bucket_mb, 0, 0);
  needs_stage("shard_size", shard_size != unset.shard_size, 1, 3);
  needs_stage("gather_overlap", gather_overlap != unset.gather_overlap, 1, 2);
  needs_stage("reduce_after", reduce_after != unset.reduce_after, 2, 3);
  needs_stage("reshard_after", reshard_after != unset.reshard_after, 3, 3);
  const MeshSizes sizes = run.mesh();
  if (shard_size == 0 || sizes.dp_cp() % shard_size == 0) return;
  refuse("shards_in_dp", divisors_of("shard_size", sizes.dp_cp()),
         "shard_size={} must divide dp_size{}={}", shard_size, sizes.cp > 1 ? "*cp_size" : "",
         sizes.dp_cp());
}

void DataParallelStrategy::sum_over_further_groups() {
  for (const Parameter* parameter : parameters_.by_name()) {
    for (size_t g = 1; g < parameter->grad_groups.size(); ++g) {
      mesh_.group(parameter->grad_groups[g]).all_reduce(parameter->shard.grad);
    }
  }
}

DataParallel::DataParallel(const DataParallelConfig& config, ParameterList& parameters,
                           Grads& grads, const Mesh& mesh)
    : DataParallelStrategy(parameters, grads, mesh) {
  for (size_t i = 0; i < parameters.size(); ++i) {  // the same on all of them; one enters the norm
    if (mesh.group(parameters[i].grad_groups.front()).rank() > 0) parameters[i].counted = false;
  }
  cut(config);
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (Bucket& bucket : buckets_of(parameters[i])) {
      bucket.group = &mesh.group(parameters[i].grad_groups.front());
      ++bucket.parameters;
    }
  }
  for (Bucket& bucket : buckets_) bucket.missing = bucket.parameters;
  grads.on_ready([this](Parameter& parameter) { on_ready(parameter); });
}

/// Backward reaches the last layer first, so the first bucket is the last stretch.
void DataParallel::cut(const DataParallelConfig& config) {
  const Tensor& flat = parameters_.flat_grads();
  // [cuts]
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
  // [cuts]
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

std::span<DataParallel::Bucket> DataParallel::buckets_of(const Parameter& parameter) {
  const int64_t begin = parameter.flat_begin, end = begin + parameter.grad.numel();
  const auto first =
      std::ranges::partition_point(buckets_, [&](const Bucket& b) { return b.begin >= end; });
  const auto last =
      std::partition_point(first, buckets_.end(), [&](const Bucket& b) { return b.end > begin; });
  return {first, last};
}

// [on_ready]
void DataParallel::on_ready(const Parameter& parameter) {
  for (Bucket& bucket : buckets_of(parameter)) {
    if (--bucket.missing > 0) continue;
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
  sum_over_further_groups();
}
// [finish]

Operations DataParallel::operations() const {
  Operations all(*buckets_.front().group, CommKind::all_reduce);
  for (const Bucket& bucket : buckets_) all.add(*bucket.group, CommKind::all_reduce);
  return all;
}

}  // namespace usp
