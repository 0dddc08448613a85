#pragma once

#include "host_math.h"
#include "layers.h"
#include "tensor/runtime.h"

/// Matmuls in a narrower format, imitated in f64.
namespace usp::rehearsal {

enum class Quantisation {
  none,
  cached,   ///< a weight once per update, however many micro-batches read it
  uncached  ///< a weight whenever a matmul reads it
};

/// All three matmuls of a linear layer read quantized operands.
class QuantisedLinear : public Linear {
 public:
  QuantisedLinear(std::vector<Parameter*> weights, bool cached)
      : Linear(std::move(weights)), cached_(cached) {}

  /// How often the weight was quantized.
  int64_t quantisations() const { return quantisations_; }

 protected:
  Saved keep(const Tensor& x) const override { return {fake_quantised(x)}; }

  Tensor weight() const override {
    const int64_t version = parameters().front()->version;
    if (!cached_ || !cache_.defined() || version != cache_version_) {
      const CategoryScope scope(Category::weights);
      cache_ = fake_quantised(Linear::weight());
      cache_version_ = version;
      ++quantisations_;
    }
    return cache_;
  }

  Tensor input_gradient(const Tensor& dy) const override {
    return Linear::input_gradient(fake_quantised(dy));
  }

  void weight_gradient(const Tensor& dy, const Saved& saved, bool accumulate) const override {
    Linear::weight_gradient(fake_quantised(dy), saved, accumulate);
  }

 private:
  bool cached_;
  mutable Tensor cache_;
  mutable int64_t cache_version_ = -1, quantisations_ = 0;
};

}  // namespace usp::rehearsal
