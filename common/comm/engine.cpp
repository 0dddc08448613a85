#include "comm/engine.h"

namespace usp {

void Engine::abandon(Operation& operation) {
  try {
    wait(operation);
  } catch (const Error&) {
  }
  operation.tensors.clear();
  operation.scratch.reset();
}

void DryEngine::submit(std::shared_ptr<Operation> operation) {
  for (const Stage& stage : operation->stages) {
    for (const Message& message : stage.sends) {
      operation->wire_bytes += message.bytes;
      operation->header_bytes += kHeaderBytes;
    }
  }
  operation->done.store(1);
}

}  // namespace usp
