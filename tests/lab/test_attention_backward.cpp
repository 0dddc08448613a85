#include "lab/drawn_masks.h"
#include "lab/pairs.h"
#include "lab/rounded_gradients.h"

/// Every rung that goes backward computes the CPU's gradients, with the same bits in each order,
/// asks for what its formula says, and has no barrier or wait that it could do without.
namespace usp::lab {
namespace {

using attention::backward_rungs;
using emulator::Options;
using emulator::Report;
using emulator::take_report;
using emulator::Use;
using BackwardRung = Rung<bf16, Gradients<bf16>>;

/// Tolerances. Of the largest gradient: weights, their gradients, the result and out, which delta
/// comes from, are rounded to bf16. Of the whole one's length, once these roundings are taken out:
/// by how much it may differ, and its slope along a direction from finite differences.
constexpr double kTolerance = 1e-2, kBesidesRounding = 1e-3, kAlong = 5e-3;

/// What the rung makes of a shape; the emulator has nothing to say of it.
Found run(const BackwardRung& rung, const Shape& shape, Scores scores) {
  const Differentiated x(shape, scores);
  x.forward();
  rung.run(nullptr, x.gradients);
  const Report report = take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  return {x.dq(), x.dk(), x.dv()};
}

/// The CPU's gradients in f64. Those of the rung are compared with them, and with such as are
/// rounded where a rung rounds; what these roundings make of them is taken out of the rung's before
/// finite differences of the CPU's forward pass along a direction. The formula has at least the
/// gradients' bytes.
void check_values(const BackwardRung& rung, const Shape& shape, Scores scores = Scores::usual) {
  INFO(rung.name << ": " << text_of(shape));
  const int64_t of_keys = shape.keys * shape.kv_heads * (shape.width + shape.value_width());
  REQUIRE(rung.cost(shape).bytes >= int64_t{sizeof(bf16)} * shape.samples *
                                        (shape.queries * shape.heads * shape.width + of_keys));
  const test::OnDevice cpu(Device::cpu);
  const Differentiated x(shape, scores);
  x.forward();
  REQUIRE(take_report().problems.empty());
  Reference r(x.attended());
  // With zeros behind where they are narrower: the CPU's op has values as wide as keys.
  const auto padded = [&](const std::vector<double>& values, const Tensor& like) {
    const Tensor wide = Tensor::zeros(like.shape(), DType::f64);
    const Tensor part = wide.narrow(3, 0, std::ssize(values) * like.size(3) / like.numel());
    ops::copy(part, Tensor::from_host(values, part.shape(), DType::f64));
    return wide;
  };
  const Tensor dout = padded(x.dout(), r.q);
  const Tensor dout_of_values = dout.narrow(3, 0, shape.value_width());
  const Tensor dq = Tensor::empty(r.q.shape(), DType::f64);
  const Tensor dk = Tensor::empty(r.k.shape(), DType::f64);
  const Tensor dv = Tensor::empty(r.k.shape(), DType::f64);
  const Tensor delta = Tensor::empty(r.lse.shape(), DType::f64);
  ops::attention_delta(delta, dout_of_values, r.out);
  ops::attention_backward(dq, dk, dv, dout, {}, r.q, r.k, r.v, r.lse, delta, r.scale, r.queries,
                          r.keys, /*accumulate=*/false, r.documents);
  Found first;
  each_pair([&] {
    const Found found = run(rung, shape, scores);
    test::check_close(found.dq, dq, kTolerance, "dq");
    test::check_close(found.dk, dk, kTolerance, "dk");
    test::check_close(found.dv, dv.narrow(3, 0, shape.value_width()), kTolerance, "dv");
    if (first.dq.empty()) first = found;
    REQUIRE(found == first);
  });
  const Found rounded = rounded_gradients(x, r);
  const auto check_besides_rounding = [&](std::vector<double> Found::*which, const Tensor& exact,
                                          const Tensor& input, const char* what) {
    std::vector<double> rest = first.*which;
    CAPTURE(what);
    REQUIRE(distance(rest, rounded.*which) <= kBesidesRounding);
    for (size_t i = 0; i < rest.size(); ++i) rest[i] -= (rounded.*which)[i];
    ops::accumulate(exact, padded(rest, exact));
    test::check_gradient_along(
        exact, input,
        [&] {
          r.forward();
          return test::dot(r.out, dout_of_values);
        },
        what, kAlong);
  };
  check_besides_rounding(&Found::dq, dq, r.q, "dq");
  check_besides_rounding(&Found::dk, dk, r.k, "dk");
  check_besides_rounding(&Found::dv, dv, r.v, "dv");
}

TEST_CASE("backward rungs compute the CPU's gradients, in the same bits whatever the order") {
  const Shape shapes[] = {
      {2, 33, 47, 2, 1, 64},                 // tails of both, two samples
      {1, 1, 5, 2, 2, 128},                  //
      {1, 70, 70, 4, 2, 64, true},           //
      {1, 40, 34, 1, 1, 128, true, {-6}},    // queries before all keys
      {1, 40, 300, 3, 1, 128, true},         // keys behind all queries
      {1, 150, 300, 3, 3, 64},               // several blocks
      {1, 257, 390, 2, 2, 128, true, {133}}  //
  };
  for (const BackwardRung* rung : backward_rungs()) {
    for (const Shape& shape : shapes) check_values(*rung, shape);
  }
}

TEST_CASE("backward takes values that are narrower than keys") {
  for (const Shape& shape : {Shape{2, 33, 47, 2, 1, 192}, {1, 150, 200, 4, 2, 192}}) {
    check_values(attention::kFlash2Backward, shape);
  }
}

TEST_CASE("backward rungs take documents and the two ranges of zig-zag, and rows without a key") {
  const PairsInTurn in_turn;
  for (const BackwardRung* rung : backward_rungs()) {
    for (const auto& [name, shape] : Masks(/*piece=*/21)) check_values(*rung, shape);
    for (const auto& [name, shape] : Masks(/*piece=*/100)) {
      if (shape.begins != nullptr) check_values(*rung, shape);
    }
  }
}

TEST_CASE("backward rungs take any two of width, shared heads, mask, ranges, lengths, no key") {
  const PairsInTurn in_turn;
  size_t number = 0, cases = 0;
  for (const BackwardRung* rung : backward_rungs()) {
    std::vector<int> widths = {64, 128};
    if (rung->widest == attention::kWidestKeys) widths.push_back(attention::kWidestKeys);
    for (const DrawnMask& mask : masks_in_turn(drawn_masks(widths, {5, 33, 97}), number++)) {
      check_values(*rung, mask.whole());
      ++cases;
    }
  }
  REQUIRE(cases >= 2 * 4);
}

TEST_CASE("gradients have no part of keys that are not there where scores are far below zero") {
  for (const BackwardRung* rung : backward_rungs()) {
    check_values(*rung, {1, 5, 37, 1, 1, 64}, Scores::far_below_backward);
    check_values(*rung, {1, 130, 140, 2, 1, 128, true, 10}, Scores::far_below_backward);
  }
}

TEST_CASE("small parts of a gradient count, since nothing is rounded before its end") {
  for (const BackwardRung* rung : backward_rungs()) {
    check_values(*rung, {1, 512, 512, 1, 1, 64}, Scores::none);
  }
}

/// Bytes that it asks for, boxes included.
int64_t bytes_of(const emulator::Counters& counted) {
  return counted.sector_bytes() + counted.box_bytes;
}

/// What a rung does.
emulator::Counters count(const BackwardRung& rung, const Shape& shape) {
  Options now;
  now.counters = true;
  const Use use(now);
  const Differentiated x(shape);
  x.forward();
  take_report();
  rung.run(nullptr, x.gradients);
  return take_report().total;
}

TEST_CASE("a backward rung asks for as many bytes as its formula says, at tails for no more") {
  const Shape whole{1, 128, 256, 2, 1, 64}, causal{1, 256, 256, 1, 1, 128, true},
      tails{1, 70, 130, 1, 1, 64, true, {60}}, wide{2, 128, 256, 2, 1, 192, true, {128}};
  for (const BackwardRung* rung : backward_rungs()) {
    for (const Shape* each : {&whole, &causal, &tails, &wide}) {
      if (!rung->takes(*each)) continue;
      INFO(rung->name << ": " << text_of(*each));
      const emulator::Counters counted = count(*rung, *each);
      const attention::Cost predicted = rung->cost(*each);
      const int64_t least = each == &tails ? 0 : predicted.bytes;  // exact where nothing is cut
      CHECK(bytes_of(counted) >= least);
      CHECK(bytes_of(counted) <= predicted.bytes);
      CHECK(counted.product_flops == predicted.flops);
      CHECK(counted.bank_conflicts == 0);
      CHECK(counted.atomic_requests == 0);
    }
  }
}

TEST_CASE("a backward rung multiplies tiles in which a query sees a key, and no others") {
  for (const BackwardRung* rung : backward_rungs()) {
    for (const auto& [name, shape] : Masks(/*piece=*/rung->queries * 3 / 2)) {
      if (shape.begins == nullptr) continue;
      INFO(rung->name << ": " << name);
      const int own = rung->queries, passing = rung->keys;
      const int64_t of_keys = tiles_with_a_pair(shape, passing, own);
      const int64_t of_queries = tiles_with_a_pair(shape, own, passing);
      const emulator::Counters counted = count(*rung, shape);
      CHECK(bytes_of(counted) == rung->cost(shape).bytes);
      CHECK(counted.product_flops ==
            shape.heads * (4 * of_keys + 3 * of_queries) * 2 * own * passing * shape.width);
    }
  }
}

TEST_CASE("two passes take seven products, and bytes grow with the square of the length") {
  for (const BackwardRung* rung : backward_rungs()) {
    int64_t bytes[3];
    for (int i = 0; i < 3; ++i) {
      const int length = 128 << i, width = 64;
      const Shape shape{1, length, length, 1, 1, width};
      const emulator::Counters counted = count(*rung, shape);
      const int64_t product = int64_t{2} * length * length * width;
      CHECK(counted.product_flops == 7 * product);
      // flash_2 has the two of a forward pass.
      CHECK(attention::kFlash2.cost(shape).flops == 2 * product);
      bytes[i] = bytes_of(counted);
    }
    // a S + b S²: what twice the length asks for beyond twice as much is 2 b S².
    CHECK(bytes[2] - 2 * bytes[1] == 4 * (bytes[1] - 2 * bytes[0]));
  }
}

TEST_CASE("a barrier or wait that backward lacks is found, with a line of the kernel") {
  const PairsInTurn in_turn;
  size_t places = 0;
  for (const BackwardRung* rung : backward_rungs()) {
    const int length = 3 * rung->keys + 4;  // stages go round
    const Differentiated x({1, length, length, 1, 1, 64});
    x.forward();
    take_report();
    const auto run = [&] {
      rung->run(nullptr, x.gradients);
      return take_report();
    };
    const auto is_ours = [](const std::string& file) {
      return file.ends_with(".cu") || file.ends_with("warps.h") || file.ends_with("backward.h") ||
             file.ends_with("fragments.h") || file.ends_with("swizzled.h") ||
             file.ends_with("boxes.h") || file.ends_with("boxed_pairs.h");
    };
    places += leave_out_each(rung->name, run, is_ours);
  }
  REQUIRE(places >= 30);
}

}  // namespace
}  // namespace usp::lab
