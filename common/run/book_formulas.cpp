#include "run/book_formulas.h"

namespace usp {

double book_whole_states(int64_t parameters, bool gradients_twice) {
  return (gradients_twice ? 20 : 16) * double(parameters);
}

double book_activations(const RunConfig& config, std::string_view recompute) {
  const double h = double(config.model.hidden_size), s = double(config.seq_len);
  const double heads = double(config.model.num_heads);
  double bytes = 34 + 5 * heads * s / h;
  if (recompute == "selective") bytes = 34;
  if (recompute == "full") bytes = 2;
  return double(config.model.num_layers * config.micro_batch_size) * s * h * bytes;
}

}  // namespace usp
