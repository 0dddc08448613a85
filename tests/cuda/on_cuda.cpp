#include <stdlib.h>

#include "emulator/emulator.h"
#include "technique/case_cover.h"

/// Linked into an executable, makes the emulated GPU the device of its tests. Shutting its memory
/// off from the host takes longer than the tests of single operations do. Threads have the order
/// whose turn it is.
namespace usp::test {
namespace {

#ifdef USP_PROTECT
constexpr bool kProtect = true;
#else
constexpr bool kProtect = false;
#endif

[[maybe_unused]] const bool on_cuda = [] {
  emulator::options.protect = kProtect;
  emulator::options.threads = emulator::order_of(turn());
  emulator::options.seed = turn();
  return setenv("USP_TEST_DEVICE", "cuda", /*replace=*/0) == 0;
}();

}  // namespace
}  // namespace usp::test
