#include <fmt/format.h>

#include "emulator/judged.h"

namespace usp::judging {

struct Answer {
  void (*queue_swiglu)(const cuda::Queue& queue, int tokens, int width, const float* gate_up,
                       float* between, float* y);
};

namespace {

/// Elements of y.
struct Shape {
  int tokens, width;
  int64_t n() const { return int64_t{tokens} * width; }
  std::string text() const { return fmt::format("{} tokens, {} numbers each", tokens, width); }
};

/// Whole sectors; more than one block; rows that begin within a sector.
constexpr Shape kShapes[] = {{5, 24}, {7, 104}, {9, 35}};
constexpr int64_t kBytes = sizeof(float);

struct Ran {
  std::vector<float> gate_up;
  Outcome outcome;
  emulator::Report counted;
  int64_t launches = 0;
};

Ran run(const Answer& answer, const Shape& shape, uint64_t seed) {
  Ran ran;
  ran.gate_up = random_floats(seed, 2 * shape.n());
  ran.outcome = run_alone([&] {
    const std::vector<float> nothing(shape.n(), NAN);
    const Array<float> gate_up(ran.gate_up), between(shape.n()), y(nothing);
    cudaEvent_t begin, end;
    USP_CUDA(cudaEventCreate(&begin));
    USP_CUDA(cudaEventCreate(&end));
    ran.counted = emulate(shape.text(), [&] {
      USP_CUDA(cudaEventRecord(begin, nullptr));
      answer.queue_swiglu(nullptr, shape.tokens, shape.width, gate_up, between, y);
      USP_CUDA(cudaEventRecord(end, nullptr));
    });
    float milliseconds = 0;  // a microsecond for each kernel and the event behind them
    USP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    ran.launches = std::lround(milliseconds * 1e3) - 1;
    const std::vector<float> found = y.host();
    return Values(found.begin(), found.end());
  });
  return ran;
}

/// f(gate, up), element by element.
std::vector<Values> expected(const Ran& ran, const Shape& shape, double (*f)(double, double)) {
  Values y;
  for (int64_t i = 0; i < shape.n(); ++i) {
    const float* gate = &ran.gate_up[i / shape.width * 2 * shape.width + i % shape.width];
    y.push_back(f(gate[0], gate[shape.width]));
  }
  return {y};
}

double silu(double x) { return x / (1 + std::exp(-x)); }

void expect_right(const Ran& ran, const Shape& shape) {
  const auto of = [&](double (*f)(double, double)) { return expected(ran, shape, f); };
  expect_values(
      shape.text(), "y", ran.outcome, of([](double gate, double up) { return silu(gate) * up; }),
      {{"gate and up have changed places: gate is the first half of a row",
        of([](double gate, double up) { return gate * silu(up); })},
       {"this is gate times up, without silu",
        of([](double gate, double up) { return gate * up; })},
       {"this is sigmoid(gate) up: silu(gate) is gate times its sigmoid",
        of([](double gate, double up) { return silu(gate) / gate * up; })},
       {"up is missing: this is silu(gate)", of([](double gate, double) { return silu(gate); })}},
      std::ranges::any_of(ran.outcome.values[0], [](double y) { return std::isnan(y); })
          ? "a number of y is written by no thread"
          : "y is not silu(gate) up",
      1e-5);
}

/// Where rows begin at sectors, so that neighbors share none.
void expect_little(const Ran& ran, const Shape& shape) {
  const emulator::Counters& counted = ran.counted.total;
  const std::string moved =
      fmt::format("{} bytes are read and written, {} would do; {}", counted.sector_bytes(),
                  3 * kBytes * shape.n(), shape.text());
  if (ran.launches != 1) {
    throw NotYet({fmt::format("{} kernels are queued: what the first leaves is written and read "
                              "again",
                              ran.launches),
                  moved});
  }
  const auto expect = [&](const std::string& words, int64_t emulator::Counters::*sectors,
                          int64_t numbers) {
    if (counted.*sectors * 32 <= numbers * kBytes) return;
    throw NotYet({words + ": " + where_most(ran.counted, sectors), moved});
  };
  if (shape.width % 8 != 0) return;
  expect("more is written than y", &emulator::Counters::store_sectors, shape.n());
  expect("more is read than gate and up, once each", &emulator::Counters::load_sectors,
         2 * shape.n());
}

}  // namespace

void judge(const Answer& answer) {
  for (const Shape& shape : kShapes) {
    const Ran ran = run(answer, shape, 1);
    expect_right(ran, shape);
    expect_little(ran, shape);
  }
  const Shape& shape = kShapes[1];
  fmt::print("{} bytes are moved where two kernels moved {}, and one launch is saved ({})\n",
             3 * kBytes * shape.n(), 5 * kBytes * shape.n(), shape.text());
}

Values observe(const Answer& answer, uint64_t seed) {
  const Shape shape{static_cast<int>(1 + seed * 7919 % 20),
                    static_cast<int>(1 + seed * 104729 % 40)};
  const Ran ran = run(answer, shape, seed);
  Values seen = ran.outcome.values[0];
  seen.push_back(static_cast<double>(ran.counted.total.sector_bytes()));
  seen.push_back(static_cast<double>(ran.launches));
  return seen;
}

}  // namespace usp::judging
