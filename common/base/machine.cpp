#include "base/machine.h"

#include <sched.h>

#include <algorithm>
#include <dnnl.hpp>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "commit.h"

namespace usp {

namespace {

constexpr const char* kInstructionSets[] = {"avx2",        "fma",      "avx512f", "avx512_vnni",
                                            "avx512_bf16", "amx_bf16", "asimd",   "bf16"};

/// The value of the first /proc/cpuinfo line that starts with `key`.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(key) && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "";
}

std::string onednn_isa() {
#if defined(__x86_64__)
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx512_core:
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_bf16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_amx";
    default:
      return "other";
  }
#else
  return "native";
#endif
}

}  // namespace

std::string cpu_name() {
  const std::string name = cpuinfo("model name");
  return name.empty() ? "unknown CPU" : name;
}

std::string instruction_sets() {
  std::istringstream words(cpuinfo("flags") + " " + cpuinfo("Features"));
  std::vector<std::string> present;
  for (std::string word; words >> word;) {
    if (std::ranges::find(kInstructionSets, word) != std::end(kInstructionSets)) {
      present.push_back(word);
    }
  }
  return fmt::format("{}", fmt::join(present, " "));
}

int available_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string build_commit() { return USP_COMMIT; }

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

std::string build_architecture() { return USP_ARCH_FLAGS; }

std::string matmul_library() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{} ({})", version->major, version->minor, version->patch,
                     onednn_isa());
}

std::string build_report() {
  return fmt::format(
      "ultrascale.cpp {}\n"
      "compiler      {}\n"
      "built for     {}\n"
      "CPU           {}, {} cores\n"
      "has           {}\n"
      "matmul        {}\n"
      "bf16 matmul   {}",
      build_commit(), compiler(), build_architecture(), cpu_name(), available_cores(),
      instruction_sets(), matmul_library(),
      matmul_library().find("bf16") != std::string::npos ||
              matmul_library().find("amx") != std::string::npos
          ? "native"
          : "by conversion to f32");
}

}  // namespace usp
