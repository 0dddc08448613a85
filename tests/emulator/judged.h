#pragma once

#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <string_view>

#include "cuda/launch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"
#include "judge/judge.h"

/// What judges of kernels share: the answer is a kernel, which runs on the emulated GPU.
namespace usp::judging {

using emulator::test::Array;

inline bool is_unsolved = false;  ///< a kernel came to a hole

/// Calls an answer's kernel, which must not throw on the stack of a thread.
template <class... P>
__global__ void call_answer(void (*kernel)(P...), P... arguments) {
  try {
    kernel(arguments...);
  } catch (const Unsolved&) {
    is_unsolved = true;
  }
}

/// Queues an answer's kernel.
template <class... P>
void launch_answer(void (*kernel)(P...), const cuda::LaunchShape& shape,
                   const std::type_identity_t<P>&... arguments) {
  void (*const call)(void (*)(P...), P...) = call_answer<P...>;
  cuda::launch(call, shape, nullptr, kernel, arguments...);
}

/// While it lives, half a second of the CPU's time is left: nothing else ends a thread that goes
/// round for ever.
class Deadline {
 public:
  Deadline() {
    std::signal(SIGPROF, [](int) {
      constexpr std::string_view kWords = "a thread never ends: is there a loop without an end?\n";
      static_cast<void>(!write(STDOUT_FILENO, kWords.data(), kWords.size()));
      _exit(1);
    });
    set(500'000);
  }
  ~Deadline() { set(0); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  static void set(int microseconds) {
    const itimerval time{{}, {0, microseconds}};
    setitimer(ITIMER_PROF, &time, nullptr);
  }
};

/// Causes come before what follows from them: a barrier that some threads do not reach lets others
/// race, and who comes first in a race reads what nobody has written yet.
inline ptrdiff_t precedence(const emulator::Problem& problem) {
  constexpr std::string_view kCauses[] = {"divergent barrier", "deadlock", "out of bounds", "race"};
  return std::ranges::find(kCauses, problem.kind) - kCauses;
}

/// Runs what queue() queues, and returns what was counted. All that the emulated GPU checks comes
/// first, in three orders of threads, which have to leave the same: its problems are NotYet.
template <class F>
emulator::Report emulate(const std::string& setting, F queue) {
  emulator::Options now;
  now.every_order = true;
  {
    const emulator::Use use(now);
    const Deadline deadline;
    queue();
    emulator::Report report = emulator::take_report();
    if (is_unsolved) throw Unsolved("a kernel");
    std::ranges::stable_sort(report.problems, {}, precedence);
    std::vector<std::string> lines;
    for (const emulator::Problem& problem : report.problems) lines.push_back(problem.text());
    lines.resize(std::min<size_t>(lines.size(), 3));  // more only follows from these
    lines.push_back(setting);
    if (lines.size() > 1) throw NotYet(lines);
  }
  now.every_order = false;
  now.counters = true;
  const emulator::Use use(now);
  queue();
  return emulator::take_report();
}

/// "file.cpp:12": where most was counted.
inline std::string where_most(const emulator::Report& report, int64_t emulator::Counters::*count) {
  return std::ranges::max_element(report.lines, {},
                                  [&](const auto& line) { return line.second.*count; })
      ->first;
}

/// Random numbers of a judge's input.
inline std::vector<float> random_floats(uint64_t seed, int64_t count) {
  const Values values = normals(seed, count);
  return {values.begin(), values.end()};
}

}  // namespace usp::judging
