#pragma once

#include <deque>

#include "comm/communicator.h"
#include "model.h"
#include "tensor/runtime.h"

/// Pipeline schedules over the chunks of a Model.
namespace usp::rehearsal {

/// Stage s of p in a column of ranks; with several chunks to a rank the last stage is followed by
/// the first.
class Pipeline {
 public:
  /// `boundary`: the shape of what one stage hands to the next.
  Pipeline(Model& model, Grads& grads, const Communicator& pp, int64_t chunks, Shape boundary)
      : model_(model), grads_(grads), pp_(pp), chunks_(chunks), boundary_(std::move(boundary)) {}

  /// One forward, one backward: at most p micro-batches in flight. `split`: the gradients of the
  /// weights wait until those of the inputs are on their way.
  void one_forward_one_backward(const std::vector<Pass>& passes, bool split) {
    const int64_t m = std::ssize(passes);
    const int64_t warmup = std::min<int64_t>(pp_.size() - pp_.rank() - 1, m);
    for (int64_t i = 0; i < warmup; ++i) forward(0, passes[i]);
    for (int64_t i = warmup; i < m; ++i) {
      forward(0, passes[i]);
      backward(0, passes[i - warmup], split);
      if (std::ssize(held_back_) > pp_.rank()) weights();
    }
    for (int64_t i = m - warmup; i < m; ++i) backward(0, passes[i], split);
    while (!held_back_.empty()) weights();
    finish();
  }

  /// All forward, all backward, chunk by chunk: the looping pipeline.
  void all_forward_all_backward(const std::vector<Pass>& passes) {
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      for (const Pass& pass : passes) forward(chunk, pass);
    }
    for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
      for (const Pass& pass : passes) backward(chunk, pass, /*split=*/false);
    }
    finish();
  }

  size_t most_in_flight() const { return most_in_flight_; }

 private:
  bool is_first(int64_t chunk) const { return pp_.rank() == 0 && chunk == 0; }
  bool is_last(int64_t chunk) const { return pp_.rank() == pp_.size() - 1 && chunk == chunks_ - 1; }
  int before() const { return (pp_.rank() + pp_.size() - 1) % pp_.size(); }
  int after() const { return (pp_.rank() + 1) % pp_.size(); }

  void forward(int64_t chunk, const Pass& pass) {
    Tensor x = is_first(chunk) ? Tensor() : receive(before());
    Model::Activations activations;
    const Tensor y = model_.forward_chunk(chunk, x, &activations, pass);
    if (!is_last(chunk)) send(y, after());
    in_flight_[chunk].push_back(std::move(activations));
    size_t total = 0;
    for (const auto& [c, queue] : in_flight_) total += queue.size();
    most_in_flight_ = std::max(most_in_flight_, total);
  }

  void backward(int64_t chunk, const Pass& pass, bool split) {
    const Tensor dy = is_last(chunk) ? Tensor() : receive(after());
    Model::Activations activations = std::move(in_flight_[chunk].front());
    in_flight_[chunk].pop_front();
    if (split) grads_.defer_to(&held_back_.emplace_back());
    const Tensor dx = model_.backward_chunk(chunk, dy, std::move(activations), grads_, pass);
    grads_.defer_to(nullptr);
    if (!is_first(chunk)) send(dx, before());
  }

  /// The weights' gradients of the micro-batch that has waited longest.
  void weights() {
    grads_.run(held_back_.front());
    held_back_.pop_front();
  }

  Tensor receive(int peer) {
    if (peer == pp_.rank()) {
      Tensor x = to_self_.front();
      to_self_.pop_front();
      return x;
    }
    Tensor x = Tensor::empty(boundary_, DType::f64);
    pp_.recv(x, peer);
    return x;
  }
  void send(const Tensor& x, int peer) {
    if (peer == pp_.rank()) {
      to_self_.push_back(x);
    } else {
      sent_.push_back(pp_.send_async(x, peer));
    }
  }
  void finish() {
    for (Handle& handle : sent_) handle.wait();
    sent_.clear();
  }

  Model& model_;
  Grads& grads_;
  Communicator pp_;
  int64_t chunks_;
  Shape boundary_;
  std::map<int64_t, std::deque<Model::Activations>> in_flight_;  ///< by chunk, oldest first
  std::deque<Grads::Deferred> held_back_;
  std::deque<Tensor> to_self_;
  std::vector<Handle> sent_;
  size_t most_in_flight_ = 0;
};

}  // namespace usp::rehearsal
