#include "comm/engine.h"

#include "comm/algorithms.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// For the other ranks' contributions to this rank's slice of the message.
std::shared_ptr<Tensor> share_scratch(Group& group, const Elements& message, int64_t limit) {
  const DType dtype = message.dtype;
  const int64_t bytes =
      algorithms::reduction_scratch(group.size(), group.rank, message.numel, dtype, limit);
  std::shared_ptr<Tensor> scratch = group.scratch.lock();
  if (scratch == nullptr || scratch->bytes() < bytes) {
    const HostScope on_host;
    const CategoryScope scope(Category::communication);
    scratch = std::make_shared<Tensor>(
        Tensor::empty({bytes / bytes_of(dtype)}, dtype, "scratch of reductions"));
    group.scratch = scratch;
  }
  return scratch;
}

}  // namespace

int64_t device_scratch(EngineKind kind, int64_t ranks, int64_t rank, int64_t numel, DType dtype) {
  if (kind != EngineKind::host) return 0;
  return algorithms::reduction_scratch(static_cast<int>(ranks), static_cast<int>(rank), numel,
                                       dtype, Engine::kScratchLimit);
}

void Engine::abandon(Operation& operation) {
  try {
    wait(operation);
  } catch (const Error&) {
  }
  operation.memory = {};
}

Elements Engine::provide_scratch(Operation& operation, const Elements& input) const {
  const bool reduces =
      operation.kind == CommKind::all_reduce || operation.kind == CommKind::reduce_scatter;
  if (!reduces) return {};
  operation.memory.scratch = share_scratch(*operation.group, input, scratch_limit());
  return *operation.memory.scratch;
}

void Engine::plan(Operation& operation, const Elements& input, const Elements& output,
                  bool with_scratch) const {
  const Elements scratch = with_scratch ? provide_scratch(operation, input) : Elements{};
  operation.piece_bytes = piece_limit();
  operation.stages = algorithms::stages(operation, input, output, scratch, scratch_limit());
}

Sends Engine::sends(const Operation& operation) const {
  return algorithms::sends_of(operation.stages, *operation.group, node_size());
}

void DryEngine::prepare(Operation& operation) {
  operation.by_device = plays_ == EngineKind::nccl;
  if (plays_ == EngineKind::host) provide_scratch(operation, operation.memory.input);
}

Sends DryEngine::sends(const Operation& operation) const {
  const Operation::Memory& memory = operation.memory;
  const Tensor& sent = memory.input.defined() ? memory.input : memory.output;
  return algorithms::sends_of(operation, sent.defined() ? sent.numel() : 0, scratch_limit(),
                              node_size());
}

void DryEngine::submit(std::span<const std::shared_ptr<Operation>> operations) {
  for (const std::shared_ptr<Operation>& operation : operations) {
    const Sends sends = this->sends(*operation);
    operation->wire_bytes = sends.wire_bytes;
    if (!operation->by_device) operation->header_bytes = sends.messages * kHeaderBytes;
    operation->done.store(1);
  }
}

}  // namespace usp
