#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <regex>
#include <set>
#include <string>

#include "testing.h"

namespace usp::test {

/// The kernels in the sources of a folder, by "file.cu:name", as emulator::checked_kernels() has
/// them.
inline std::set<std::string> kernels_in(const std::string& folder) {
  static const std::regex kKernel(
      R"(__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\()");
  std::set<std::string> kernels;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string kind = entry.path().extension().string();
    if (kind != ".cu" && kind != ".h") continue;
    const std::string text = read_file(entry.path().string());
    for (std::sregex_iterator at(text.begin(), text.end(), kKernel), end; at != end; ++at) {
      kernels.insert(fmt::format("{}:{}", entry.path().filename().string(), at->str(1)));
    }
  }
  return kernels;
}

}  // namespace usp::test
