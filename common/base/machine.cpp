#include "base/machine.h"

#include <dnnl.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "base/threads.h"
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

/// Calls see(folder) for a control group's folder and those of the groups above it. In a container
/// the path may be the host's, and the folder at the top is that of the container itself.
template <class See>
void for_each_level(const std::filesystem::path& top, const std::string& path, const See& see) {
  for (std::filesystem::path at = std::filesystem::path(path).relative_path(); true;
       at = at.parent_path()) {
    see(at.empty() ? top : top / at);
    if (at.empty()) return;
  }
}

/// Calls see(controllers, path) for each line of /proc/self/cgroup, NUMBER:CONTROLLERS:/PATH. The
/// second version of control groups has no controllers there.
template <class See>
void for_each_cgroup(const std::string& root, const See& see) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    see(line.substr(first + 1, second - first - 1), line.substr(second + 1));
  }
}

bool lists(const std::string& controllers, const std::string& one) {
  return ("," + controllers + ",").find("," + one + ",") != std::string::npos;
}

/// Bytes that a control group and those above it leave; INT64_MAX where they set no limit.
int64_t left_in_cgroup(const std::string& root, const CgroupFiles& files, const std::string& path) {
  int64_t left = INT64_MAX;
  for_each_level(root + files.folder, path, [&](const std::filesystem::path& folder) {
    const int64_t limit = number_in(folder / files.limit), usage = number_in(folder / files.usage);
    if (limit == INT64_MAX || usage == INT64_MAX) return;
    const std::string stat = folder / "memory.stat";
    const int64_t cached = number_after(stat, files.inactive) + number_after(stat, files.active);
    left = std::min(left, std::max<int64_t>(0, limit - std::max<int64_t>(0, usage - cached)));
  });
  return left;
}

/// Cores that a group's own quota is for; infinite where it has none.
double quota_of(const std::filesystem::path& folder) {
  std::ifstream file(folder / "cpu.max");  // the second version: "QUOTA PERIOD", or "max PERIOD"
  double quota = 0, period = 0;
  if (file >> quota >> period && period > 0) return quota / period;
  const int64_t first_quota = number_in(folder / "cpu.cfs_quota_us");  // -1: none
  const int64_t first_period = number_in(folder / "cpu.cfs_period_us");
  const bool limited = first_quota > 0 && first_quota != INT64_MAX && first_period > 0;
  return limited ? double(first_quota) / double(first_period) : HUGE_VAL;
}

/// Cores that the quotas of this process's control groups are for.
double cgroup_quota(const std::string& root) {
  double cores = HUGE_VAL;
  const auto see = [&](const std::filesystem::path& folder) {
    cores = std::min(cores, quota_of(folder));
  };
  for_each_cgroup(root, [&](const std::string& controllers, const std::string& path) {
    const std::string top = root + "/sys/fs/cgroup";
    if (controllers.empty()) for_each_level(top, path, see);
    if (!lists(controllers, "cpu")) return;
    // The first version has a folder for each set of controllers, and most often a link "cpu".
    for_each_level(top + "/" + controllers, path, see);
    for_each_level(top + "/cpu", path, see);
  });
  return cores;
}

std::string onednn_isa() {
#if defined(__x86_64__)
  switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_avx2:
      return "avx2";
    case dnnl_cpu_isa_avx512_core:
    case dnnl_cpu_isa_avx512_core_vnni:
      return "avx512";
    case dnnl_cpu_isa_avx512_core_bf16:
      return "avx512_bf16";
    case dnnl_cpu_isa_avx512_core_amx:
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

int available_cores(const std::string& root) {
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1, static_cast<int>(std::min(double(cores), cgroup_quota(root))));
}

/// The environment variable USP_THREADS_AS_ASKED is for a test of what finds wrong products: to
/// leave the threads as they are.
void settle_threads([[maybe_unused]] int ranks, [[maybe_unused]] bool speak) {
#ifdef _OPENMP
  if (std::getenv("USP_THREADS_AS_ASKED") != nullptr) return;
  omp_set_dynamic(0);
  if (omp_get_max_active_levels() < 1) omp_set_max_active_levels(1);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    set_num_threads(std::max(1, available_cores() / ranks));
  }
  const int asked = num_threads();
  set_num_threads(std::min(asked, omp_get_thread_limit()));
  int started = 1;
  // The new threads inherit what is blocked: a product may have its stack pointer in the heap when
  // a handler interrupts it.
  sigset_t all, before;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#pragma omp parallel
  {
#pragma omp single
    started = omp_get_num_threads();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  set_num_threads(started);
  if (started == asked || !speak) return;
  const char* limit = std::getenv("OMP_THREAD_LIMIT");
  fmt::print(stderr, "note: OpenMP starts {} of {} threads{}, and the run has no more\n", started,
             asked, limit == nullptr ? "" : fmt::format(" (OMP_THREAD_LIMIT={})", limit));
#endif
}

int64_t available_memory(const std::string& root) {
  int64_t available = number_after(root + "/proc/meminfo", "MemAvailable:") * 1024;
  for_each_cgroup(root, [&](const std::string& controllers, const std::string& path) {
    if (controllers.empty()) {
      available = std::min(available, left_in_cgroup(root, kCgroup2, path));
    } else if (lists(controllers, "memory")) {
      available = std::min(available, left_in_cgroup(root, kCgroup1, path));
    }
  });
  return available;
}

std::string build_commit() { return USP_COMMIT; }

bool is_built_from_commit() {
  return !build_commit().ends_with("-dirty") && build_commit() != "unknown";
}

std::string build_id() {
  std::string id;
  // The first object is the program; its notes are in memory.
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) {
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const ElfW(Phdr)& header = object->dlpi_phdr[i];
          if (header.p_type != PT_NOTE) continue;
          const auto* at = reinterpret_cast<const char*>(object->dlpi_addr + header.p_vaddr);
          const auto* end = at + header.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            ElfW(Nhdr) note;
            std::memcpy(&note, at, sizeof(note));
            const auto padded = [](size_t size) { return (size + 3) / 4 * 4; };
            const char* name = at + sizeof(note);
            const char* text = name + padded(note.n_namesz);
            at = text + padded(note.n_descsz);
            if (note.n_type != NT_GNU_BUILD_ID || std::memcmp(name, "GNU", 4) != 0) continue;
            for (size_t k = 0; k < note.n_descsz; ++k) {
              *static_cast<std::string*>(found) +=
                  fmt::format("{:02x}", static_cast<unsigned char>(text[k]));
            }
            return 1;
          }
        }
        return 1;
      },
      &id);
  return id;
}

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
