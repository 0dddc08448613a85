#include <stdlib.h>

#include "emulator/emulator.h"
#include "testing.h"

/// Linked into an executable, makes the emulated GPU the device of its tests and holds it to a
/// quarter of each tolerance: what is left is for orders of sums that this emulator has not.
namespace usp::test {
namespace {

[[maybe_unused]] const bool with_margin = [] {
  emulator::options.protect = false;
  margin = 4;
  one_pass = true;
  return setenv("USP_TEST_DEVICE", "cuda", /*replace=*/1) == 0;
}();

}  // namespace
}  // namespace usp::test
