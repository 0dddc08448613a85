#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  double (*rescaling)(double before, double now);
};

namespace {

using Factor = std::function<double(double before, double now)>;

constexpr int64_t kKeys = 4;  // of a tile
constexpr const char* kUpsideDown =
    "the factor is upside down: a larger maximum makes the earlier weights smaller";

/// Rows that meet their keys in this many tiles.
struct Case {
  int64_t rows, D, tiles;
  double apart = 0;     ///< by how much the scores of a tile exceed those of the tile before
  bool hidden = false;  ///< rows see no key of some tiles, and the last row none at all

  std::string text() const {
    return fmt::format("{} tiles{}{}", tiles,
                       apart == 0 ? "" : fmt::format(", scores {} apart", apart),
                       hidden ? ", some of which a row does not see" : "");
  }
  bool sees(int64_t row, int64_t tile) const {
    return !hidden || (row + 1 < rows && (row + tile) % 3 != 0);
  }
  int64_t keys() const { return tiles * kKeys; }
  /// A row's scores, -infinity where it does not see the key.
  Values scores(int64_t row) const {
    Values found = normals(300 + row, keys());
    for (int64_t key = 0; key < keys(); ++key) {
      const int64_t tile = key / kKeys;
      found[key] = sees(row, tile) ? 2 * found[key] + apart * double(tile - tiles / 2) : -INFINITY;
    }
    return found;
  }
  Values values(int64_t row) const { return normals(400 + row, keys() * D); }
};

/// A row's output and lse.
struct Row {
  Values out;  ///< [D]
  double lse = -INFINITY;
};

/// sum and out += the weights of the keys from `first` to `last`, relative to `largest`.
void add(const Case& c, const Values& scores, const Values& values, int64_t first, int64_t last,
         double largest, double& sum, Values& out) {
  for (int64_t key = first; key < last; ++key) {
    if (scores[key] == -INFINITY) continue;
    const double weight = std::exp(scores[key] - largest);
    sum += weight;
    for (int64_t d = 0; d < c.D; ++d) out[d] += weight * values[key * c.D + d];
  }
}

/// Tiles of `keys` keys, one after the other; a factor for each.
Row attend(const Case& c, int64_t row, int64_t keys, const Factor& factor) {
  const Values scores = c.scores(row), values = c.values(row);
  Row found{Values(c.D)};
  double largest = -INFINITY, sum = 0;
  for (int64_t first = 0; first < c.keys(); first += keys) {
    const double before = largest;
    for (int64_t key = first; key < first + keys; ++key) largest = std::max(largest, scores[key]);
    const double rescaled = factor(before, largest);
    sum *= rescaled;
    for (double& each : found.out) each *= rescaled;
    add(c, scores, values, first, first + keys, largest, sum, found.out);
  }
  found.lse = largest + std::log(sum);
  if (sum == 0) return found;
  for (double& each : found.out) each /= sum;
  return found;
}

/// Outputs and lse of all rows, those without a key left out.
Values attend_all(const Case& c, int64_t keys, const Factor& factor) {
  Values all;
  for (int64_t row = 0; row < c.rows - c.hidden; ++row) {
    const Row found = attend(c, row, keys, factor);
    all.insert(all.end(), found.out.begin(), found.out.end());
    all.push_back(found.lse);
  }
  return all;
}

std::vector<Suspect> suspects(const Case& c) {
  const std::pair<const char*, double (*)(double, double)> mistakes[] = {
      {kUpsideDown,
       [](double before, double now) { return std::isinf(before) ? 0 : std::exp(now - before); }},
      {"earlier weights stay relative to the maximum of their time",
       [](double, double) { return 1.0; }},
      {"a tile has put an end to all that came before it",
       [](double before, double now) { return before < now ? 0.0 : 1.0; }},
      {"these are powers of 2, where the weights are powers of e",
       [](double before, double now) { return std::exp2(before - now); }},
      {"the factor depends on the maximum before, too",
       [](double, double now) { return std::exp(-now); }},
  };
  std::vector<Suspect> found;
  for (const auto& [words, mistake] : mistakes) {
    found.push_back({words, {attend_all(c, kKeys, mistake)}});
  }
  return found;
}

bool has_nan(const Values& values) {
  return std::ranges::any_of(values, [](double x) { return std::isnan(x); });
}

void judge_one(const Answer& answer, const Case& c) {
  Row last;  // sees no key if some are hidden
  double of_first = 0;
  const Outcome got = run_alone([&] {
    of_first = answer.rescaling(-INFINITY, 1);
    last = attend(c, c.rows - 1, kKeys, answer.rescaling);
    return attend_all(c, kKeys, answer.rescaling);
  });
  if (of_first == INFINITY) throw NotYet({kUpsideDown, "where the first key comes it is infinite"});
  if (c.hidden && (has_nan(got.values[0]) || has_nan(last.out) || std::isnan(last.lse))) {
    throw NotYet({"a row that has seen no key becomes NaN: -inf - -inf is no number", c.text()});
  }
  if (c.hidden && (last.lse != -INFINITY)) {
    throw NotYet({"a row that sees no key has a sum", c.text()});
  }
  const Values whole = attend_all(c, c.keys(), [](double, double) { return 1; });
  expect_values(c.text(), "out and lse", got, {whole}, suspects(c),
                c.apart == 0 ? "this is not the output of softmax over all keys"
                             : "exp(score) leaves the range of numbers: take the difference first");
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {.rows = 9, .D = 3, .tiles = 2});
  judge_one(answer, {.rows = 5, .D = 4, .tiles = 6});
  judge_one(answer, {.rows = 7, .D = 2, .tiles = 4, .hidden = true});
  judge_one(answer, {.rows = 3, .D = 2, .tiles = 3, .apart = 1000});
  judge_one(answer, {.rows = 3, .D = 2, .tiles = 3, .apart = -1000});
}

/// What becomes of rows, not the factors: of a row without a key any number is right.
Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed);
  return attend_all({.rows = 3 + value % 9,
                     .D = 1 + value % 5,
                     .tiles = 2 + value % 4,
                     .apart = double(value % 7) * 10,
                     .hidden = value % 3 == 0},
                    kKeys, answer.rescaling);
}

}  // namespace usp::judging
