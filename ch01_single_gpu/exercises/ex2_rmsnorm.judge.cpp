#include <algorithm>
#include <cmath>
#include <limits>

#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  void (*rmsnorm_backward)(std::span<double> dx, std::span<const double> dy,
                           std::span<const double> x, std::span<const double> weight, double rstd);
};

namespace {

constexpr double kEps = 0.1;  // large, so that a missing eps shows
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// A token's input. What lies before and behind it is NaN, which spoils whoever reads it.
struct Token {
  Token(uint64_t seed, int64_t H) : H(H), x(framed(seed)), dy(framed(seed + 1)) {
    weight = framed(seed + 2);
    for (double& value : weight) value += 1;
  }

  Values framed(uint64_t seed) const {
    Values values = normals(seed, H);
    values.insert(values.begin(), kNaN);
    values.push_back(kNaN);
    return values;
  }
  static std::span<const double> inner(const Values& values) {
    return std::span(values).subspan(1, values.size() - 2);
  }

  double rstd() const {
    double squares = 0;
    for (double value : inner(x)) squares += value * value;
    return 1 / std::sqrt(squares / double(H) + kEps);
  }
  /// The loss whose gradient at y is dy.
  double loss() const {
    double sum = 0;
    for (int64_t h = 1; h <= H; ++h) sum += dy[h] * x[h] * rstd() * weight[h];
    return sum;
  }

  int64_t H;
  Values x, dy, weight;  ///< [1 + H + 1]
};

Outcome run(const Answer& answer, const Token& token) {
  return run_alone([&] {
    Values dx(token.H + 2, -7);
    answer.rmsnorm_backward(std::span(dx).subspan(1, token.H), Token::inner(token.dy),
                            Token::inner(token.x), Token::inner(token.weight), token.rstd());
    if (dx.front() != -7 || dx.back() != -7) throw NotYet({"it writes beyond the end of dx"});
    return Values(dx.begin() + 1, dx.end() - 1);
  });
}

/// The gradient by central differences of fourth order.
Values numeric_gradient(Token token) {
  constexpr double kStep = 3e-4;
  Values gradient;
  for (int64_t h = 1; h <= token.H; ++h) {
    const double centre = token.x[h];
    const auto loss_at = [&](double offset) {
      token.x[h] = centre + offset;
      return token.loss();
    };
    const double near = loss_at(kStep) - loss_at(-kStep);
    const double far = loss_at(2 * kStep) - loss_at(-2 * kStep);
    token.x[h] = centre;
    gradient.push_back((8 * near - far) / (12 * kStep));
  }
  return gradient;
}

/// What people make of it: g * rstd + factor * x * (sum of g * x) * rstd^power, g = dy * weight.
struct Variant {
  const char* words;
  double factor;
  int power = 3;
  bool weight = true;
  bool sum = true;  ///< over all channels
};

Values gradient_of(const Variant& variant, const Token& token) {
  const double rstd = token.rstd();
  const auto g = [&](int64_t h) { return token.dy[h] * (variant.weight ? token.weight[h] : 1); };
  double sum = 0;
  for (int64_t h = 1; h <= token.H; ++h) sum += g(h) * token.x[h];
  Values dx;
  for (int64_t h = 1; h <= token.H; ++h) {
    const double along = variant.sum ? sum : g(h) * token.x[h];
    dx.push_back(g(h) * rstd + variant.factor * token.x[h] * along * std::pow(rstd, variant.power));
  }
  return dx;
}

void judge_one(const Answer& answer, const Token& token) {
  const double H = double(token.H);
  const Variant variants[] = {
      {"the second path is missing: rstd depends on every channel of x, so each channel moves all "
       "of y",
       0},
      {"the weight is missing: dy reaches the norm multiplied by it", -1 / H, 3, false},
      {"the weight is missing: dy reaches the norm multiplied by it", 0, 3, false},
      {"the second path is H times too large: rstd depends on the mean of the squares, not on "
       "their sum",
       -1},
      {"the second path has the wrong sign: a longer x makes rstd smaller", 1 / H},
      {"the second path has the wrong power of rstd: the derivative of u^(-1/2) is -1/2 u^(-3/2)",
       -1 / H, 1},
      {"the second path has the wrong power of rstd: the derivative of u^(-1/2) is -1/2 u^(-3/2)",
       -1 / H, 2},
      {"the second path is taken for each channel alone: it sums over all of them", -1 / H, 3, true,
       false},
  };
  std::vector<Suspect> suspects;
  for (const Variant& variant : variants) {
    suspects.push_back({variant.words, {gradient_of(variant, token)}});
  }
  expect_values(fmt::format("H = {}", token.H), "dx", run(answer, token), {numeric_gradient(token)},
                suspects, "dx is not the gradient of the loss, by finite differences", 1e-8);
}

}  // namespace

void judge(const Answer& answer) {
  for (int64_t H : {4, 1, 64, 33}) judge_one(answer, Token(10 * H, H));
}

Values observe(const Answer& answer, uint64_t seed) {
  return run(answer, Token(1000 + 10 * seed, 1 + static_cast<int64_t>(seed * 7 % 50))).values[0];
}

}  // namespace usp::judging
