#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "emulator/emulator.h"
#include "technique/case_cover.h"
#include "testing.h"

/// What tests of every ladder do: run with each order of threads, and leave out what orders them.
namespace usp::lab {

/// While it lives, each_pair() runs one pair of three: the next one each time, and in a few turns
/// all with each. With --full it makes no difference.
class PairsInTurn {
 public:
  PairsInTurn() : before_(std::exchange(next_, test::turn())) {}
  ~PairsInTurn() { next_ = before_; }
  PairsInTurn(const PairsInTurn&) = delete;
  PairsInTurn& operator=(const PairsInTurn&) = delete;

  /// The number of the next one; nothing: all of them.
  static std::optional<size_t> next() {
    if (!next_ || test::is_full()) return {};
    return (*next_)++;
  }

 private:
  static inline std::optional<size_t> next_;

  std::optional<size_t> before_;
};

/// An order of threads and a completion of what is asynchronous. Races do not depend on them.
template <class F>
void each_pair(F run) {
  using emulator::Completion;
  using emulator::Order;
  const std::pair<Order, Completion> pairs[] = {{Order::forward, Completion::at_once},
                                                {Order::reverse, Completion::late},
                                                {Order::shuffled, Completion::seeded}};
  const std::optional<size_t> own = PairsInTurn::next();
  for (size_t i = 0; i < std::size(pairs); ++i) {
    if (own && *own % std::size(pairs) != i) continue;
    const auto& [threads, completion] = pairs[i];
    emulator::Options now = emulator::options;
    now.threads = threads;
    now.completion = completion;
    const emulator::Use use(now);
    INFO("threads " << static_cast<int>(threads) << ", completion "
                    << static_cast<int>(completion));
    run();
  }
}

/// What orders threads and copies, by call and place; which of them is left out.
struct Orders {
  static inline std::map<std::pair<std::string, const void*>, bool> found;
  static inline const void* left_out = nullptr;

  static bool leaves_out(const char* call, const void* place) {
    found[{call, place}];
    return place == left_out;
  }
};

/// Leaves out each of them once, in every pair, where run() gives the emulator's report: a problem
/// has to name a line of a file that is_ours(). Without `turns`: calls that change when something
/// is done, and no result. Returns how many there are.
template <class Run, class IsOurs>
size_t leave_out_each(const char* name, Run run, IsOurs is_ours, const char* turns = "") {
  emulator::Options now;
  now.leaves_out = Orders::leaves_out;
  const emulator::Use use(now);
  Orders::found.clear();
  const emulator::Report right = run();
  INFO(right.text());
  REQUIRE(right.problems.empty());
  auto found = Orders::found;
  std::erase_if(found, [&](const auto& each) { return each.first.first == turns; });
  for (const auto& [order, unused] : found) {
    Orders::left_out = order.second;
    each_pair([&, order = order] {
      const emulator::Report report = run();
      INFO(name << ": " << order.first << " at " << emulator::line_of(order.second)
                << " left out: " << report.text());
      CHECK(!report.problems.empty());
      for (const emulator::Problem& problem : report.problems) CHECK(is_ours(problem.file));
    });
    Orders::left_out = nullptr;
  }
  return found.size();
}

}  // namespace usp::lab
