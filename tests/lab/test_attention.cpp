#include <functional>
#include <numeric>

#include "lab/attention_reference.h"
#include "lab/blocks.h"
#include "lab/degrees.h"
#include "lab/drawn_masks.h"
#include "lab/exponentials.h"
#include "lab/pairs.h"
#include "lab/schedule.h"

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

/// Runs the rung and compares both results with the CPU's. Its formula has at least the bytes of
/// these.
template <class T>
void check_values(const Rung<T>& rung, const Shape& shape, Scores scores = Scores::usual) {
  const int64_t rows = int64_t{shape.samples} * shape.queries * shape.heads;
  REQUIRE(rung.cost(shape).bytes >=
          rows * (shape.value_width() * int64_t{sizeof(T)} + int64_t{sizeof(float)}));
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
                          {1, 40, 34, 1, 1, 128, true, {-6}},  // queries before all keys
                          {2, 33, 47, 2, 1, 192, true, {-6}}};
  for (const Shape& shape : shapes) {
    each_rung([&](const auto& rung) {
      if (rung.takes(shape)) check_values(rung, shape);
    });
  }
}

TEST_CASE("blocks of tensor cores compute what the CPU computes, over several tiles") {
  const Shape shapes[] = {{2, 150, 300, 2, 1, 64},
                          {1, 257, 390, 2, 2, 128, true, {133}},
                          {1, 300, 200, 2, 1, 64, true, {-140}},
                          {1, 257, 390, 4, 2, 192, true, {133}}};
  for (const Shape& shape : shapes) {
    for (const Rung<bf16>* rung : attention::bf16_rungs()) {
      if (rung->takes(shape)) check_values(*rung, shape);
    }
  }
}

TEST_CASE("every rung takes documents and the two ranges of zig-zag, and rows that see no key") {
  const PairsInTurn in_turn;
  for (const auto& [name, shape] : Masks(/*piece=*/21)) {
    each_rung([&](const auto& rung) { check_values(rung, shape); });
  }
  for (const auto& [name, shape] : Masks(/*piece=*/21, /*width=*/128)) {
    if (name != "documents: a sample" && name != "causal: zig-zag") continue;
    each_rung([&](const auto& rung) { check_values(rung, shape); });
  }
}

TEST_CASE(
    "every rung takes any two of width, shared heads, mask, ranges, lengths, rows without a key") {
  const PairsInTurn in_turn;
  size_t number = 0, cases = 0;
  each_rung([&]<class T>(const Rung<T>& rung) {
    std::vector<int> widths = {64, 128};
    if (rung.widest == attention::kWidestKeys) widths.push_back(attention::kWidestKeys);
    // A tile and a row of scalar rungs, whose products take long here; several tiles of the others.
    const std::vector<int> pieces =
        sizeof(T) == sizeof(float) ? std::vector{3, 17} : std::vector{5, 33, 97};
    for (const DrawnMask& mask : masks_in_turn(drawn_masks(widths, pieces), number++)) {
      check_values(rung, mask.whole());
      ++cases;
    }
  });
  REQUIRE(cases >= 6 * 4);
}

TEST_CASE("blocks of tensor cores go over the tiles of documents and of two ranges") {
  const PairsInTurn in_turn;
  for (const auto& [name, shape] : Masks(/*piece=*/100)) {
    if (shape.begins == nullptr) continue;
    for (const Rung<bf16>* rung : attention::bf16_rungs()) check_values(*rung, shape);
  }
  for (const int width : {128, 192}) {
    for (const auto& [name, shape] : Masks(/*piece=*/100, width)) {
      if (name != "documents: zig-zag") continue;
      for (const Rung<bf16>* rung : attention::bf16_rungs()) {
        if (rung->takes(shape)) check_values(*rung, shape);
      }
    }
  }
}

TEST_CASE("keys that are not there count nothing where all scores are far below zero") {
  each_rung([&](const auto& rung) { check_values(rung, {1, 5, 37, 1, 1, 64}, Scores::far_below); });
  check_values(attention::kFlash3, {1, 5, 37, 1, 1, 192}, Scores::far_below);
}

