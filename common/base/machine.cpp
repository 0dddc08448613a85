#include "base/machine.h"

#include <sched.h>

#include <algorithm>
#include <dnnl.hpp>
#include <filesystem>
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

/// The number that follows `key` in a file of lines `key number`; 0 if there is none.
int64_t number_after(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t number = 0;
    if (words >> name >> number && name == key) return number;
  }
  return 0;
}

/// A file that holds a number; INT64_MAX if it does not, as where it says "max".
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? number : INT64_MAX;
}

/// How the two versions of control groups call what they say of memory.
struct CgroupFiles {
  const char *folder, *limit, *usage, *inactive, *active;
};
constexpr CgroupFiles kCgroup1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file",
                                  "total_active_file"};
constexpr CgroupFiles kCgroup2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file",
                                  "active_file"};

/// What a control group and those above it leave; INT64_MAX where they set no limit.
int64_t left_in_cgroup(const std::string& root, const CgroupFiles& files, const std::string& path) {
  const std::filesystem::path top = root + files.folder;
  int64_t left = INT64_MAX;
  // In a container the path may be the host's, and the folder is that of the container itself.
  for (std::filesystem::path at = std::filesystem::path(path).relative_path(); true;
       at = at.parent_path()) {
    const std::filesystem::path folder = at.empty() ? top : top / at;
    const int64_t limit = number_in(folder / files.limit), usage = number_in(folder / files.usage);
    if (limit != INT64_MAX && usage != INT64_MAX) {
      const std::string stat = folder / "memory.stat";
      const int64_t cached = number_after(stat, files.inactive) + number_after(stat, files.active);
      left = std::min(left, std::max<int64_t>(0, limit - std::max<int64_t>(0, usage - cached)));
    }
    if (at.empty()) return left;
  }
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

int64_t available_memory(const std::string& root) {
  int64_t available = number_after(root + "/proc/meminfo", "MemAvailable:") * 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // NUMBER:CONTROLLERS:/PATH
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      available = std::min(available, left_in_cgroup(root, kCgroup2, path));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, left_in_cgroup(root, kCgroup1, path));
    }
  }
  return available;
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
