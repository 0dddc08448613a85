#include <cstdlib>
#include <string_view>

#include "emulator/emulator.h"

namespace usp::emulator {
namespace {

/// USP_EMULATED_STREAMS: the order in which a program's streams go on. USP_EMULATED_CLOCK=host: its
/// events tell the host's time.
bool set_options() {
  const char* given = std::getenv("USP_EMULATED_STREAMS");
  const std::string_view order = given == nullptr ? "" : given;
  if (order == "reverse") options.streams = Order::reverse;
  if (order == "shuffled") options.streams = Order::shuffled;
  const char* clock = std::getenv("USP_EMULATED_CLOCK");
  options.host_clock = clock != nullptr && std::string_view(clock) == "host";
  return true;
}

const bool are_set = set_options();

}  // namespace
}  // namespace usp::emulator