/// Sum of squares of x - y.
double squares_between(const std::vector<double>& x, const std::vector<double>& y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0, std::plus<>(),
                            [](double a, double b) { return (a - b) * (a - b); });
}

TEST_CASE("outputs in bf16 are off by no more than those of naive attention, over 16 seeds") {
  std::vector<std::pair<const Rung<bf16>*, Shape>> cases;
  for (const Rung<bf16>* rung : attention::bf16_rungs()) {
    cases.push_back({rung, {1, 64, 200, 1, 1, rung->widest}});
  }
  for (const Rung<bf16>* rung : attention::decoding_rungs()) {
    for (const int splits : {1, 2}) {
      cases.push_back({rung, {1, 1, 200, 64, 16, rung->widest}});
      cases.back().second.splits = splits;
    }
  }
  for (const auto& [rung, shape] : cases) {
    double own = 0, naive = 0;
    for (unsigned seed = 0; seed < 16; ++seed) {
      Attended<bf16> x(*rung, shape, Scores::usual, 1 + 3 * seed);
      x.problem.scale /= 16;  // scores are small: naive attention loses little by rounding them
      rung->run(nullptr, x.problem);
      REQUIRE(take_report().problems.empty());
      const test::OnDevice cpu(Device::cpu);
      const Reference exact(x);
      own += squares_between(x.out(), exact.out.items());
      naive += squares_between(exact.naive().items(), exact.out.items());
    }
    CAPTURE(rung->name, rung->widest, shape.splits, std::sqrt(own / naive));
    REQUIRE(own > 0);
    REQUIRE(std::sqrt(own) <= 1.1 * std::sqrt(naive));
  }
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

TEST_CASE("flash_4 takes a quarter of its powers from the polynomial, and seldom rescales") {
  Options now;
  now.counters = true;
  const Use use(now);
  const Shape shape{1, 128, 512, 1, 1, 64};
  const auto check = [&](const Rung<bf16>& rung, double by_unit, double rescalings) {
    INFO(rung.name);
    const Exponentials each = exponentials_of(rung, shape);
    CHECK(each.by_unit == by_unit);
    CHECK(each.by_polynomial == 512 - by_unit);
    CHECK(each.rescalings == rescalings);
  };
  check(attention::kFlash2, 512, 8);
  check(attention::kFlash3, 512, 4);
  check(attention::kFlash4, 384, 1);  // before the first key
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
        tails{1, 70, 130, 1, 1, 64, true, {60}}, wide{2, n, 2 * n, 2, 1, 192, true};
    for (const Shape* each : {&whole, &causal, &tails, &wide}) {
      const Shape& shape = *each;
      if (!rung.takes(shape)) continue;
      INFO(rung.name << ", " << shape.queries << " x " << shape.keys);
      const attention::Cost counted = count(rung, shape), predicted = rung.cost(shape);
      CHECK((each == &tails ? counted.bytes <= predicted.bytes : counted.bytes == predicted.bytes));
      if (sizeof(T) == 2) CHECK(counted.flops == predicted.flops);
    }
    CHECK(rung.cost(whole).flops == int64_t{2} * 4 * n * 2 * n * 64);
    CHECK(rung.scratch(whole) == (rung.keeps_scores ? 2 * n * 2 * n * 4 : 0));
  });
}

