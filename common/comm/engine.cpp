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

int64_t device_scratch(EngineKind kind, int64_t ranks, int64_t numel, DType dtype) {
  if (kind != EngineKind::host) return 0;
  return algorithms::reduction_scratch(static_cast<int>(ranks), /*rank=*/0, numel, dtype,
                                       Engine::kScratchLimit);
}

void Engine::abandon(Operation& operation) {
  try {
    wait(operation);
  } catch (const Error&) {
  }
  operation.memory = {};
}

void Engine::plan(Operation& operation, const Elements& input, const Elements& output,
                  bool with_scratch) const {
  const bool reduces =
      operation.kind == CommKind::all_reduce || operation.kind == CommKind::reduce_scatter;
  Elements scratch;
  if (reduces && with_scratch) {
    operation.memory.scratch = share_scratch(*operation.group, input, scratch_limit());
    scratch = *operation.memory.scratch;
  }
  operation.piece_bytes = piece_limit();
  operation.stages = algorithms::stages(operation, input, output, scratch, scratch_limit());
}

void DryEngine::prepare(Operation& operation) {
  operation.by_device = plays_ == EngineKind::nccl;
  plan(operation, operation.memory.input, operation.memory.output,
       /*with_scratch=*/plays_ == EngineKind::host);
}

void DryEngine::submit(std::shared_ptr<Operation> operation) {
  for (const Stage& stage : operation->stages) {
    for (const Message& message : stage.sends) {
      operation->wire_bytes += message.bytes;
      if (!operation->by_device) operation->header_bytes += kHeaderBytes;
    }
  }
  operation->done.store(1);
}

}  // namespace usp
