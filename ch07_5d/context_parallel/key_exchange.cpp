#include "context_parallel/key_exchange.h"

#include "tensor/ops.h"

namespace usp {

namespace {

/// Sends a tensor to the next place of the ring, and receives another from the one before.
Handle send_on(const Communicator& ring, const Tensor& here, const Tensor& coming) {
  const int n = ring.size(), place = ring.rank();
  const SendRecv both[] = {{SendRecv::send, here, (place + 1) % n},
                           {SendRecv::recv, coming, (place + n - 1) % n}};
  return ring.send_recv_async(both);
}

/// Which place's block a step is about.
int64_t owner(const Communicator& ring, int step) {
  return (ring.rank() - step + ring.size()) % ring.size();
}

}  // namespace

// [ring_keys]
Tensor RingKeys::next() {
  if (++step_ > 0) {
    passing_.wait();  // the keys of this step, and the place that wanted those before has them
    here_ = coming_;
    coming_ = {};
  }
  if (step_ + 1 < group_.ring().size()) {
    coming_ = Tensor::empty(here_.shape(), here_.dtype(), "keys");
    passing_ = send_on(group_.ring(), here_, coming_);
    if (!group_.config().overlaps()) passing_.wait();
  }
  return here_;
}
// [ring_keys]

// [ring_gradients]
void RingGradients::pass_on(const Tensor& share) {
  if (step_++ == 0) {
    own_ = share;
    return;
  }
  if (step_ > 2) {  // of the same block, from all places that it has come by
    passing_.wait();
    ops::add(share, share, coming_);
    coming_ = {};
  }
  coming_ = Tensor::empty(shape_, dtype_);
  passing_ = send_on(group_.ring_gradients(), share, coming_);
  if (!group_.config().overlaps()) passing_.wait();
}

Tensor RingGradients::own() {
  passing_.wait();
  ops::add(own_, own_, coming_);
  coming_ = {};
  return own_;
}
// [ring_gradients]

GatheredKeys::GatheredKeys(const ContextGroup& group, Tensor own)
    : group_(group), own_(std::move(own)) {
  const int64_t n = group.ring().size();
  all_ = Tensor::empty({n * own_.size(0), own_.size(1), own_.size(2), own_.size(3)}, own_.dtype(),
                       "keys");
  gathering_ = group.ring().all_gather_async(all_, own_);
  if (!group.config().overlaps()) gathering_.wait();
}

Tensor GatheredKeys::next() {
  if (step_++ == 0) return own_;  // they are here, so the first block need not wait
  gathering_.wait();
  const int64_t B = own_.size(0);
  return all_.narrow(0, owner(group_.ring(), step_ - 1) * B, B);
}

ScatteredGradients::ScatteredGradients(const ContextGroup& group, const Shape& shape, DType dtype)
    : group_(group), shape_(shape) {
  all_ = Tensor::zeros({group.ring().size() * shape[0], shape[1], shape[2], shape[3]}, dtype);
}

Tensor ScatteredGradients::share() {
  return all_.narrow(0, owner(group_.ring(), step_) * shape_[0], shape_[0]);
}

Tensor ScatteredGradients::own() {
  const Tensor sum = Tensor::empty(shape_, all_.dtype());
  group_.ring().reduce_scatter(sum, all_);
  return sum;
}

std::unique_ptr<KeyExchange> exchange_keys(const ContextGroup& group, Tensor own) {
  if (group.config().by_ring()) return std::make_unique<RingKeys>(group, std::move(own));
  return std::make_unique<GatheredKeys>(group, std::move(own));
}

std::unique_ptr<GradientExchange> exchange_gradients(const ContextGroup& group, const Shape& shape,
                                                     DType dtype) {
  if (group.config().by_ring()) return std::make_unique<RingGradients>(group, shape, dtype);
  return std::make_unique<ScatteredGradients>(group, shape, dtype);
}

}  // namespace usp
