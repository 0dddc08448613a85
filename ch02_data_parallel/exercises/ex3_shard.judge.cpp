#include "ex3_shard.h"

#include <algorithm>
#include <numeric>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  ShardBounds (*shard_bounds)(int64_t total, int64_t offset, int64_t numel, int rank, int ranks);
};

namespace {

using Sizes = std::vector<int64_t>;
using Bounds =
    std::function<ShardBounds(int64_t total, int64_t offset, int64_t numel, int rank, int ranks)>;

/// begin and end in every parameter, by rank. A shard without elements counts as [0, 0).
std::vector<Values> bounds_of(const Bounds& bounds, const Sizes& sizes, int ranks) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<Values> all(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t offset = 0;
    for (int64_t numel : sizes) {
      const auto [begin, end] = bounds(total, offset, numel, rank, ranks);
      const bool none = begin == end;
      all[rank].insert(all[rank].end(), {none ? 0 : double(begin), none ? 0 : double(end)});
      offset += numel;
    }
  }
  return all;
}

/// Walks over the unit's elements: element e belongs to rank e / length.
ShardBounds by_walking(int64_t total, int64_t offset, int64_t numel, int rank, int ranks,
                       int64_t length) {
  ShardBounds found{0, 0};
  for (int64_t i = 0; i < numel; ++i) {
    if ((offset + i) / length != rank || rank >= ranks || offset + i >= total) continue;
    if (found.begin == found.end) found.begin = i;
    found.end = i + 1;
  }
  return found;
}

int64_t rounded_up(int64_t total, int ranks) { return (total + ranks - 1) / ranks; }

ShardBounds right(int64_t total, int64_t offset, int64_t numel, int rank, int ranks) {
  return by_walking(total, offset, numel, rank, ranks, rounded_up(total, ranks));
}

/// Well-known mistakes, each by its bounds.
std::vector<std::pair<const char*, Bounds>> mistakes() {
  return {
      {"the last elements of the unit belong to no rank: a part is total / ranks rounded up, and "
       "padding fills the last one",
       [](int64_t total, int64_t offset, int64_t numel, int rank, int ranks) {
         return by_walking(total, offset, numel, rank, ranks, std::max<int64_t>(1, total / ranks));
       }},
      {"the bounds are counted from the beginning of the unit: this parameter begins at offset",
       [](int64_t total, int64_t, int64_t numel, int rank, int ranks) {
         return right(total, 0, numel, rank, ranks);
       }},
      {"every parameter is cut by itself: it is the unit that is cut, whatever lies in it",
       [](int64_t, int64_t, int64_t numel, int rank, int ranks) {
         return right(numel, 0, numel, rank, ranks);
       }},
      {"bounds lie outside of the parameter: what belongs to its neighbors is not its own",
       [](int64_t total, int64_t offset, int64_t, int rank, int ranks) {
         const int64_t length = rounded_up(total, ranks);
         return ShardBounds{rank * length - offset, (rank + 1) * length - offset};
       }},
      {"the unit is cut between parameters: a part begins and ends wherever its length is reached",
       [](int64_t total, int64_t offset, int64_t numel, int rank, int ranks) {
         const ShardBounds own = right(total, offset, numel, rank, ranks);
         return own.begin == 0 && own.end > 0 ? ShardBounds{0, numel} : ShardBounds{0, 0};
       }},
  };
}

void judge_one(const Answer& answer, const Sizes& sizes, int ranks) {
  const std::vector<Values> wanted = bounds_of(right, sizes, ranks);
  std::vector<Suspect> suspects;
  for (const auto& [words, bounds] : mistakes()) {
    suspects.push_back({words, bounds_of(bounds, sizes, ranks)});
  }
  Outcome got;
  run_alone([&] {
    got.values = bounds_of(answer.shard_bounds, sizes, ranks);
    return Values();
  });
  expect_values(fmt::format("parameters of {} elements on {} ranks", fmt::join(sizes, ", "), ranks),
                "(begin, end) of each parameter", got, wanted, suspects,
                "some elements have no owner, or two of them");
}

const Sizes kUnits[] = {{5, 7, 1, 12, 3}, {10}, {4, 4, 4}, {1, 1}, {2, 30, 2, 30}};

}  // namespace

void judge(const Answer& answer) {
  for (const Sizes& sizes : kUnits) {
    for (int ranks : {4, 2, 3, 1, 8}) judge_one(answer, sizes, ranks);
  }
}

Values observe(const Answer& answer, uint64_t seed) {
  Sizes sizes;
  for (double value : normals(seed, 2 + static_cast<int64_t>(seed % 5))) {
    sizes.push_back(1 + static_cast<int64_t>(std::abs(value) * 12));
  }
  Values all;
  for (const Values& values : bounds_of(answer.shard_bounds, sizes, 1 + int(seed % 7))) {
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging
