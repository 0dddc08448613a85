#include <algorithm>
#include <array>
#include <cmath>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  void (*merge_row)(std::span<double> out, double& lse, std::span<const double> part_out,
                    double part_lse);
};

namespace {

/// Attention of one row, over some keys.
struct Part {
  Values out;  ///< [D]
  double lse = -INFINITY;
};

using Parts = std::vector<Part>;  ///< by row
using Merge = std::function<void(Part& sum, const Part& part)>;

constexpr int64_t kKeys = 3;  // of a part

/// Rows whose keys come in this many parts.
struct Case {
  int64_t rows, D, parts;
  double apart = 0;     ///< by how much the scores of a part exceed those of the part before
  bool hidden = false;  ///< rows see no key of some parts, and the last row none at all

  std::string text() const {
    return fmt::format("{} parts{}{}", parts,
                       apart == 0 ? "" : fmt::format(", scores {} apart", apart),
                       hidden ? ", some of which a row does not see" : "");
  }
  bool sees(int64_t row, int64_t part) const {
    return !hidden || (row + 1 < rows && (row + part) % 3 != 0);
  }
  /// Attention of a row to the keys [first, last); those of a part it does not see do not count.
  Part attend(int64_t row, int64_t first, int64_t last) const {
    const Values scores = normals(700 + row, parts * kKeys);
    const Values values = normals(800 + row, parts * kKeys * D);
    const auto score = [&](int64_t key) {
      return 2 * scores[key] + apart * (double(key / kKeys) - double(parts / 2));
    };
    Part all{Values(D)};
    double largest = -INFINITY, sum = 0;
    for (int64_t key = first; key < last; ++key) {
      if (sees(row, key / kKeys)) largest = std::max(largest, score(key));
    }
    for (int64_t key = first; key < last; ++key) {
      if (!sees(row, key / kKeys)) continue;
      const double weight = std::exp(score(key) - largest);
      sum += weight;
      for (int64_t d = 0; d < D; ++d) all.out[d] += weight * values[key * D + d];
    }
    if (sum == 0) return all;
    for (double& value : all.out) value /= sum;
    all.lse = largest + std::log(sum);
    return all;
  }
  /// Every row's parts, merged one after the other.
  Parts merged(const Merge& merge) const {
    Parts found;
    for (int64_t row = 0; row < rows; ++row) {
      Part sum = attend(row, 0, kKeys);
      for (int64_t part = 1; part < parts; ++part) {
        merge(sum, attend(row, part * kKeys, (part + 1) * kKeys));
      }
      found.push_back(sum);
    }
    return found;
  }
  /// Attention of every row to all its keys at once.
  Parts whole() const {
    Parts found;
    for (int64_t row = 0; row < rows; ++row) found.push_back(attend(row, 0, parts * kKeys));
    return found;
  }
};

/// out of every row, or lse; rows that see no key are left out, for their lse is no finite number.
Values outs(const Case& c, const Parts& rows) {
  Values all;
  for (const Part& row : std::span(rows).first(c.rows - c.hidden)) {
    all.insert(all.end(), row.out.begin(), row.out.end());
  }
  return all;
}

Values lses(const Case& c, const Parts& rows) {
  Values all;
  for (const Part& row : std::span(rows).first(c.rows - c.hidden)) all.push_back(row.lse);
  return all;
}

Merge of(const Answer& answer) {
  return [&answer](Part& sum, const Part& part) {
    answer.merge_row(sum.out, sum.lse, part.out, part.lse);
  };
}

/// A wrong merge: the weights of the two outputs, and the new lse, of two lse.
using Mistake = std::function<std::array<double, 3>(double lse, double part_lse)>;

double log_sum(double a, double b) {
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}
double share(double a, double b) { return std::exp(a - log_sum(a, b)); }

struct NamedMistake {
  std::string words;
  Mistake mistake;
};

const std::vector<NamedMistake>& mistakes() {
  static const std::string not_one = "the weights do not add up to 1: divide by the sum of both";
  static const std::string alike =
      "both parts count alike: each weighs as much as its sum of exp(scores), which is exp(lse)";
  static const std::vector<NamedMistake> all = {
      // Right in out, wrong in lse.
      {"lse is still that of the keys before: the next part would weigh too much",
       [](double a, double b) {
         return std::array{share(a, b), share(b, a), a};
       }},
      {"lse is that of the other keys: it counts both",
       [](double a, double b) {
         return std::array{share(a, b), share(b, a), b};
       }},
      {"the larger lse was taken out, and does not come back after the log",
       [](double a, double b) {
         return std::array{share(a, b), share(b, a), log_sum(a, b) - std::max(a, b)};
       }},
      {"lse is the larger of the two: the log of the weights' sum is missing",
       [](double a, double b) {
         return std::array{share(a, b), share(b, a), std::max(a, b)};
       }},
      {"lse is a log: the sums of exp(scores) are added, not their logs",
       [](double a, double b) {
         return std::array{share(a, b), share(b, a), a + b};
       }},
      // Wrong in out.
      {not_one,
       [](double a, double b) {
         return std::array{std::exp(a), std::exp(b), log_sum(a, b)};
       }},
      {not_one,
       [](double a, double b) {
         const double larger = std::max(a, b);
         return std::array{std::exp(a - larger), std::exp(b - larger), log_sum(a, b)};
       }},
      {alike,
       [](double a, double b) {
         return std::array{1.0, 1.0, log_sum(a, b)};
       }},
      {alike,
       [](double a, double b) {
         return std::array{0.5, 0.5, log_sum(a, b)};
       }},
      {"each part has the other one's weight",
       [](double a, double b) {
         return std::array{share(b, a), share(a, b), log_sum(a, b)};
       }},
      {"the part with the larger lse took the other one's place: both have a weight",
       [](double a, double b) {
         return std::array{double(a >= b), double(a < b), log_sum(a, b)};
       }},
      {"the other keys have changed nothing",
       [](double a, double) {
         return std::array{1.0, 0.0, a};
       }},
      {"the other keys have taken the place of those before",
       [](double, double b) {
         return std::array{0.0, 1.0, b};
       }},
  };
  return all;
}

Merge wrong_merge(const Mistake& mistake) {
  return [&mistake](Part& sum, const Part& part) {
    const auto [own, other, lse] = mistake(sum.lse, part.lse);
    for (size_t d = 0; d < sum.out.size(); ++d) {
      sum.out[d] = own * sum.out[d] + other * part.out[d];
    }
    sum.lse = lse;
  };
}

bool has_nan(const Parts& rows) {
  return std::ranges::any_of(rows, [](const Part& row) {
    return std::isnan(row.lse) ||
           std::ranges::any_of(row.out, [](double x) { return std::isnan(x); });
  });
}

/// The last row sees no key in any part.
void check_no_key(const Case& c, const Part& row) {
  const bool zero = std::ranges::all_of(row.out, [](double value) { return value == 0; });
  if (zero && row.lse == -INFINITY) return;
  throw NotYet({zero ? "a row that sees no key has lse -inf: with another number it would weigh "
                       "something in the next merge"
                     : "a row that sees no key has changed: its out is 0",
                fmt::format("{}: out[0] is {}, lse is {}", c.text(), row.out[0], row.lse)});
}

/// What to say of a result that no known mistake explains.
std::string words_for(const Case& c, const Outcome& got, const Values& wanted) {
  double worst = 0, scale = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    worst = std::max(worst, std::abs(got.values[0][i] - wanted[i]));
    scale = std::max(scale, std::abs(wanted[i]));
  }
  if (c.apart != 0) {
    return "exp(lse) leaves the range of numbers: take the larger lse out of both first";
  }
  if (worst < 1e-5 * scale) {
    return "the result is rounded on the way: it stays in the accumulating dtype until the last "
           "part is in";
  }
  if (c.hidden) return "a part without a key that the row sees weighs exp(-inf) = 0";
  return "this is not attention to all keys";
}

void judge_one(const Answer& answer, const Case& c) {
  Parts rows;
  Outcome got = run_alone([&] {
    rows = c.merged(of(answer));
    return Values();
  });
  if (c.hidden) {
    if (has_nan(rows)) {
      throw NotYet({"a row that has seen no key becomes NaN: -inf - -inf is no number", c.text()});
    }
    check_no_key(c, rows.back());
  }
  const Parts whole = c.whole();
  const auto check = [&](const char* what, Values (*values_of)(const Case&, const Parts&)) {
    got.values[0] = values_of(c, rows);
    const Values wanted = values_of(c, whole);
    std::vector<Suspect> suspects;
    for (const auto& [words, mistake] : mistakes()) {
      suspects.push_back({words, {values_of(c, c.merged(wrong_merge(mistake)))}});
    }
    expect_values(c.text(), what, got, {wanted}, suspects, words_for(c, got, wanted));
  };
  check("out", outs);
  check("lse", lses);
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {.rows = 9, .D = 3, .parts = 2});
  judge_one(answer, {.rows = 5, .D = 4, .parts = 5});
  judge_one(answer, {.rows = 3, .D = 2, .parts = 3, .apart = 1000});
  judge_one(answer, {.rows = 3, .D = 2, .parts = 3, .apart = -1000});
  judge_one(answer, {.rows = 7, .D = 2, .parts = 4, .hidden = true});
  judge_one(answer, {.rows = 1, .D = 1, .parts = 1});
}

Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed);
  const Case c{.rows = 3 + value % 9,
               .D = 1 + value % 5,
               .parts = 2 + value % 4,
               .apart = double(value % 7) * 10,
               .hidden = value % 3 == 0};
  Values all;
  for (const Part& row : c.merged(of(answer))) {
    all.insert(all.end(), row.out.begin(), row.out.end());
    all.push_back(std::isinf(row.lse) ? -99 : row.lse);
  }
  return all;
}

}  // namespace usp::judging
