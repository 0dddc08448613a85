#include <stdlib.h>

#include "emulator/emulator.h"

/// Linked into an executable, makes the emulated GPU the device of its tests. Shutting its memory
/// off from the host takes longer than the tests of single operations do.
namespace usp::test {
namespace {

#ifdef USP_PROTECT
constexpr bool kProtect = true;
#else
constexpr bool kProtect = false;
#endif

[[maybe_unused]] const bool on_cuda = [] {
  emulator::options.protect = kProtect;
  return setenv("USP_TEST_DEVICE", "cuda", /*replace=*/0) == 0;
}();

}  // namespace
}  // namespace usp::test
