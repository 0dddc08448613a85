#include "train/rope.h"

#include <cmath>
#include <vector>

#include "tensor/runtime.h"

namespace usp {

// [rope]
RopeTable::RopeTable(const ModelConfig& config, int64_t positions, DType dtype) {
  const CategoryScope scope(Category::workspace);
  const int64_t pairs = config.rotary_dim() / 2;
  if (Runtime::current().device() == Device::meta) {  // nobody reads it, however long it may be
    cos = Tensor::empty({positions, pairs}, accumulate_dtype(dtype));
    sin = Tensor::empty({positions, pairs}, accumulate_dtype(dtype));
    return;
  }
  const double amplitude = config.rope_scaling.amplitude();
  std::vector<double> cosines(positions * pairs), sines(positions * pairs);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < pairs; ++c) {
      const double angle =
          double(p) * config.rope_scaling.frequency(config.rope_theta, c, config.rotary_dim());
      cosines[p * pairs + c] = amplitude * std::cos(angle);
      sines[p * pairs + c] = amplitude * std::sin(angle);
    }
  }
  cos = Tensor::from_host(cosines, {positions, pairs}, accumulate_dtype(dtype));
  sin = Tensor::from_host(sines, {positions, pairs}, accumulate_dtype(dtype));
}
// [rope]

}  // namespace usp
