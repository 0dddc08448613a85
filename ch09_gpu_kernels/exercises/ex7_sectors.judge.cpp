#include <fmt/format.h>

#include <set>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  int64_t (*element)(int64_t thread, int64_t step, int64_t threads, int64_t rows, int64_t columns);
};

namespace {

constexpr int64_t kWarp = 32, kSector = 8;  // numbers of f32

struct Grid {
  int64_t rows, columns, threads;
  int64_t numel() const { return rows * columns; }
  int64_t sectors() const { return (numel() + kSector - 1) / kSector; }  ///< that the matrix has
};

/// Rows of whole sectors; rows that begin within one; fewer elements than threads.
constexpr Grid kGrids[] = {{64, 48, 64}, {33, 70, 96}, {5, 7, 64}};

/// What the answer makes of a matrix.
struct Walk {
  int64_t outside = -1, twice = -1, missing = -1;  ///< the first place of this kind, -1: none
  int64_t sectors = 0;                             ///< of all requests
};

Walk walk(const Answer& answer, const Grid& grid) {
  Walk found;
  std::vector<int> taken(grid.numel());
  bool goes_on = true;
  for (int64_t step = 0; goes_on && step <= grid.numel(); ++step) {
    goes_on = false;
    for (int64_t warp = 0; warp < grid.threads; warp += kWarp) {
      std::set<int64_t> sectors;
      for (int64_t thread = warp; thread < warp + kWarp; ++thread) {
        const int64_t place = answer.element(thread, step, grid.threads, grid.rows, grid.columns);
        if (place == -1) continue;
        goes_on = true;
        sectors.insert(place / kSector);
        if (place < 0 || place >= grid.numel()) {
          if (found.outside < 0) found.outside = std::abs(place);
        } else if (++taken[place] > 1 && found.twice < 0) {
          found.twice = place;
        }
      }
      found.sectors += static_cast<int64_t>(sectors.size());
    }
  }
  for (int64_t place = 0; place < grid.numel() && found.missing < 0; ++place) {
    if (taken[place] == 0) found.missing = place;
  }
  return found;
}

}  // namespace

void judge(const Answer& answer) {
  for (const Grid& grid : kGrids) {
    Walk found;
    run_alone([&] {
      found = walk(answer, grid);
      return Values{};
    });
    const std::string setting =
        fmt::format("{} x {} elements, {} threads", grid.rows, grid.columns, grid.threads);
    if (found.outside >= 0) throw NotYet({"a place lies outside the matrix", setting});
    if (found.twice >= 0) {
      throw NotYet(
          {"an element is taken twice", fmt::format("place {} of {}", found.twice, setting)});
    }
    if (found.missing >= 0) {
      throw NotYet({"an element is taken by no thread",
                    fmt::format("place {} of {}", found.missing, setting)});
    }
    if (found.sectors == grid.sectors()) continue;
    throw NotYet({found.sectors == grid.numel()
                      ? "lanes of a warp are far apart: each touches a sector of its own"
                      : "some sectors are touched twice",
                  fmt::format("{} sectors, where the matrix has {}; {}", found.sectors,
                              grid.sectors(), setting)});
  }
}

/// What matters of a walk, not its order: there are several right answers.
Values observe(const Answer& answer, uint64_t) {
  Values seen;
  for (const Grid& grid : kGrids) {
    const Walk found = walk(answer, grid);
    seen.insert(seen.end(), {double(found.outside >= 0), double(found.twice >= 0),
                             double(found.missing >= 0), double(found.sectors)});
  }
  return seen;
}

}  // namespace usp::judging
