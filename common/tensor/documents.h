#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tensor/tensor.h"

namespace usp {

/// Documents that lie one after the other in a sample: attention sees no key of an earlier one.
/// Only the queries need to know; keys may come from anywhere.
class Documents {
 public:
  /// All positions are of one document.
  Documents() = default;
  /// begins [B, S], row-major: the position at which the document of each query begins.
  Documents(std::vector<int32_t> begins, const Shape& shape)
      : begins_(Tensor::from_host(begins, shape, "documents")),
        on_host_(std::make_shared<const std::vector<int32_t>>(std::move(begins))) {}

  bool defined() const { return begins_.defined(); }
  const Tensor& begins() const { return begins_; }  ///< [B, S] (i32) or undefined
  /// The same numbers, for causal_pairs(): also where kernels run on another device, or nowhere.
  std::span<const int32_t> on_host() const {
    return on_host_ ? std::span(*on_host_) : std::span<const int32_t>();
  }
  /// Documents of `count` samples, from `first` on.
  Documents of_samples(int64_t first, int64_t count) const {
    if (!defined()) return {};
    Documents part;
    part.begins_ = begins_.narrow(0, first, count);
    const auto begin = on_host_->begin() + first * begins_.size(1);
    part.on_host_ =
        std::make_shared<const std::vector<int32_t>>(begin, begin + count * begins_.size(1));
    return part;
  }

 private:
  Tensor begins_;
  std::shared_ptr<const std::vector<int32_t>> on_host_;
};

}  // namespace usp
