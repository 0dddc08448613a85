#include "types/log.h"

#include "tensor/runtime.h"
#include "train/parameter.h"

namespace usp::types {

TypedOp Log::begin(std::string_view name, std::string_view phase, int64_t micro_batch,
                   std::span<const Tensor* const> operands) {
  TypedOp typed;
  if (!listener_) return typed;
  typed.name = name;
  typed.phase = phase;
  typed.block = Runtime::current().block();
  typed.micro_batch = micro_batch;
  for (const Tensor* operand : operands) {
    const std::vector<Region> all = regions_.of(*operand);
    if (all.empty() || !all.front().is_written()) continue;
    typed.operands.push_back(all.front().type);
    note_parameter(typed, *operand);
  }
  if (!keeps_history_) return typed;
  link_ = std::ssize(history_);
  history_.push_back({typed, {}});
  return typed;
}

void Log::note_parameter(TypedOp& typed, const Tensor& x) {
  if (!listener_) return;
  const std::vector<Region> all = regions_.of(x);
  if (all.empty() || all.front().parameter == nullptr) return;
  typed.parameter = all.front().parameter->name;
  typed.taken = x.shape();
}

void Log::end(TypedOp typed, const Tensor& made) {
  end();
  if (!listener_) return;
  for (const Region& region : regions_.of(made)) {
    if (!region.is_written()) continue;
    if (!typed.result) typed.result = region.type;
    typed.is_mixed = typed.is_mixed || region.type != *typed.result;
  }
  if (typed.result) typed.shape = made.shape();
  listener_(typed);
}

}  // namespace usp::types
