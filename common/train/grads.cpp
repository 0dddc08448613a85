#include "train/grads.h"

#include "tensor/ops.h"
#include "tensor/recorder.h"

namespace usp {

namespace {

void tell(const std::vector<Grads::Observer>& observers, Parameter& parameter) {
  for (const Grads::Observer& observer : observers) observer(parameter);
}

}  // namespace

Grads::Grads(ParameterList& parameters)
    : parameters_(parameters), contributions_(parameters.size()) {}

void Grads::begin_window(int64_t micro_batches, int64_t rounds) {
  micro_batches_ = micro_batches;
  rounds_ = rounds;
  contributions_.assign(parameters_.size(), 0);
}

void Grads::add(std::vector<Parameter*> parameters, Compute compute) {
  Contribution contribution{std::move(parameters), std::move(compute)};
  if (deferred_ != nullptr) {
    deferred_->push_back(std::move(contribution));
  } else {
    this->compute(contribution);
  }
}

void Grads::run(Deferred& deferred) {
  const RecordedPhase weights("weights");
  for (Contribution& contribution : deferred) {
    compute(contribution);
    contribution.compute = nullptr;  // with the tensors that it owned
  }
  deferred.clear();
}

void Grads::check_expected(const Contribution& contribution) const {
  const Parameter& first = *contribution.parameters[0];
  const int64_t before = contributions_[first.index];
  for (const Parameter* parameter : contribution.parameters) {
    const int64_t expected = parameter->uses * micro_batches_ * rounds_;
    USP_CHECK(contributions_[parameter->index] < expected,
              "{}: more than the {} gradient contributions expected in this window",
              parameter->name, expected);
    USP_CHECK(contributions_[parameter->index] == before,
              "{} and {} share a matmul but not their number of contributions", first.name,
              parameter->name);
  }
}

bool Grads::between_rounds(const Parameter& parameter) const {
  return contributions_[parameter.index] % (parameter.uses * micro_batches_) == 0;
}

// [compute]
void Grads::compute(const Contribution& contribution) {
  check_expected(contribution);
  const Parameter& first = *contribution.parameters[0];
  const bool begins = between_rounds(first);
  for (Parameter* parameter : contribution.parameters) {
    if (begins) tell(on_first_, *parameter);
  }
  contribution.compute(/*accumulate=*/!begins && !first.main_grad.defined());
  for (Parameter* parameter : contribution.parameters) {
    if (parameter->main_grad.defined()) {
      if (begins) ops::fill(parameter->main_grad, 0);
      ops::accumulate(parameter->main_grad, parameter->grad);
    }
    ++contributions_[parameter->index];
    if (between_rounds(*parameter)) tell(on_ready_, *parameter);
  }
}
// [compute]

void Grads::end_window() const {
  const RecordedPhase update("update");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t expected = parameters_[i].uses * micro_batches_ * rounds_;
    USP_CHECK(contributions_[i] == expected, "{} got {} of {} gradient contributions",
              parameters_[i].name, contributions_[i], expected);
  }
}

}  // namespace usp
