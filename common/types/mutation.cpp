#include "types/mutation.h"

#include <algorithm>
#include <limits>

namespace usp::types {

namespace {

/// The number of a message that the Checker has not heard of.
constexpr int64_t kLeftOut = std::numeric_limits<int64_t>::max();

}  // namespace

int64_t MutatedChecker::post(const Posted& operation) {
  using enum Mutation::What;
  const int64_t number = met_++;
  if (mutation_.what == none || number != mutation_.message) return Checker::post(operation);
  mutated_ = fmt::format("{} over {}", name(operation.kind), operation.group);
  const Tensor& any = operation.input->defined() ? *operation.input : *operation.output;
  const auto is_zero = [&](const Region& region) {
    return std::all_of(region.type.begin(), region.type.begin() + setting().factors.size(),
                       [](Kind kind) { return kind == Kind::zero; });
  };
  mutated_untyped_ =
      any.defined() && (any.dtype() == DType::i32 || (operation.kind == CommKind::all_reduce &&
                                                      std::ranges::all_of(parts_of(any), is_zero)));
  if (mutation_.what == left_out) return kLeftOut;
  Checker::wait(Checker::post(operation));
  return Checker::post(operation);
}

void MutatedChecker::wait(int64_t posted) {
  if (posted != kLeftOut) Checker::wait(posted);
}

}  // namespace usp::types
