#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  int (*place)(int row, int column);
};

namespace {

constexpr int kSide = 32, kPlaces = kSide * kSide, kBanks = 32;

/// Turns beyond the first in which 32 lanes get the numbers at these places.
int conflicts(const std::array<int, kSide>& places) {
  std::array<int, kBanks> in_bank{};
  for (const int place : places) ++in_bank[((place % kBanks) + kBanks) % kBanks];
  return *std::max_element(in_bank.begin(), in_bank.end()) - 1;
}

/// What the answer makes of a tile.
struct Tile {
  int outside = -1, twice = -1;  ///< the first number of this kind, -1: none
  int rows = 0, columns = 0;     ///< conflicts of all rows, of all columns
  std::vector<int> places;
};

Tile look_at(const Answer& answer) {
  Tile found;
  std::vector<int> taken(kPlaces);
  for (int i = 0; i < kPlaces; ++i) {
    const int place = answer.place(i / kSide, i % kSide);
    found.places.push_back(place);
    if (place < 0 || place >= kPlaces) {
      if (found.outside < 0) found.outside = i;
    } else if (++taken[place] > 1 && found.twice < 0) {
      found.twice = i;
    }
  }
  for (int i = 0; i < kSide; ++i) {
    std::array<int, kSide> row{}, column{};
    for (int j = 0; j < kSide; ++j) {
      row[j] = found.places[i * kSide + j];
      column[j] = found.places[j * kSide + i];
    }
    found.rows += conflicts(row);
    found.columns += conflicts(column);
  }
  return found;
}

std::string text_of(const Tile& tile, int i) {
  return fmt::format("place({}, {}) is {}", i / kSide, i % kSide, tile.places[i]);
}

}  // namespace

void judge(const Answer& answer) {
  Tile tile;
  run_alone([&] {
    tile = look_at(answer);
    return Values{};
  });
  if (tile.outside >= 0) {
    throw NotYet({"a place lies outside the tile, which has 1,024: a longer line needs more",
                  text_of(tile, tile.outside)});
  }
  if (tile.twice >= 0) {
    throw NotYet({"two numbers have one place, so one of them is lost", text_of(tile, tile.twice)});
  }
  constexpr int kMost = kSide * (kSide - 1);
  const auto meet = [](const char* what, int count) {
    throw NotYet({count == kMost
                      ? fmt::format("the 32 numbers of a {} lie in one bank", what)
                      : fmt::format("some lanes that take a {} still meet in a bank", what),
                  fmt::format("{} conflicts of all {}s, where there could be none", count, what)});
  };
  if (tile.rows > 0) meet("row", tile.rows);
  if (tile.columns > 0) meet("column", tile.columns);
}

/// What matters of a tile, not where its numbers are: there are many right answers.
Values observe(const Answer& answer, uint64_t) {
  const Tile tile = look_at(answer);
  return {double(tile.outside >= 0), double(tile.twice >= 0), double(tile.rows),
          double(tile.columns)};
}

}  // namespace usp::judging
