#include "pipeline_parallel/weight_stash.h"

#include <algorithm>

#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

// [read]
void WeightStash::begin_backward(int64_t micro_batch) {
  const int64_t version = read_by_.at(micro_batch);
  if (version != newest_) read_from(older_.at(version));
}

/// Layers read Parameter::value, the optimizer its shard: only the first moves.
void WeightStash::read_from(const Tensor& flat) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const Shape shape = parameter.local_shape();
    parameter.value = flat.narrow(0, parameter.flat_begin, shape.numel()).view(shape);
  }
}
// [read]

// [keep]
void WeightStash::begin_update() {
  const TraceScope trace("stash");
  const Tensor& newest = parameters_.flat_values();
  const auto reads = [this](const auto& other) { return other.second == newest_; };
  if (std::ranges::any_of(read_by_, reads)) {
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

void WeightStash::end_backward(int64_t micro_batch) {
  read_from(parameters_.flat_values());
  const int64_t version = read_by_.extract(micro_batch).mapped();
  const auto reads = [version](const auto& other) { return other.second == version; };
  if (version == newest_ || std::ranges::any_of(read_by_, reads)) return;
  free_.push_back(older_.extract(version).mapped());
}

// [update]
void StageUpdate::operator()(int64_t micro_batch, const Communicator& stage) const {
  grads.end_window();
  data_parallel.finish();
  const Tensor squares = optimizer.grad_squares();
  stage.all_reduce(squares);  // 8 bytes: all of them skip an update that is not finite, or none
  optimizer.step(before + micro_batch, lr, squares);
  data_parallel.after_update();
  data_parallel.begin_step(/*micro_batches=*/1);
}
// [update]

}  // namespace usp
