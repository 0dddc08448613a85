#include "grads.h"

namespace usp {

Grads::Grads(ParameterList& parameters)
    : parameters_(parameters), contributions_(parameters.size()) {}

void Grads::begin_window(int64_t micro_batches) {
  micro_batches_ = micro_batches;
  contributions_.assign(parameters_.size(), 0);
}

void Grads::add(std::span<Parameter* const> parameters, const Compute& compute) {
  const int64_t before = contributions_[parameters[0]->index];
  for (const Parameter* parameter : parameters) {
    const int64_t expected = parameter->uses * micro_batches_;
    USP_CHECK(contributions_[parameter->index] < expected,
              "{}: more than the {} gradient contributions expected in this window",
              parameter->name, expected);
    USP_CHECK(contributions_[parameter->index] == before,
              "{} and {} share a matmul but not their number of contributions", parameters[0]->name,
              parameter->name);
  }
  compute(/*accumulate=*/before > 0);
  for (Parameter* parameter : parameters) {
    const int64_t count = ++contributions_[parameter->index];
    if (count == parameter->uses * micro_batches_ && on_ready_) on_ready_(*parameter);
  }
}

void Grads::end_window() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t expected = parameters_[i].uses * micro_batches_;
    USP_CHECK(contributions_[i] == expected, "{} got {} of {} gradient contributions",
              parameters_[i].name, contributions_[i], expected);
  }
}

}  // namespace usp
