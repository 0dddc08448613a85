#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  void (*gates_gradient)(std::span<double> dscores, std::span<const double> dgates,
                         std::span<const double> scores, std::span<const int> choices,
                         bool normalised, double scale);
};

namespace {

/// A token, its experts and its choices.
struct Case {
  int E, k;
  bool normalised;
  double scale = 1;
  bool begun = false;  ///< dscores holds something before
  uint64_t seed = 0;

  std::string text() const {
    return fmt::format("{} of {} experts{}{}{}", k, E, normalised ? ", normalised" : "",
                       scale == 1 ? "" : fmt::format(", scale {}", scale),
                       begun ? ", with gradients in dscores before" : "");
  }
  Values scores() const {
    Values values = normals(100 + seed, E);
    for (double& value : values) value = 1 / (1 + std::exp(-value));  // sigmoid
    return values;
  }
  std::vector<int> choices() const {
    const Values all = scores();
    std::vector<int> order(E);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](int a, int b) { return all[a] > all[b]; });
    order.resize(k);
    return order;
  }
  Values dgates() const { return normals(200 + seed, k); }
  Values before() const { return begun ? normals(300 + seed, E) : Values(E); }
};

double sum_of(const Case& c) {
  double sum = 0;
  const Values scores = c.scores();
  for (const int expert : c.choices()) sum += scores[expert];
  return sum;
}

Values right(const Case& c) {
  Values found = c.before();
  const Values scores = c.scores(), dgates = c.dgates();
  const std::vector<int> choices = c.choices();
  const double sum = c.normalised ? sum_of(c) : 1;
  for (int i = 0; i < c.k; ++i) {
    for (int j = 0; j < c.k; ++j) {
      const double through_sum = c.normalised ? scores[choices[j]] / (sum * sum) : 0;
      found[choices[i]] += c.scale * dgates[j] * ((i == j ? 1 / sum : 0) - through_sum);
    }
  }
  return found;
}

/// What a mistake makes of a case: its words, and dscores.
std::vector<Suspect> suspects(const Case& c) {
  const Values scores = c.scores(), dgates = c.dgates(), before = c.before(), good = right(c);
  const std::vector<int> choices = c.choices();
  const double sum = sum_of(c);
  const auto made = [&](const std::function<double(int j)>& term) {
    Values found = before;
    for (int j = 0; j < c.k; ++j) found[choices[j]] += term(j);
    return found;
  };
  Values alone = good, shifted = before;
  for (int e = 0; e < c.E; ++e) alone[e] -= before[e];
  for (int j = 0; j < c.k; ++j) shifted[j] += good[choices[j]] - before[choices[j]];
  Values overwritten = good;
  for (const int expert : choices) overwritten[expert] -= before[expert];
  Values unscaled = before;
  for (int e = 0; e < c.E; ++e) unscaled[e] += (good[e] - before[e]) / c.scale;
  std::vector<Suspect> all = {
      {"dscores is overwritten: the losses of the balance have added their gradients before",
       {alone}},
      {"dscores is overwritten: the losses of the balance have added their gradients before",
       {overwritten}},
      {"the scale is missing: gates are scale times scores, so the gradient is, too", {unscaled}},
      {"the gradient of choice j belongs to the score of expert choices[j]: dscores has a number "
       "for each expert",
       {shifted}},
      {"nothing has been added: the router would learn from its losses alone", {before}},
      {"this is the gradient times the score: a gate that is not normalised is linear in its score",
       {made([&](int j) { return c.scale * dgates[j] * scores[choices[j]]; })}}};
  if (c.normalised) {
    all.push_back({"the sum is no constant: each chosen score is in it, so it moves all k gates",
                   {made([&](int j) { return c.scale * dgates[j] / sum; })}});
    all.push_back({"the gates are divided by the sum of their scores: this is the gradient without",
                   {made([&](int j) { return c.scale * dgates[j]; })}});
    double weighted = 0;
    for (int j = 0; j < c.k; ++j) weighted += dgates[j] * scores[choices[j]];
    all.push_back({"the gradient is still to be divided by the sum of the chosen scores",
                   {made([&](int j) { return c.scale * (dgates[j] - weighted / sum); })}});
    all.push_back({"what comes through the sum has a minus: a larger sum makes all gates smaller",
                   {made([&](int j) { return c.scale * (dgates[j] + weighted / sum) / sum; })}});
    double plain = 0;
    for (int j = 0; j < c.k; ++j) plain += dgates[j] / c.k;
    all.push_back({"gates weigh by their scores: their gradients' mean is not one of equal weights",
                   {made([&](int j) { return c.scale * (dgates[j] - plain) / sum; })}});
  }
  return all;
}

Values run(const Answer& answer, const Case& c) {
  Values found = c.before();
  const Values scores = c.scores(), dgates = c.dgates();
  const std::vector<int> choices = c.choices();
  answer.gates_gradient(found, dgates, scores, choices, c.normalised, c.scale);
  return found;
}

void judge_one(const Answer& answer, const Case& c) {
  const Outcome got = run_alone([&] { return run(answer, c); });
  const Values wanted = right(c);
  const std::vector<int> choices = c.choices();
  bool others = false;
  for (int e = 0; e < c.E; ++e) {
    others |= std::ranges::find(choices, e) == choices.end() &&
              !(std::abs(got.values[0][e] - c.before()[e]) <= 1e-12);
  }
  const char* otherwise =
      others ? "a score that was not chosen has a gradient: it is in no gate, nor in their sum"
             : "this is not the gradient of the gates";
  expect_values(c.text(), "dscores", got, {wanted}, suspects(c), otherwise);
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {.E = 5, .k = 2, .normalised = false});
  judge_one(answer, {.E = 5, .k = 2, .normalised = false, .scale = 2.5});
  judge_one(answer, {.E = 6, .k = 3, .normalised = false, .scale = 2.5, .begun = true});
  judge_one(answer, {.E = 5, .k = 2, .normalised = true});
  judge_one(answer, {.E = 7, .k = 4, .normalised = true, .scale = 2.5, .begun = true});
  judge_one(answer, {.E = 3, .k = 1, .normalised = true});
  judge_one(answer, {.E = 3, .k = 3, .normalised = true, .scale = 0.5});
}

Values observe(const Answer& answer, uint64_t seed) {
  const int value = static_cast<int>(seed);
  return run(answer, {.E = 4 + value % 9,
                      .k = 1 + value % 4,
                      .normalised = value % 2 == 0,
                      .scale = 1 + 0.5 * (value % 3),
                      .begun = value % 5 < 3,
                      .seed = seed});
}

}  // namespace usp::judging
