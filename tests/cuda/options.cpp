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
/// USP_EMULATED_DRIVER: the CUDA that the driver knows, as CUDA writes it: 12040 for 12.4; 0: there
/// is no driver. USP_EMULATED_CAPABILITY: that of the GPUs, 75 for 7.5. USP_EMULATED_CLOCK=host:
/// its events tell the host's time. USP_EMULATED_CUBLAS=none: cuBLASLt has no kernel for anything.
bool set_options() {
  const std::string_view order = given("USP_EMULATED_STREAMS"), gpus = given("USP_EMULATED_GPUS");
  if (order == "reverse") options.streams = Order::reverse;
  if (order == "shuffled") options.streams = Order::shuffled;
  const std::string_view driver = given("USP_EMULATED_DRIVER");
  const std::string_view capability = given("USP_EMULATED_CAPABILITY");
  if (!gpus.empty()) options.device_count = std::atoi(gpus.data());
  if (!driver.empty()) options.driver_version = std::atoi(driver.data());
  if (!capability.empty()) options.compute_capability = std::atoi(capability.data());
  options.nccl_version = std::atoi(given("USP_EMULATED_NCCL"));
  options.host_clock = std::string_view(given("USP_EMULATED_CLOCK")) == "host";
  if (std::string_view(given("USP_EMULATED_CUBLAS")) == "none") {
    options.cublas_lacks = [](const MatmulAsked&) { return true; };
  }
  return true;
}

const bool are_set = set_options();

}  // namespace
}  // namespace usp::emulator
