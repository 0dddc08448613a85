#include <cstdlib>
#include <string_view>

#include "emulator/emulator.h"

namespace usp::emulator {
namespace {

/// USP_EMULATED_STREAMS: the order in which a program's streams go on.
bool set_options() {
  const char* given = std::getenv("USP_EMULATED_STREAMS");
  const std::string_view order = given == nullptr ? "" : given;
  if (order == "reverse") options.streams = Order::reverse;
  if (order == "shuffled") options.streams = Order::shuffled;
  return true;
}

const bool are_set = set_options();

}  // namespace
}  // namespace usp::emulator
