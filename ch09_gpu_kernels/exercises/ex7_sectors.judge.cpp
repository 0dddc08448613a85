#include <fmt/format.h>

#include <algorithm>

#include "emulator/judged.h"

namespace usp::judging {

struct Answer {
  void (*scale)(int rows, int columns, float factor, const float* x, float* y);
};

namespace {

constexpr int64_t kSector = 8;  // numbers of f32

struct Case {
  int rows, columns, blocks, threads;
  int64_t n() const { return int64_t{rows} * columns; }
  int64_t sectors() const { return cuda::ceil_div(n(), kSector); }
  std::string text() const {
    return fmt::format("{} x {} numbers, {} blocks of {} threads", rows, columns, blocks, threads);
  }
};

/// Rows of whole sectors; rows that begin within one; fewer numbers than threads.
constexpr Case kCases[] = {{64, 48, 1, 64}, {33, 70, 3, 32}, {5, 7, 2, 64}};
constexpr float kFactor = 3;

struct Ran {
  std::vector<float> x, y;
  emulator::Report counted;
};

Ran run(const Answer& answer, const Case& grid, uint64_t seed) {
  Ran ran{random_floats(seed, grid.n()), {}, {}};
  const Array<float> x(ran.x), y(std::vector<float>(grid.n(), NAN));
  ran.counted = emulate(grid.text(), [&] {
    launch_answer(answer.scale, {{grid.blocks}, grid.threads}, grid.rows, grid.columns, kFactor, x,
                  y);
  });
  ran.y = y.host();
  return ran;
}

using Count = int64_t emulator::Counters::*;

void expect_sectors(const char* what, Count sectors, Count requests, const Ran& ran,
                    const Case& grid) {
  const int64_t count = ran.counted.total.*sectors;
  if (count == grid.sectors()) return;
  throw NotYet(
      {count == grid.n() ? "lanes of a warp are far apart: each touches a sector of its own"
                         : "some sectors are touched twice",
       fmt::format("{} sectors are {} in {} requests, where the matrix has {}: {}", count, what,
                   ran.counted.total.*requests, grid.sectors(), where_most(ran.counted, sectors)),
       grid.text()});
}

}  // namespace

void judge(const Answer& answer) {
  for (const Case& grid : kCases) {
    Ran ran;
    run_alone([&] {
      ran = run(answer, grid, 1);
      return Values{};
    });
    for (int64_t i = 0; i < grid.n(); ++i) {
      if (ran.y[i] == kFactor * ran.x[i]) continue;
      throw NotYet(
          {std::isnan(ran.y[i]) ? "a number is scaled by no thread"
                                : "a number is not the scaled one of its place",
           fmt::format("row {}, column {}; {}", i / grid.columns, i % grid.columns, grid.text())});
    }
    using emulator::Counters;
    expect_sectors("read", &Counters::load_sectors, &Counters::load_requests, ran, grid);
    expect_sectors("written", &Counters::store_sectors, &Counters::store_requests, ran, grid);
  }
}

/// What matters of a walk, not its order: there are several right answers.
Values observe(const Answer& answer, uint64_t seed) {
  const auto draw = [&](uint64_t index, int64_t most) {
    return static_cast<int>(1 + (seed * 7919 + index * 104729) % most);
  };
  const Ran ran = run(answer, {draw(1, 40), draw(2, 40), draw(3, 3), 32 * draw(4, 3)}, seed);
  Values seen(ran.y.begin(), ran.y.end());
  seen.push_back(static_cast<double>(ran.counted.total.load_sectors));
  seen.push_back(static_cast<double>(ran.counted.total.store_sectors));
  return seen;
}

}  // namespace usp::judging
