#include "lab/attention_reference.h"
#include "lab/degrees.h"
#include "lab/masks.h"
#include "lab/pairs.h"

/// Every rung of attention computes what the CPU does, asks for what its formula says, and has no
/// barrier, wait or fence that it could do without.
namespace usp::lab {
namespace {

using emulator::Counters;
using emulator::Options;
using emulator::Report;
using emulator::take_report;
using emulator::Use;
using test::check_throws;

/// use(rung) for every one, of either type.
template <class F>
void each_rung(F use) {
  for (const Rung<float>* rung : attention::f32_rungs()) use(*rung);
  for (const Rung<bf16>* rung : attention::bf16_rungs()) use(*rung);
}

template <class T>
constexpr double kTolerance = sizeof(T) == sizeof(float) ? 1e-5 : 5e-3;
constexpr double kLseTolerance = 1e-5;

/// Runs the rung and compares both results with the CPU's.
template <class T>
void check_values(const Rung<T>& rung, const Shape& shape, Scores scores = Scores::usual) {
  const test::OnDevice cpu(Device::cpu);
  const Reference expected(Attended<T>(rung, shape, scores));
  each_pair([&] {
    const Attended<T> x(rung, shape, scores);
    rung.run(nullptr, x.problem);
    const Report report = take_report();
    INFO(rung.name << ": " << text_of(shape) << "\n" << report.text());
    REQUIRE(report.problems.empty());
    test::check_close(x.out(), expected.out, kTolerance<T>, "out");
    test::check_close(x.lse(), expected.lse, kLseTolerance, "lse");
  });
}

TEST_CASE("every rung computes what the CPU computes, on odd lengths, tails and shared heads") {
  const Shape shapes[] = {{2, 33, 47, 2, 1, 64},  // tails of both, two samples
                          {1, 1, 1, 1, 1, 128},
                          {1, 70, 70, 4, 2, 64, true},
                          {1, 40, 34, 1, 1, 128, true, {-6}}};  // queries before all keys
  for (const Shape& shape : shapes) {
    each_rung([&](const auto& rung) { check_values(rung, shape); });
  }
}

TEST_CASE("blocks of tensor cores compute what the CPU computes, over several tiles") {
  const Shape shapes[] = {{2, 150, 300, 2, 1, 64},
                          {1, 257, 390, 2, 2, 128, true, {133}},
                          {1, 300, 200, 2, 1, 64, true, {-140}}};
  for (const Shape& shape : shapes) {
    for (const Rung<bf16>* rung : attention::bf16_rungs()) check_values(*rung, shape);
  }
}

TEST_CASE("every rung takes documents and the two ranges of zig-zag, and rows that see no key") {
  for (const auto& [name, shape] : Masks(/*piece=*/21)) {
    each_rung([&](const auto& rung) { check_values(rung, shape); });
  }
}

TEST_CASE("blocks of tensor cores go over the tiles of documents and of two ranges") {
  for (const auto& [name, shape] : Masks(/*piece=*/100)) {
    if (shape.begins == nullptr) continue;
    for (const Rung<bf16>* rung : attention::bf16_rungs()) check_values(*rung, shape);
  }
}

TEST_CASE("keys that are not there count nothing where all scores are far below zero") {
  each_rung([&](const auto& rung) { check_values(rung, {1, 5, 37, 1, 1, 64}, Scores::far_below); });
}

TEST_CASE(
    "the polynomial's degree is the least whose powers of two are as close as lse has to be") {
  int least = 0;
  double before = 1;
  for (const Degree& each : degrees()) {
    CAPTURE(each.degree, each.error);
    REQUIRE(each.error < before);
    before = each.error;
    if (least == 0 && each.error < kLseTolerance) least = each.degree;
  }
  REQUIRE(attention::kExp2Degree == least);
}

TEST_CASE("a maximum that grows by more than a weight can hold is followed") {
  each_rung([&]<class T>(const Rung<T>& rung) {
    check_values(rung, {1, 5, sizeof(T) == 4 ? 70 : 260, 1, 1, 64}, Scores::growing);
  });
}

/// What a rung asks for.
template <class T>
attention::Cost count(const Rung<T>& rung, const Shape& shape) {
  Options now;
  now.counters = true;
  const Use use(now);
  const Attended<T> x(rung, shape);
  rung.run(nullptr, x.problem);
  const Counters counted = take_report().total;
  return {counted.sector_bytes() + counted.box_bytes, counted.product_flops, 0};
}

TEST_CASE("a rung of attention asks for as many bytes as its formula says, at tails for no more") {
  each_rung([&]<class T>(const Rung<T>& rung) {
    const int n = sizeof(T) == 4 ? 64 : 256;
    const Shape whole{1, n, 2 * n, 2, 1, 64}, causal{1, 2 * n, 2 * n, 1, 1, 128, true},
        tails{1, 70, 130, 1, 1, 64, true, {60}};
    for (const Shape* each : {&whole, &causal, &tails}) {
      const Shape& shape = *each;
      INFO(rung.name << ", " << shape.queries << " x " << shape.keys);
      const attention::Cost counted = count(rung, shape), predicted = rung.cost(shape);
      CHECK((each == &tails ? counted.bytes <= predicted.bytes : counted.bytes == predicted.bytes));
      if (sizeof(T) == 2) CHECK(counted.flops == predicted.flops);
    }
    CHECK(rung.cost(whole).flops == int64_t{2} * 4 * n * 2 * n * 64);
    CHECK(rung.scratch(whole) == (rung.keeps_scores ? 2 * n * 2 * n * 4 : 0));
  });
}

TEST_CASE("a rung asks for the tiles in which a query sees a key, and for no others") {
  each_rung([&]<class T>(const Rung<T>& rung) {
    // A second range begins inside a block; where all scores are computed, one block is enough.
    const int piece = rung.keeps_scores ? rung.queries / 2 : rung.queries * 3 / 2;
    for (const auto& [name, shape] : Masks(piece)) {
      // Without documents, what a block's second range sees begins with what the first one does.
      if (shape.begins == nullptr && name != "causal: zig-zag") continue;
      INFO(rung.name << ": " << name);
      const int64_t tiles = tiles_with_a_pair(shape, rung.queries, rung.keys);
      const attention::Cost counted = count(rung, shape), predicted = rung.cost(shape);
      CHECK(counted.bytes == predicted.bytes);
      const int64_t flops_of_tile = int64_t{4} * rung.queries * rung.keys * shape.width;
      if (sizeof(T) == 2) CHECK(counted.flops == shape.heads * tiles * flops_of_tile);
      if (rung.name == attention::kBlockwise.name) {
        CHECK(predicted.flops == shape.heads * tiles * flops_of_tile);
      }
    }
  });
}

TEST_CASE("scores in memory cost bytes of the square of the length, and flash has none of them") {
  int64_t before = 0;
  for (const int length : {32, 64, 128}) {
    const Shape shape{1, length, length, 1, 1, 64};
    const int64_t naive = count(attention::kNaive, shape).bytes,
                  flash = count(attention::kBlockwise, shape).bytes;
    INFO(length << ": " << naive << ", " << flash);
    // Both read rows of k and v once a tile of 32 x 32; naive reads rows of q then, too.
    const int64_t tile_of_rows = 32 * 64 * 4, tiles = int64_t{length / 32} * (length / 32);
    REQUIRE(naive - flash == 5 * 4 * length * length + (tiles - length / 32) * tile_of_rows);
    REQUIRE(naive > before * 3);
    before = naive;
  }
}

TEST_CASE("a barrier, wait or fence that attention lacks is found, with a line of the kernel") {
  size_t places = 0;
  each_rung([&]<class T>(const Rung<T>& rung) {
    // A tile and a row of scalar rungs; stages that go round, where there are some.
    const Attended<T> x(rung, {1, 33, sizeof(T) == 4 ? 40 : 390, 1, 1, 64});
    const auto run = [&] {
      rung.run(nullptr, x.problem);
      return take_report();
    };
    const auto is_ours = [](const std::string& file) {
      return file.ends_with(".cu") || file.ends_with("rows.h") || file.ends_with("warps.h") ||
             file.ends_with("pingpong.h") || file.ends_with("fragments.h") ||
             file.ends_with("swizzled.h");
    };
    places += leave_out_each(rung.name, run, is_ours, /*turns=*/"named_barrier");
  });
  REQUIRE(places >= 40);
}

TEST_CASE("a shape that no rung of attention takes is refused") {
  attention::check({1, 128, 128, 4, 2, 64});
  check_throws<UsageError>(
      [] {
        attention::check({1, 128, 128, 4, 2, 80});
      },
      {"width=80 must be 64 or 128", "try 64"});
  check_throws<UsageError>(
      [] {
        attention::check({1, 128, 128, 4, 3, 64});
      },
      {"kv_heads=3 must divide heads=4", "try 1"});
  check_throws<UsageError>([] { attention::check({1, 0, 128, 4, 4, 64}); }, {"queries=0"});
  attention::check({1, 8, 8, 1, 1, 64, true, {0, 4, 4}, {2, 4, 12}});
  check_throws<UsageError>(
      [] {
        attention::check({1, 8, 8, 1, 1, 64, true, {8, 4, 2}});
      },
      {"positions of queries begin again at 2, behind 4 from 8 on", "try 12"});
  check_throws<UsageError>(
      [] {
        attention::check({1, 8, 8, 1, 1, 64, true, {}, {0, 4, 3}});
      },
      {"positions of keys begin again at 3", "try 4"});
  const int32_t begins[1] = {0};
  check_throws<UsageError>(
      [&] {
        attention::check({1, 1, 8, 1, 1, 64, false, {}, {}, begins});
      },
      {"documents of causal=false", "try causal=true"});
}

}  // namespace
}  // namespace usp::lab
