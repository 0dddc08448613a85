#include "lab/attention_reference.h"
#include "lab/drawn_masks.h"
#include "lab/pairs.h"

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

/// Tolerances, of the largest gradient: weights, their gradients, the result and out, which delta
/// comes from, are rounded to bf16. Along a direction errors of many elements nearly cancel.
constexpr double kTolerance = 1e-2, kToleranceAlong = 5e-3;

struct Found {
  std::vector<double> dq, dk, dv;

  bool operator==(const Found&) const = default;
};

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

/// The CPU's gradients in f64; those of the rung are compared with them and, along a direction,
/// with finite differences of the CPU's forward pass.
void check_values(const BackwardRung& rung, const Shape& shape, Scores scores = Scores::usual,
                  double tolerance_along = kToleranceAlong) {
  INFO(rung.name << ": " << text_of(shape));
  const test::OnDevice cpu(Device::cpu);
  const Differentiated x(shape, scores);
  Reference r(x.attended());
  // As wide as keys, with zeros behind: the CPU's op has values so.
  const auto padded = [&](const std::vector<double>& values, const Tensor& like) {
    const Tensor wide = Tensor::zeros(like.shape(), DType::f64);
    const Tensor part = wide.narrow(3, 0, shape.value_width());
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
  // Of keys with a mean, what delta lost to out's rounding moves all elements in one direction.
  if (scores == Scores::far_below_backward) return;
  const auto check_along = [&](const Tensor& gradient, const Tensor& input, const char* what) {
    test::check_gradient_along(
        gradient, input,
        [&] {
          r.forward();
          return test::dot(r.out, dout_of_values);
        },
        what, tolerance_along);
  };
  check_along(Tensor::from_host(first.dq, r.q.shape(), DType::f64), r.q, "dq");
  check_along(Tensor::from_host(first.dk, r.k.shape(), DType::f64), r.k, "dk");
  check_along(padded(first.dv, r.v), r.v, "dv");
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
  // Along a direction, elements as good as those of narrower heads have a little more noise.
  for (const Shape& shape : {Shape{2, 33, 47, 2, 1, 192}, {1, 150, 200, 4, 2, 192}}) {
    check_values(attention::kFlash2Backward, shape, Scores::usual, kTolerance);
  }
}

TEST_CASE("backward rungs take documents and the two ranges of zig-zag, and rows without a key") {
  // Of a row that sees few keys, little averages what delta lost to out's rounding.
  const auto check = [](const BackwardRung& rung, const Shape& shape) {
    check_values(rung, shape, Scores::usual, kTolerance);
  };
  for (const BackwardRung* rung : backward_rungs()) {
    for (const auto& [name, shape] : Masks(/*piece=*/21)) check(*rung, shape);
    for (const auto& [name, shape] : Masks(/*piece=*/100)) {
      if (shape.begins != nullptr) check(*rung, shape);
    }
  }
}

TEST_CASE("backward rungs take any two of width, shared heads, mask, ranges, lengths, no key") {
  size_t number = 0, cases = 0;
  for (const BackwardRung* rung : backward_rungs()) {
    std::vector<int> widths = {64, 128};
    if (rung->widest == attention::kWidestKeys) widths.push_back(attention::kWidestKeys);
    for (const DrawnMask& mask : masks_in_turn(drawn_masks(widths, {5, 33, 97}), number++)) {
      check_values(*rung, mask.whole(), Scores::usual, kTolerance);
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
