#pragma once

#include <functional>
#include <string_view>

namespace usp::test {

/// Runs a kernel of this name on the current device. On the emulated one it prints a line of JSON:
/// sectors of 32 bytes a request of a warp, for loads and for stores. On a GPU a profiler counts.
void run_counted(std::string_view kernel, const std::function<void()>& run);

}  // namespace usp::test
