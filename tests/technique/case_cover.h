#pragma once

#include <functional>
#include <set>
#include <tuple>
#include <vector>

#include "base/rng.h"

/// Few points of a space of settings that still bring every two settings together.
namespace usp::test {

/// Of each axis, which of its values.
using Point = std::vector<size_t>;

/// Points with a meaning, among which every pair of values of two axes occurs, unless none of so
/// many candidates with it has a meaning; then so many at random. `sizes`: how many values each
/// axis has.
inline std::vector<Point> cover_pairs(
    const std::vector<size_t>& sizes, size_t random,
    const std::function<bool(const Point&)>& has_meaning = [](const Point&) { return true; },
    int candidates = 3000) {
  using Pair = std::tuple<size_t, size_t, size_t, size_t>;  // axis, value, axis, value
  const auto pairs_of = [](const Point& point) {
    std::set<Pair> pairs;
    for (size_t i = 0; i < point.size(); ++i) {
      for (size_t j = i + 1; j < point.size(); ++j) pairs.insert({i, point[i], j, point[j]});
    }
    return pairs;
  };
  const RandomStream stream(11, "cases");
  uint64_t draws = 0;
  const auto draw = [&] {
    Point point;
    for (size_t size : sizes) point.push_back(stream.bits(draws++).a % size);
    return point;
  };
  std::set<Pair> missing;
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (size_t j = i + 1; j < sizes.size(); ++j) {
      for (size_t a = 0; a < sizes[i]; ++a) {
        for (size_t b = 0; b < sizes[j]; ++b) missing.insert({i, a, j, b});
      }
    }
  }
  std::vector<Point> chosen;
  while (!missing.empty()) {
    const auto [i, a, j, b] = *missing.begin();
    size_t most = 0, with_meaning = 0;
    Point best;
    for (int candidate = 0; candidate < candidates && with_meaning < 100; ++candidate) {
      Point point = draw();
      point[i] = a;
      point[j] = b;
      if (!has_meaning(point)) continue;
      ++with_meaning;
      size_t gain = 0;
      for (const Pair& pair : pairs_of(point)) gain += missing.count(pair);
      if (gain > most) most = gain, best = point;
    }
    missing.erase({i, a, j, b});
    if (with_meaning == 0) continue;
    chosen.push_back(best);
    for (const Pair& pair : pairs_of(best)) missing.erase(pair);
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
