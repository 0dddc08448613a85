#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "train/parameter.h"

namespace usp {

// [weight_stash]
/// PipeDream's versions of a stage's weights. Harlap et al. (2018),
/// https://arxiv.org/abs/1806.03377; Narayanan et al. (2019),
/// https://doi.org/10.1145/3341301.3359646.
///
/// A stage updates its weights after each backward pass, while other micro-batches are in flight.
/// Those have run forward with older weights. A gradient is that of a function only if backward
/// reads the weights that forward read, so a version is kept for as long as it may be read again.
///
/// Rank r of p does `ahead` = min(p-1-r, m-1) forward passes before its first backward pass. So
/// micro-batch i of a step reads version max(0, i - ahead), forward and backward, and its gradient
/// makes version i+1 out of version i. Besides the newest version there are at most `ahead`.
class WeightStash {
 public:
  explicit WeightStash(ParameterList& parameters) : parameters_(parameters) {}

  /// This micro-batch goes forward, with the newest version.
  void begin_forward(int64_t micro_batch) { read_by_[micro_batch] = newest_; }

  /// From here on layers read the version with which this micro-batch went forward.
  // [read]
  void begin_backward(int64_t micro_batch) {
    const int64_t version = read_by_.at(micro_batch);
    if (version != newest_) read_from(older_.at(version));
  }
  // [read]

  /// Layers read the newest version again.
  void end_backward(int64_t micro_batch) {
    read_from(parameters_.flat_values());
    const int64_t version = read_by_.extract(micro_batch).mapped();
    if (version == newest_ || is_read(version)) return;
    free_.push_back(older_.extract(version).mapped());
  }

  /// The newest version is about to be overwritten: copies it if a micro-batch in flight has read
  /// it.
  // [keep]
  void begin_update() {
    const TraceScope trace("stash");
    if (is_read(newest_)) {
      const Tensor& newest = parameters_.flat_values();
      const CategoryScope scope(Category::weights);
      if (free_.empty()) {
        free_.push_back(Tensor::empty(newest.shape(), newest.dtype(), "stashed weights"));
      }
      ops::copy(free_.back(), newest);
      older_.emplace(newest_, std::move(free_.back()));
      free_.pop_back();
    }
    ++newest_;
  }
  // [keep]

  /// The versions besides the newest one that rank r of p keeps at most, of m micro-batches.
  static int64_t most(int64_t p, int64_t r, int64_t m) {
    const int64_t ahead = std::min(p - 1 - r, m - 1);
    // While a micro-batch is in flight for each of them, versions 0 and on; with few micro-batches
    // all have read version 0.
    return ahead == 0 ? 0 : std::clamp<int64_t>(m - ahead, 1, ahead);
  }

 private:
  // [read_from]
  /// Layers read Parameter::value, the optimizer its shard: only the first moves.
  void read_from(const Tensor& flat) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      const Shape shape = parameter.local_shape();
      parameter.value = flat.narrow(0, parameter.flat_begin, shape.numel()).view(shape);
    }
  }
  // [read_from]

  bool is_read(int64_t version) const {
    return std::ranges::any_of(read_by_, [&](const auto& by) { return by.second == version; });
  }

  ParameterList& parameters_;
  int64_t newest_ = 0;                  // counts the updates
  std::map<int64_t, int64_t> read_by_;  // by micro-batch in flight: version
  std::map<int64_t, Tensor> older_;     // by version: as ParameterList::flat_values()
  std::vector<Tensor> free_;            // memory of versions that nobody will read again
};
// [weight_stash]

}  // namespace usp
