#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "testing.h"

/// Few points of a space of settings that still bring every two settings together.
namespace usp::test {

/// Whether the chapter that the test is compiled for has the technique's files as the chapter
/// before it has them. The test of the chapter that changed them last tries every case; here a
/// share of them shows that what is new goes together with the technique. USP_CARRIED names
/// techniques. Under a sanitizer all are.
inline bool is_carried([[maybe_unused]] const std::string& technique) {
#ifdef USP_CARRIED
  return std::string(USP_CARRIED).find(" " + technique + " ") != std::string::npos;
#else
  return kSanitized;
#endif
}

/// Which share of many cases has its turn: `./book test` counts submissions, so that a few
/// of them try all.
inline uint64_t turn() {
  const char* given = std::getenv("USP_TEST_TURN");
  return given == nullptr ? 0 : std::strtoull(given, nullptr, 10);
}

/// Turns that it takes to try every one of the cases that take long.
inline constexpr uint64_t kTurns = 4;

/// Whether every combination is asked for, where pairs do on every day: by `./book test --full`
/// all of them, by `--all` those whose turn it is.
inline bool is_full() { return std::getenv("USP_TEST_FULL") != nullptr; }

/// Whether those of `--all` are asked for.
inline bool is_full_in_turns() {
  const char* full = std::getenv("USP_TEST_FULL");
  return full != nullptr && std::string(full) == "in_turns";
}

/// The first `always` of the cases, and of the others those of this turn.
template <class Case>
std::vector<Case> in_turn(std::vector<Case> cases, size_t always, uint64_t turn) {
  size_t number = 0;
  std::erase_if(cases, [&](const Case&) {
    const size_t own = number++;
    return own >= always && own % kTurns != turn % kTurns;
  });
  return cases;
}

/// The cases, or those whose turn it is where `--all` asks.
template <class Case>
std::vector<Case> full_cases(std::vector<Case> cases, size_t always = 0) {
  return is_full_in_turns() ? in_turn(std::move(cases), always, turn()) : cases;
}

/// What `make` makes: cases among which every pair of values occurs, then so many at random.
template <class Make>
auto full_cases(const Make& make, size_t random) {
  return full_cases(make(random), make(0).size());
}

/// Index of one of its values for each axis.
using Point = std::vector<size_t>;

/// Which pairs of values of two axes have not met yet, in the order of their axes and values.
class MissingPairs {
 public:
  explicit MissingPairs(const std::vector<size_t>& sizes) {
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      first_.push_back(of_value_.size());
      for (size_t value = 0; value < sizes[axis]; ++value) of_value_.push_back({axis, value});
    }
    const size_t values = of_value_.size();
    missing_.assign(values * values, false);
    for (size_t i = 0; i < values; ++i) {
      for (size_t j = i + 1; j < values; ++j) {
        missing_[i * values + j] = of_value_[i].axis != of_value_[j].axis;
      }
    }
  }

  struct Value {
    size_t axis, value;
  };
  /// The first pair; nothing where all have met.
  std::optional<std::pair<Value, Value>> first() {
    next_ = std::find(missing_.begin() + next_, missing_.end(), true) - missing_.begin();
    if (next_ == std::ssize(missing_)) return {};
    return std::pair(of_value_[next_ / of_value_.size()], of_value_[next_ % of_value_.size()]);
  }
  /// Gives up the pair of first().
  void drop_first() { missing_[next_] = false; }
  /// How many of them meet in the point.
  size_t count(const Point& point) const {
    size_t count = 0;
    each(point, [&](size_t pair) { count += missing_[pair]; });
    return count;
  }
  void erase(const Point& point) {
    each(point, [&](size_t pair) { missing_[pair] = false; });
  }

 private:
  template <class Body>
  void each(const Point& point, const Body& body) const {
    for (size_t i = 0; i < point.size(); ++i) {
      const size_t row = (first_[i] + point[i]) * of_value_.size();
      for (size_t j = i + 1; j < point.size(); ++j) body(row + first_[j] + point[j]);
    }
  }

  std::vector<size_t> first_;  ///< of each axis, the number of its first value
  std::vector<Value> of_value_;
  std::vector<char> missing_;  ///< [value][value], by number
  std::ptrdiff_t next_ = 0;    ///< before it nothing is missing
};

/// Points with a meaning, among which every pair of values of two axes occurs, unless none of so
/// many candidates with it has a meaning; then so many at random. `sizes`: how many values each
/// axis has. Under a sanitizer six points, or as many as the longest axis has values, spread over
/// these.
inline std::vector<Point> cover_pairs(
    const std::vector<size_t>& sizes, size_t random,
    const std::function<bool(const Point&)>& has_meaning = [](const Point&) { return true; },
    int candidates = 3000) {
  const RandomStream stream(11, "cases");
  uint64_t draws = 0;
  const auto draw = [&] {
    Point point;
    for (size_t size : sizes) point.push_back(stream.bits(draws++).a % size);
    return point;
  };
  std::vector<Point> chosen;
  if (kSanitized) {
    const size_t longest = std::ranges::max_element(sizes) - sizes.begin();
    const size_t count = std::min<size_t>(6, sizes[longest]);
    for (int tries = 0; chosen.size() < count && tries < candidates; ++tries) {
      Point point = draw();
      point[longest] = chosen.size() * sizes[longest] / count;
      if (has_meaning(point)) chosen.push_back(std::move(point));
    }
    return chosen;
  }
  MissingPairs missing(sizes);
  while (const auto pair = missing.first()) {
    size_t most = 0, with_meaning = 0;
    Point best;
    for (int candidate = 0; candidate < candidates && with_meaning < 100; ++candidate) {
      Point point = draw();
      point[pair->first.axis] = pair->first.value;
      point[pair->second.axis] = pair->second.value;
      if (!has_meaning(point)) continue;
      ++with_meaning;
      const size_t gain = missing.count(point);
      if (gain > most) most = gain, best = point;
    }
    missing.drop_first();
    if (with_meaning == 0) continue;
    chosen.push_back(best);
    missing.erase(best);
  }
  for (size_t count = 0; count < random;) {
    const Point point = draw();
    if (!has_meaning(point)) continue;
    chosen.push_back(point);
    ++count;
  }
  return chosen;
}

}  // namespace usp::test
