#include "train/pass.h"

#include <algorithm>

namespace usp {

void each_run(const Pass& pass, int64_t first, int64_t rows,
              const std::function<void(int64_t row, int64_t count, int64_t token)>& body) {
  const int64_t S = pass.positions.count();
  for (int64_t row = 0, count = 0; row < rows; row += count) {
    const int64_t sample = (first + row) / S, in_sample = (first + row) % S;
    count = std::min(rows - row, pass.positions.run_from(in_sample));
    body(row, count, (pass.first_sample + sample) * pass.seq_len + pass.positions[in_sample]);
  }
}

Tensor last_positions(const Tensor& x, const Pass& pass) {
  const int64_t B = pass.num_samples, S = pass.positions.count(), H = x.size(1);
  return x.view({B, S, H}).narrow(1, S - 1, 1).to_contiguous().view({B, H});
}

}  // namespace usp