TEST_CASE("half the memory for a block's queries doubles the bytes of keys: S^2 d^2 / M of them") {
  const Shape shape{1, 256, 256, 2, 2, 64}, tails{2, 70, 130, 2, 1, 64, true, {60}};
  std::vector<int64_t> bytes;
  for (const Rung<bf16>* rung : attention::rungs_by_block()) {
    INFO(rung->queries << " queries a block");
    check_values(*rung, tails);
    Options now;
    now.counters = true;
    const Use use(now);
    CHECK(bytes_asked(*rung, shape) == rung->cost(shape).bytes);
    bytes.push_back(bytes_of_keys(*rung, shape));
    CHECK(bytes.back() == bytes_of_keys_by_formula(*rung, shape));
    // Two heads of 256 keys and values of 64 channels, two bytes each, for each block of queries.
    CHECK(bytes.back() * rung->queries == int64_t{256} * 2 * 256 * 2 * 64 * 2);
  }
  REQUIRE(bytes.size() == 3);
  CHECK(bytes[0] == 2 * bytes[1]);
  CHECK(bytes[1] == 2 * bytes[2]);
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

/// One query a head.
Shape decoded(int samples, int keys, int heads, int kv_heads, int width, int splits) {
  Shape x{samples, 1, keys, heads, kv_heads, width};
  x.splits = splits;
  return x;
}

TEST_CASE("a single query's keys may be split over blocks, into parts of any length") {
  const PairsInTurn in_turn;
  std::vector<Shape> shapes = {decoded(1, 1, 1, 1, 64, 1),    decoded(2, 100, 4, 2, 128, 1),
                               decoded(2, 300, 4, 2, 64, 3),  decoded(1, 97, 6, 2, 128, 4),
                               decoded(1, 190, 20, 1, 64, 2),  // heads that fill two tiles
                               decoded(1, 33, 2, 1, 64, 5),    // parts without a key
                               decoded(1, 1120, 1, 1, 64, 35)};
  Shape causal = decoded(2, 200, 2, 1, 64, 3);
  causal.causal = true;
  for (const int position : {199, 100, 31, -5}) {  // the last one sees no key
    causal.query_at = {position};
    shapes.push_back(causal);
  }
  const std::vector<int32_t> begins = {70, 3};
  causal.query_at = {150};
  causal.begins = begins.data();
  shapes.push_back(causal);
  for (const Rung<bf16>* rung : attention::decoding_rungs()) {
    for (const Shape& shape : shapes) {
      CAPTURE(shape.splits);
      check_values(*rung, shape);
      check_values(*rung, shape, Scores::growing);
    }
    check_values(*rung, decoded(1, 37, 1, 1, 64, 2), Scores::far_below);
  }
}

TEST_CASE("a single query takes any two of width, shared heads, mask, keys, parts, position") {
  const PairsInTurn in_turn;
  for (const Rung<bf16>* rung : attention::decoding_rungs()) {
    for (const DrawnMask& mask : masks_in_turn(drawn_decodings(), 0)) {
      CAPTURE(mask.shape.splits);
      check_values(*rung, mask.whole());
    }
  }
}

TEST_CASE("split keys ask for what the formula says, parts included, at tails for no more") {
  const std::vector<int32_t> begins = {30, 40};
  Shape documents = decoded(2, 256, 4, 2, 64, 3);
  documents.causal = true;
  documents.query_at = {255};
  documents.begins = begins.data();
  const Shape whole[] = {decoded(1, 256, 8, 2, 64, 1), decoded(2, 256, 8, 1, 128, 3),
                         decoded(1, 96, 32, 2, 64, 5), documents};
  for (const Rung<bf16>* rung : attention::decoding_rungs()) {
    for (const Shape& shape : whole) {
      CAPTURE(shape.keys, shape.splits);
      const attention::Cost counted = count(*rung, shape), predicted = rung->cost(shape);
      CHECK(counted.bytes == predicted.bytes);
      CHECK(counted.flops == predicted.flops);
    }
    const Shape tails = decoded(1, 250, 3, 1, 64, 4);
    CHECK(count(*rung, tails).bytes <= rung->cost(tails).bytes);
    // Each head's output and lse, in f32, once a part.
    CHECK(rung->scratch(whole[1]) == 3 * 2 * 8 * (128 + 1) * 4);
    CHECK(rung->scratch(whole[0]) == 0);
    // Keys are read once for the heads that share them.
    CHECK(rung->cost(decoded(1, 8192, 8, 1, 64, 1)).bytes <
          rung->cost(decoded(1, 8192, 1, 1, 64, 1)).bytes * 1.01);
  }
}

TEST_CASE("keys are split until a GPU has blocks enough, but not into parts that are too short") {
  using attention::splits_of;
  REQUIRE(splits_of(decoded(1, 32768, 32, 8, 128, 1), 132) == 66);  // 4 blocks a multiprocessor
  REQUIRE(splits_of(decoded(2, 32768, 32, 8, 128, 1), 132) == 33);
  REQUIRE(splits_of(decoded(1, 32768, 32, 1, 128, 1), 132) == 256);  // 128 keys a part
  REQUIRE(splits_of(decoded(1, 1000, 8, 1, 64, 1), 132) == 7);
  REQUIRE(splits_of(decoded(1, 5, 8, 1, 64, 1), 132) == 1);
  REQUIRE(splits_of(decoded(64, 32768, 32, 32, 128, 1), 132) == 1);
  REQUIRE(splits_of(decoded(1, 32768, 32, 8, 128, 1), 0) == 1);  // of an unknown GPU
}

/// How often each block of a launch orders threads or copies, in the order in which blocks begin.
struct Begun {
  static inline std::vector<std::pair<std::pair<unsigned, unsigned>, int>> blocks;

  static bool note(const char* /*call*/, const void* /*place*/) {
    const std::pair block(blockIdx.x, blockIdx.y);
    if (blocks.empty() || blocks.back().first != block) blocks.push_back({block, 0});
    ++blocks.back().second;
    return false;
  }
};

TEST_CASE("blocks with the most tiles begin first, of all heads") {
  const Shape shape{1, 500, 500, 2, 2, 64, true};
  Options now;
  now.leaves_out = Begun::note;
  const Use use(now);
  // Each of a launch's blocks, of which there are `count`, orders no more than the one before.
  const auto check_launch = [](const char* name, size_t first, size_t count) {
    INFO(name);
    REQUIRE(Begun::blocks.size() >= first + count);
    const auto* const begin = Begun::blocks.data() + first;
    for (size_t i = 1; i < count; ++i) CHECK(begin[i].second <= begin[i - 1].second);
    CHECK(begin[count - 1].second < begin[0].second);
  };
  for (const Rung<bf16>* rung : attention::bf16_rungs()) {
    Begun::blocks.clear();
    Attended<bf16> x(*rung, shape);
    x.problem.blocks = 8;  // of a persistent kernel: one a turn
    rung->run(nullptr, x.problem);
    REQUIRE(take_report().problems.empty());
    REQUIRE(Begun::blocks.size() == 8);
    check_launch(rung->name, 0, 8);
  }
  for (const auto* rung : attention::backward_rungs()) {
    const Differentiated x(shape);
    x.forward();
    take_report();
    Begun::blocks.clear();
    rung->run(nullptr, x.gradients);
    REQUIRE(take_report().problems.empty());
    REQUIRE(Begun::blocks.size() == 16);
    check_launch("keys", 0, 8);
    check_launch("queries", 8, 8);
  }
}

TEST_CASE("a persistent block of attention takes turn after turn, each of them once") {
  const Shape shape{2, 300, 300, 3, 1, 64, true};
  for (const int blocks : {1, 4, 5, 100}) {
    std::vector<int> taken(18);
    for (int round = 0; round * blocks < 18; ++round) {
      for (int block = 0; block < blocks; ++block) {
        const int number = Shape::number_of_turn(round, block, blocks);
        if (number < 18) ++taken[number];
      }
    }
    REQUIRE(shape.turns(128) == 18);
    REQUIRE(taken == std::vector<int>(18, 1));
  }
  for (const Rung<bf16>* rung : {&attention::kFlash3, &attention::kFlash4}) {
    Attended<bf16> one_each(*rung, shape);
    one_each.problem.blocks = 18;
    rung->run(nullptr, one_each.problem);
    for (const int blocks : {1, 5, 0}) {
      INFO(rung->name << " in " << blocks << " blocks");
      Attended<bf16> x(*rung, shape);
      x.problem.blocks = blocks;
      rung->run(nullptr, x.problem);
      const Report report = take_report();
      INFO(report.text());
      REQUIRE(report.problems.empty());
      REQUIRE(x.out() == one_each.out());
      REQUIRE(x.lse() == one_each.lse());
    }
  }
}

/// Tiles of each block of a persistent kernel: two groups of 128 threads ask for two products each.
struct BlockProducts {
  static inline std::vector<int64_t> asked;

  static bool note(const char* call, const void* /*place*/) {
    if (call == std::string_view("wgmma_commit")) ++asked.at(blockIdx.x);
    return false;
  }
  static int64_t tiles_of(int block) { return asked[block] / (2 * 2 * 128); }
};

TEST_CASE("a persistent block of attention goes over as many tiles as its load is said to have") {
  const Shape shape{1, 700, 700, 3, 1, 64, true};
  Options now;
  now.leaves_out = BlockProducts::note;
  const Use use(now);
  for (const Rung<bf16>* rung : {&attention::kFlash3, &attention::kFlash4}) {
    for (const int blocks : {1, 4, 5}) {
      CAPTURE(rung->name, blocks);
      Attended<bf16> x(*rung, shape);
      x.problem.blocks = blocks;
      BlockProducts::asked.assign(blocks, 0);
      rung->run(nullptr, x.problem);
      REQUIRE(take_report().problems.empty());
      const Load load = load_of_persistent(shape, rung->queries, rung->keys, blocks);
      int64_t busiest = 0, all = 0;
      for (int block = 0; block < blocks; ++block) {
        busiest = std::max(busiest, BlockProducts::tiles_of(block));
        all += BlockProducts::tiles_of(block);
        CHECK(BlockProducts::tiles_of(block) ==
              tiles_of_block(shape, block, blocks, rung->queries, rung->keys));
      }
      CHECK(load.busiest == busiest);
      CHECK(load.all == all);
    }
  }
}

TEST_CASE("longest blocks first leave the busiest multiprocessor little more than the mean") {
  for (const auto& [heads, length] : {std::pair(32, 1024), {32, 4096}, {8, 4096}, {13, 3000}}) {
    CAPTURE(heads, length);
    const Shape shape = causal_sample(heads, length);
    const Load first = load_of(shape, 128, 128, heaviest_of_all);
    for (const TurnOf other : {lightest_by_head, heaviest_by_head}) {
      const Load load = load_of(shape, 128, 128, other);
      REQUIRE(load.all == first.all);
      REQUIRE(load.busiest > first.busiest);
      REQUIRE(load.busiest > load_of_persistent(shape, 128, 128).busiest);
    }
    REQUIRE(static_cast<double>(first.busiest) < 1.1 * first.mean());
    const Load stays = load_of_persistent(shape, 128, 128);
    REQUIRE(stays.all == first.all);
    // Turns that are known from the start fit a little worse where there are few for each block.
    REQUIRE(static_cast<double>(stays.busiest) < 1.15 * stays.mean());
    REQUIRE(first.all == tiles_with_a_pair(causal_sample(1, length), 128, 128) * heads);
    // Backward's blocks of keys: most queries see the first ones.
    const Load of_keys = load_of_keys(shape, 128, 64, /*first_keys_first=*/true);
    const Load turned = load_of_keys(shape, 128, 64, /*first_keys_first=*/false);
    REQUIRE(of_keys.all == turned.all);
    REQUIRE(of_keys.all == tiles_with_a_pair(causal_sample(1, length), 64, 128) * heads);
    REQUIRE(static_cast<double>(of_keys.busiest) < 1.1 * of_keys.mean());
    REQUIRE(turned.busiest > of_keys.busiest);
  }
}

TEST_CASE("scores in memory cost bytes of the square of the length, and flash has none of them") {
  int64_t before = 0;
  for (const int length : {32, 64, 128}) {
    const Shape shape{1, length, length, 1, 1, 64};
    for (const Rung<float>* rung : attention::f32_rungs()) {
      CHECK(count(*rung, shape).bytes == rung->cost(shape).bytes);
    }
    const int64_t naive = count(attention::kNaive, shape).bytes,
                  flash = count(attention::kBlockwise, shape).bytes;
    // 2 S^2 d / r + 2 S d numbers, for blocks of r = 32 queries; and each lse, in a sector.
    CHECK(flash == 4 * 2 * (length * length * 64 / 32 + length * 64) + 32 * length);
    INFO(length << ": " << naive << ", " << flash);
    // Both read rows of k and v once a tile of 32 x 32; naive reads rows of q then, too.
    const int64_t tile_of_rows = 32 * 64 * 4, tiles = int64_t{length / 32} * (length / 32);
    REQUIRE(naive - flash == 5 * 4 * length * length + (tiles - length / 32) * tile_of_rows);
    REQUIRE(naive > before * 3);
    before = naive;
  }
}

TEST_CASE("a barrier, wait or fence that attention lacks is found, with a line of the kernel") {
  const PairsInTurn in_turn;
  size_t places = 0;
  each_rung([&]<class T>(const Rung<T>& rung) {
    // A tile and a row of scalar rungs; stages that go round, where there are some.
    const auto is_ours = [](const std::string& file) {
      return file.ends_with(".cu") || file.ends_with("rows.h") || file.ends_with("warps.h") ||
             file.ends_with("pingpong.h") || file.ends_with("boxes.h") ||
             file.ends_with("fragments.h") || file.ends_with("swizzled.h");
    };
    for (const int width : {64, 192}) {
      const Shape shape{1, 33, sizeof(T) == 4 ? 40 : 390, 2, 2, width};
      if (!rung.takes(shape)) continue;
      Attended<T> x(rung, shape);
      x.problem.blocks = 1;  // of a persistent kernel: it takes both heads
      const auto run = [&] {
        rung.run(nullptr, x.problem);
        return take_report();
      };
      places += leave_out_each(rung.name, run, is_ours, /*turns=*/"named_barrier");
    }
  });
  for (const Rung<bf16>* rung : attention::decoding_rungs()) {
    const Attended<bf16> x(*rung, decoded(1, 250, 2, 1, 64, 2));
    const auto run = [&] {
      rung->run(nullptr, x.problem);
      return take_report();
    };
    const auto is_ours = [](const std::string& file) {
      return file.ends_with(".cu") || file.ends_with("warps.h") || file.ends_with("merge.h") ||
             file.ends_with("fragments.h") || file.ends_with("swizzled.h");
    };
    places += leave_out_each(rung->name, run, is_ours);
  }
  REQUIRE(places >= 40);
}

TEST_CASE("a shape that no rung of attention takes is refused") {
  attention::check({1, 128, 128, 4, 2, 64});
  check_throws<UsageError>(
      [] {
        attention::check({1, 128, 128, 4, 2, 80});
      },
      {"width=80 must be 64 or 128", "try 64"});
  attention::check({1, 128, 128, 4, 2, 192}, /*widest=*/192);
  check_throws<UsageError>(
      [] {
        attention::check({1, 128, 128, 4, 2, 192});
      },
      {"width=192 must be 64 or 128", "try 128"});
  check_throws<UsageError>(
      [] {
        attention::check({1, 128, 128, 4, 2, 256}, /*widest=*/192);
      },
      {"width=256 must be 64, 128 or 192", "try 128"});
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
  check_throws<UsageError>(
      [] {
        Shape split{1, 2, 8, 1, 1, 64};
        split.splits = 2;
        attention::check(split);
      },
      {"splits=2 must be 1 for queries=2", "try 1"});
  const int32_t begins[1] = {0};
  check_throws<UsageError>(
      [&] {
        attention::check({1, 1, 8, 1, 1, 64, false, {}, {}, begins});
      },
      {"documents of causal=false", "try causal=true"});
}

}  // namespace
}  // namespace usp::lab
