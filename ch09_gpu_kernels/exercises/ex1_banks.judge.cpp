#include <fmt/format.h>

#include "emulator/judged.h"

namespace usp::judging {

struct Answer {
  void (*transpose)(int rows, int columns, const float* x, float* y);
};

namespace {

constexpr int kSide = 32, kPlaces = kSide * kSide, kSector = 8;  // numbers of f32

struct Matrix {
  int rows, columns;
  std::string text() const { return fmt::format("a matrix of {} x {}", rows, columns); }
};

/// Whole tiles; tiles that end early, and lines that begin within a sector; less than a tile.
constexpr Matrix kMatrices[] = {{64, 96}, {33, 70}, {3, 5}};

struct Ran {
  std::vector<float> x, y;
  emulator::Report counted;
};

Ran run(const Answer& answer, const Matrix& m, uint64_t seed) {
  const int64_t n = int64_t{m.rows} * m.columns;
  Ran ran{random_floats(seed, n), {}, {}};
  const Array<float> x(ran.x), y(std::vector<float>(n, NAN));
  const cuda::LaunchShape shape{{cuda::ceil_div(m.columns, kSide), cuda::ceil_div(m.rows, kSide)},
                                cuda::kThreads,
                                kPlaces * sizeof(float)};
  ran.counted =
      emulate(m.text(), [&] { launch_answer(answer.transpose, shape, m.rows, m.columns, x, y); });
  ran.y = y.host();
  return ran;
}

void expect_turned(const Ran& ran, const Matrix& m) {
  for (int64_t i = 0; i < std::ssize(ran.y); ++i) {
    const int64_t row = i / m.rows, column = i % m.rows;
    if (ran.y[i] == ran.x[column * m.columns + row]) continue;
    throw NotYet({ran.y == ran.x         ? "the matrix is copied, and not turned"
                  : std::isnan(ran.y[i]) ? "a number of y is written by no thread"
                                         : "a number of y is not the one of its place",
                  fmt::format("row {}, column {} of the transpose of {}", row, column, m.text())});
  }
}

/// Sectors in which pieces of 32 numbers lie, of lines that follow each other.
int64_t sectors_of_pieces(int lines, int length) {
  int64_t sectors = 0;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t piece = 0; piece < length; piece += kSide) {
      const int64_t first = line * length + piece,
                    last = line * length + std::min<int64_t>(piece + kSide, length) - 1;
      sectors += last / kSector - first / kSector + 1;
    }
  }
  return sectors;
}

void expect_sectors(const char* what, int64_t emulator::Counters::*sectors, int64_t enough,
                    const Ran& ran, const Matrix& m) {
  const int64_t count = ran.counted.total.*sectors;
  if (count <= enough) return;
  throw NotYet({fmt::format("lanes of a warp {} numbers that are a line apart", what),
                fmt::format("{} sectors, where {} are enough: {}", count, enough,
                            where_most(ran.counted, sectors)),
                m.text()});
}

void expect_no_conflicts(const Ran& ran, const Matrix& m) {
  const int64_t count = ran.counted.total.bank_conflicts;
  if (count == 0) return;
  const std::string where = where_most(ran.counted, &emulator::Counters::bank_conflicts);
  throw NotYet({count == int64_t{m.rows} * m.columns / kSide * (kSide - 1)
                    ? "what 32 lanes ask for lies in one bank, and comes one by one"
                    : "some lanes of a warp still meet in a bank",
                fmt::format("{} conflicts, where there could be none: {}", count, where),
                m.text()});
}

}  // namespace

void judge(const Answer& answer) {
  for (const Matrix& m : kMatrices) {
    Ran ran;
    run_alone([&] {
      ran = run(answer, m, 1);
      return Values{};
    });
    using emulator::Counters;
    expect_turned(ran, m);
    expect_sectors("read", &Counters::load_sectors, sectors_of_pieces(m.rows, m.columns), ran, m);
    expect_sectors("write", &Counters::store_sectors, sectors_of_pieces(m.columns, m.rows), ran, m);
    expect_no_conflicts(ran, m);
  }
}

/// What matters of a tile, not where its numbers are: there are many right answers.
Values observe(const Answer& answer, uint64_t seed) {
  const Matrix m{static_cast<int>(1 + seed * 7919 % 70), static_cast<int>(1 + seed * 104729 % 70)};
  const Ran ran = run(answer, m, seed);
  Values seen(ran.y.begin(), ran.y.end());
  seen.push_back(static_cast<double>(ran.counted.total.bank_conflicts));
  seen.push_back(static_cast<double>(ran.counted.total.sector_bytes()));
  return seen;
}

}  // namespace usp::judging
