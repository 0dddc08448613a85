/// Problems and counters by place, and the source lines of the places.

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <unordered_map>
#include <utility>

#include "threads.h"

namespace usp::emulator {

constinit Options options;  // so that a static of another file, wherever it lies, can set some

namespace {

struct Found {
  Problem problem;
  const void *pc, *other;
};

struct State {
  std::vector<Found> problems;
  std::unordered_map<const void*, Counters> counters;
  std::map<const void*, std::set<std::array<unsigned, 6>>> checked;  // grids and blocks
  ~State() {
    if (problems.empty()) return;
    const Report report = take_report();
    std::fprintf(stderr, "emulator: problems that no test asked for:\n%s", report.text().c_str());
    std::fflush(stderr);
    _exit(EXIT_FAILURE);
  }
};

State& state() {
  static State state;
  return state;
}

struct Line {
  std::string file;
  int number = 0;
  std::string kernel;  // "file.cu:name" of the function that was not inlined

  /// "file.cu:12"; without debug information "name()".
  std::string text() const {
    return number == 0 ? kernel.substr(kernel.rfind(':') + 1) + "()"
                       : file + ":" + std::to_string(number);
  }
};

int find_base(dl_phdr_info* info, size_t, void* base) {
  *static_cast<uintptr_t*>(base) = info->dlpi_addr;
  return 1;  // the executable comes first
}

std::string name_without_folders(const std::string& path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

/// kernel, of "void scope::(anonymous namespace)::kernel<float>(int)".
std::string name_of(std::string function) {
  const std::string unnamed = "(anonymous namespace)";
  for (size_t at; (at = function.find(unnamed)) != std::string::npos;) {
    function.erase(at, unnamed.size());
  }
  function.resize(std::min(function.find_first_of("<("), function.size()));
  return function.substr(function.find_last_of(" :") + 1);
}

/// Where each place is in the source: the innermost function that is none of the emulator's own.
std::unordered_map<const void*, Line> look_up(const std::vector<const void*>& places) {
  std::unordered_map<const void*, Line> lines;
  uintptr_t base = 0;
  dl_iterate_phdr(find_base, &base);
  std::string command = "addr2line -a -f -i -C -e /proc/" + std::to_string(getpid()) + "/exe";
  for (const void* place : places) {
    char text[32];  // the address returned to is behind the call
    std::snprintf(text, sizeof(text), " %#zx", reinterpret_cast<uintptr_t>(place) - base - 1);
    command += text;
  }
  FILE* pipe = places.empty() ? nullptr : popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return lines;
  char text[4096];
  size_t place = 0;
  std::string function;  // lines of functions and of places in them take turns
  while (std::fgets(text, sizeof(text), pipe) != nullptr) {
    const std::string line = text;
    if (line.starts_with("0x")) {
      ++place;
      function.clear();
    } else if (function.empty()) {
      function = line;
    } else if (place > 0) {
      Line& found = lines[places[place - 1]];
      const size_t colon = std::min(line.rfind(':'), line.size());
      const std::string file = name_without_folders(line.substr(0, colon));
      found.kernel = file + ":" + name_of(std::exchange(function, ""));
      const bool own = line.find("/emulator/include/") != std::string::npos || file == "hopper.h";
      if (own || !found.file.empty() || line[0] == '?') continue;
      found.file = file;
      found.number = std::atoi(line.c_str() + std::min(colon + 1, line.size()));
    }
  }
  pclose(pipe);
  return lines;
}

/// The same; starts the program that knows only for places that are new.
const std::unordered_map<const void*, Line>& lines_of(std::vector<const void*> places) {
  static std::unordered_map<const void*, Line> known;
  std::erase_if(places, [](const void* place) { return known.contains(place); });
  known.merge(look_up(places));
  return known;
}

}  // namespace

void problem(const std::string& kind, const std::string& detail, const void* pc,
             const void* other) {
  std::vector<Found>& problems = state().problems;
  for (const Found& found : problems) {
    if (found.pc == pc && found.problem.kind == kind &&
        (pc != nullptr || found.problem.detail == detail)) {
      return;
    }
  }
  Problem now;
  now.kind = kind;
  now.detail = detail;
  if (current != nullptr) {
    now.thread = current->index;
    now.block = blockIdx;
  }
  problems.push_back({now, pc, other});
}

bool has_problems() { return !state().problems.empty(); }

bool kernel_has_failed() {
  return std::ranges::any_of(state().problems, [](const Found& found) {
    const std::string& kind = found.problem.kind;
    return found.pc != nullptr &&
           (kind == "out of bounds" || kind == "misaligned" || kind == "host memory");
  });
}

const char* keep_name(const void* function) {
  static auto* names = new std::map<const void*, std::string>;
  std::string& name = (*names)[function];
  if (name.empty()) {
    const auto& lines = lines_of({place_of(function)});
    const auto line = lines.find(place_of(function));
    name = line == lines.end() ? "?" : line->second.kernel;
  }
  return name.c_str();
}

Counters& counters_of(const void* pc) { return state().counters[pc]; }

void count_checked(const Launch& launch) {
  const auto& [grid, block] = std::pair(launch.grid, launch.block);
  state().checked[launch.kernel].insert({grid.x, grid.y, grid.z, block.x, block.y, block.z});
}

std::map<std::string, int64_t> checked_kernels() {
  const Locked locked(lock());
  std::vector<const void*> places;
  for (const auto& [kernel, shapes] : state().checked) places.push_back(place_of(kernel));
  const auto& lines = lines_of(places);
  std::map<std::string, int64_t> kernels;
  for (const auto& [kernel, shapes] : state().checked) {
    if (const auto line = lines.find(place_of(kernel)); line != lines.end()) {
      kernels[line->second.kernel] += std::ssize(shapes);
    }
  }
  return kernels;
}

std::string line_of(const void* place) {
  const Line& line = lines_of({place}).at(place);
  return line.file + ":" + std::to_string(line.number);
}

Report take_report() {
  const Locked locked(lock());
  wait_for_all();
  std::vector<const void*> places;
  for (const Found& found : state().problems) {
    for (const void* place : {found.pc, found.other}) {
      if (place != nullptr) places.push_back(place);
    }
  }
  for (const auto& [pc, counters] : state().counters) places.push_back(pc);
  const auto& lines = lines_of(places);

  Report report;
  for (const auto& [pc, counters] : state().counters) {
    report.total += counters;
    const auto line = lines.find(pc);
    if (line == lines.end()) continue;
    report.lines[line->second.file + ":" + std::to_string(line->second.number)] += counters;
  }
  for (Found& found : state().problems) {
    if (const auto line = lines.find(found.pc); line != lines.end()) {
      found.problem.file = line->second.file;
      found.problem.line = line->second.number;
    }
    if (const auto line = lines.find(found.other); line != lines.end()) {
      found.problem.detail += ": " + line->second.text();
    }
    report.problems.push_back(found.problem);
  }
  state().problems.clear();
  state().counters.clear();
  return report;
}

std::string Problem::text() const {
  const auto index = [](const uint3& at) {
    return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) +
           ")";
  };
  return kind + " at " + (file.empty() ? "?" : file + ":" + std::to_string(line)) + ", thread " +
         index(thread) + " of block " + index(block) + ": " + detail;
}

bool Report::has(const std::string& kind) const {
  return std::any_of(problems.begin(), problems.end(),
                     [&](const Problem& problem) { return problem.kind == kind; });
}

std::string Report::text() const {
  std::string text;
  for (const Problem& problem : problems) text += problem.text() + "\n";
  return text;
}

}  // namespace usp::emulator
