#include <cstdlib>
#include <string_view>

#include "emulator/emulator.h"

namespace usp::emulator {
namespace {

const char* given(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// USP_EMULATED_STREAMS: the order in which a program's streams go on. USP_EMULATED_GPUS: how many
/// GPUs it sees. USP_EMULATED_NCCL: which version of NCCL there is, as NCCL writes it.
bool set_options() {
  const std::string_view order = given("USP_EMULATED_STREAMS"), gpus = given("USP_EMULATED_GPUS");
  if (order == "reverse") options.streams = Order::reverse;
  if (order == "shuffled") options.streams = Order::shuffled;
  if (!gpus.empty()) options.device_count = std::atoi(gpus.data());
  options.nccl_version = std::atoi(given("USP_EMULATED_NCCL"));
  return true;
}

const bool are_set = set_options();

}  // namespace
}  // namespace usp::emulator
