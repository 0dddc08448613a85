#include "expert_case.h"

/// The rows on their way to experts and back, and the products of many experts at once.
namespace usp::test {
namespace {

TEST_CASE("rows are sorted by expert, then by token, then by choice") {
  const OnDevice cpu;
  Random random(1);
  struct Sizes {
    int64_t T, E, k;
  };
  for (const auto& [T, E, k] : {Sizes{1, 1, 1}, {40, 6, 2}, {9, 5, 5}, {300, 97, 4}}) {
    for (double dropped : {0.0, 0.3, 1.0}) {
      CAPTURE(T, E, k, dropped);
      const Routes routes(random, T, E, k, dropped, E > k ? 2 : -1);
      // Choices in the order of experts; those of none last.
      const Numbers order = sorted_by(T * k, [&](int32_t i) {
        return routes.chosen[i] < 0 ? double(-E) : double(-routes.chosen[i]);
      });
      Numbers expected(T * k);
      for (size_t row = 0; row < order.size(); ++row) {
        expected[order[row]] = int64_t(row) < routes.R ? int32_t(row) : -1;
      }
      REQUIRE(numbers_of(routes.slots) == expected);
    }
  }
}

TEST_CASE("a token's row is copied to each of its slots") {
  const OnDevice cpu;
  Random random(2);
  for (DType dtype : kFloatDTypes) {
    for (int64_t H : {1, 7, 64, 195}) {
      CAPTURE(name(dtype), H);
      const Routes routes(random, 31, 7, 3, 0.2, 4);
      const Tensor x = random.tensor({routes.T, H}, dtype);
      const Tensor rows = random.tensor({routes.R, H}, dtype);
      ops::permute(rows, x, routes.slots);
      const Numbers slots = numbers_of(routes.slots);
      Values expected(routes.R * H, kNaN);
      for (int64_t i = 0; i < routes.T * routes.k; ++i) {
        for (int64_t h = 0; h < H && slots[i] >= 0; ++h) {
          expected[slots[i] * H + h] = x.item(i / routes.k * H + h);
        }
      }
      check_close(rows, expected, 0);
    }
  }
}

/// What unpermute() says it does, in f64.
Values plain_sums(const Values& start, const Values& rows, const Routes& routes,
                  const Values& gates) {
  const Numbers slots = numbers_of(routes.slots);
  const int64_t H = int64_t(start.size()) / routes.T;
  Values y = start;
  for (int64_t i = 0; i < routes.T * routes.k; ++i) {
    for (int64_t h = 0; h < H && slots[i] >= 0; ++h) {
      y[i / routes.k * H + h] += gates[i] * rows[slots[i] * H + h];
    }
  }
  return y;
}

TEST_CASE("a token is the sum of its rows, each times its gate, or of these and what was there") {
  const OnDevice cpu;
  Random random(3);
  for (DType dtype : kFloatDTypes) {
    for (int64_t H : {1, 7, 64, 195}) {
      CAPTURE(name(dtype), H);
      const Routes routes(random, 29, 9, 4, 0.2);
      const int64_t T = routes.T, k = routes.k;
      const Tensor rows = random.tensor({routes.R, H}, dtype);
      const Tensor gates = random.tensor({T, k}, accumulate_dtype(dtype));
      const Values r = rows.items(), g = gates.items(), nothing(T * H, 0.0), ones(T * k, 1.0);
      const Tensor before = random.tensor({T, H}, dtype), y = clone(before);
      ops::unpermute(y, rows, routes.slots, gates);
      check_close(y, plain_sums(nothing, r, routes, g), tolerance_of(dtype), "gates");
      ops::unpermute(y, rows, routes.slots, {});
      check_close(y, plain_sums(nothing, r, routes, ones), tolerance_of(dtype), "no gates");
      const Tensor added = clone(before);
      ops::unpermute(added, rows, routes.slots, gates, /*accumulate=*/true);
      check_close(added, plain_sums(before.items(), r, routes, g), tolerance_of(dtype), "added");
    }
  }
}

TEST_CASE("a token of which every choice was dropped is zero, or stays as it was") {
  const OnDevice cpu;
  Random random(4);
  const Routes routes(random, 5, 3, 2, 1.0);
  const Tensor rows = Tensor::empty({0, 6}, DType::f32), before = random.tensor({5, 6}, DType::f32);
  const Tensor y = clone(before), gates = random.tensor({5, 2}, DType::f32);
  ops::permute(rows, before, routes.slots);
  ops::unpermute(y, rows, routes.slots, gates, /*accumulate=*/true);
  REQUIRE(same_bits(y, before));
  ops::unpermute_backward(rows, gates, before, rows, routes.slots, gates);
  check_close(gates, Values(10, 0.0), 0);
  ops::unpermute(y, rows, routes.slots, gates);
  check_close(y, Values(30, 0.0), 0);
}

TEST_CASE("a residual begins the sums of rows where the device fuses, and is added elsewhere") {
  OnDevice device;
  for (DType dtype : kFloatDTypes) {
    for (int64_t H : {1, 31, 64}) {
      CAPTURE(name(dtype), H);
      Random random(8);
      const int64_t T = 9, k = 3;
      const Routes routes(random, T, 5, k, 0.25);
      const Tensor rows = random.tensor({routes.R, H}, dtype);
      const Tensor of_sum = random.tensor({T, k}, accumulate_dtype(dtype));
      const Tensor more = random.tensor({T + 1, H}, dtype);
      for (const Tensor& residual : {more.narrow(0, 0, T), more.narrow(0, 1, T)}) {
        for (const Tensor& gates : {of_sum, Tensor()}) {
          const Tensor parts = Tensor::empty({T, H}, dtype), fused = Tensor::empty({T, H}, dtype);
          const Tensor y = Tensor::empty({T, H}, dtype);
          const Values before = residual.items();
          ops::unpermute(parts, rows, routes.slots, gates);
          ops::add(parts, residual, parts);
          device.runtime.backend().fuse(false);
          ops::unpermute_onto(y, residual, rows, routes.slots, gates);
          REQUIRE(same_bits(y, parts));
          device.runtime.backend().fuse(true);
          ops::unpermute_onto(fused, residual, rows, routes.slots, gates);
          const Values factors = gates.defined() ? gates.items() : Values(T * k, 1.0);
          check_close(fused, plain_sums(before, rows.items(), routes, factors), tolerance_of(dtype),
                      "fused");
          REQUIRE(residual.items() == before);
        }
      }
    }
  }
}

TEST_CASE("sums of bf16 rows are rounded once") {
  const OnDevice cpu;
  Random random(5);
  const int64_t H = 70;
  const Routes routes(random, 20, 40, 30);
  const Tensor rows = random.tensor({routes.R, H}, DType::bf16);
  const Tensor gates = random.tensor({routes.T, routes.k}, DType::f32);
  const Tensor y = Tensor::empty({routes.T, H}, DType::bf16);
  ops::unpermute(y, rows, routes.slots, gates);
  const Values exact = plain_sums(Values(routes.T * H), rows.items(), routes, gates.items());
  const Values actual = y.items();
  for (size_t i = 0; i < actual.size(); ++i) {
    REQUIRE(std::abs(actual[i] - exact[i]) <= std::abs(exact[i]) / 256 + 1e-4);
  }
}

TEST_CASE("what permute and unpermute send back agrees with finite differences") {
  const OnDevice cpu;
  for (uint64_t seed : {6, 7, 8}) {
    Random random(seed);
    const int64_t H = random.integer(1, 20);
    const Routes routes(random, 6, 5, 3, 0.25);
    CAPTURE(seed, H);
    const Tensor rows = random.tensor({routes.R, H}), gates = random.tensor({6, 3});
    const Tensor dy = random.tensor({6, H}), y = clone(dy);
    const auto loss = [&] {
      ops::unpermute(y, rows, routes.slots, gates);
      return dot(y, dy);
    };
    const Tensor drows = random.tensor(rows.shape()), dgates = random.tensor(gates.shape());
    ops::unpermute_backward(drows, dgates, dy, rows, routes.slots, gates);
    check_gradient(drows, rows, loss, "drows");
    check_gradient(dgates, gates, loss, "dgates");
    const Numbers slots = numbers_of(routes.slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) REQUIRE(dgates.item(int64_t(i)) == 0);
    }
    // permute's is unpermute without gates, and the other way round.
    const Tensor x = random.tensor({6, H}), dx = clone(x);
    ops::unpermute(dx, rows, routes.slots, {});
    check_gradient(
        dx, x,
        [&] {
          ops::permute(drows, x, routes.slots);
          return dot(drows, rows);
        },
        "dx");
  }
}

TEST_CASE("unpermute's gradients may take the rows' place, and in f32 and bf16 follow f64") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Random random(9);
    const DType acc = accumulate_dtype(dtype);
    const int64_t H = 131;
    const Routes routes(random, 14, 6, 3, 0.2);
    const auto exact = [](const Tensor& x) {
      return Tensor::from_host(x.items(), x.shape(), DType::f64);
    };
    const Tensor rows = random.tensor({routes.R, H}, dtype), dy = random.tensor({14, H}, dtype);
    const Tensor gates = random.tensor({14, 3}, acc), dgates = clone(gates);
    const Tensor drows = clone(rows), wide_drows = exact(rows), wide_dgates = exact(gates);
    ops::unpermute_backward(drows, dgates, dy, rows, routes.slots, gates);
    ops::unpermute_backward(wide_drows, wide_dgates, exact(dy), exact(rows), routes.slots,
                            exact(gates));
    check_close(drows, wide_drows, tolerance_of(dtype), "drows");
    check_close(dgates, wide_dgates, tolerance_of(acc), "dgates");
    const Tensor in_place = clone(rows), again = clone(gates);
    ops::unpermute_backward(in_place, again, dy, in_place, routes.slots, gates);
    REQUIRE(same_bits(in_place, drows));
    REQUIRE(same_bits(again, dgates));
  }
}

/// Linear layers of experts, of which some may have no rows.
struct GroupedLinear {
  GroupedLinear(Random& random, std::vector<int64_t> counts, int64_t I, int64_t O, DType dtype)
      : counts(std::move(counts)),
        E(int64_t(this->counts.size())),
        R(std::accumulate(this->counts.begin(), this->counts.end(), int64_t{0})),
        I(I),
        O(O),
        x(random.tensor({R, I}, dtype)),
        dy(random.tensor({R, O}, dtype)),
        weights(random.tensor({E, O, I}, dtype)) {}

  /// body(expert) of each row, in order.
  void for_each_row(const std::function<void(int64_t row, int64_t expert)>& body) const {
    int64_t row = 0;
    for (int64_t e = 0; e < E; ++e) {
      for (int64_t i = 0; i < counts[e]; ++i) body(row++, e);
    }
  }

  std::vector<int64_t> counts;
  int64_t E, R, I, O;
  Tensor x, dy, weights;
};

/// Few rows; and so many that the CPU multiplies a few more than an expert has, or leaves a rest.
const std::vector<std::vector<int64_t>> kCounts = {
    {3, 0, 5, 1}, {0, 0, 7}, {4}, {0, 0}, {0, 1, 0}, {67, 0, 141, 1, 2, 130, 65}};

TEST_CASE("each expert's linear layer multiplies its own rows") {
  const OnDevice cpu;
  Random random(10);
  for (DType dtype : kFloatDTypes) {
    for (const std::vector<int64_t>& counts : kCounts) {
      CAPTURE(name(dtype), counts);
      const GroupedLinear g(random, counts, 24, 17, dtype);
      const Values x = g.x.items(), dy = g.dy.items(), w = g.weights.items();
      Values expected_y(g.R * g.O), expected_dx(g.R * g.I);
      g.for_each_row([&](int64_t row, int64_t e) {
        for (int64_t o = 0; o < g.O; ++o) {
          for (int64_t i = 0; i < g.I; ++i) {
            const double weight = w[(e * g.O + o) * g.I + i];
            expected_y[row * g.O + o] += x[row * g.I + i] * weight;
            expected_dx[row * g.I + i] += dy[row * g.O + o] * weight;
          }
        }
      });
      const Tensor y = Tensor::empty({g.R, g.O}, dtype), dx = Tensor::empty({g.R, g.I}, dtype);
      ops::grouped_linear_forward(y, g.x, g.weights, counts);
      check_close(y, expected_y, tolerance_of(dtype), "y");
      ops::grouped_linear_backward_input(dx, g.dy, g.weights, counts);
      check_close(dx, expected_dx, tolerance_of(dtype), "dx");
    }
  }
}

TEST_CASE("each expert's weight gradient sums over its own rows, over the old one or onto it") {
  const OnDevice cpu;
  Random random(11);
  for (DType dtype : kFloatDTypes) {
    for (const std::vector<int64_t>& counts : kCounts) {
      CAPTURE(name(dtype), counts);
      const GroupedLinear g(random, counts, 24, 17, dtype);
      const Values x = g.x.items(), dy = g.dy.items();
      Values expected(g.E * g.O * g.I);
      g.for_each_row([&](int64_t row, int64_t e) {
        for (int64_t o = 0; o < g.O; ++o) {
          for (int64_t i = 0; i < g.I; ++i) {
            expected[(e * g.O + o) * g.I + i] += dy[row * g.O + o] * x[row * g.I + i];
          }
        }
      });
      for (DType sums : {dtype, accumulate_dtype(dtype)}) {
        const Tensor before = random.tensor(g.weights.shape(), sums);
        const Tensor overwritten = clone(before), added = clone(before);
        ops::grouped_linear_backward_weight(overwritten, g.dy, g.x, counts, false);
        check_close(overwritten, expected, tolerance_of(sums), "overwritten");
        Values both = before.items();
        for (size_t i = 0; i < both.size(); ++i) both[i] += expected[i];
        ops::grouped_linear_backward_weight(added, g.dy, g.x, counts, true);
        check_close(added, both, tolerance_of(sums), "added");
      }
    }
  }
}

TEST_CASE("the gradients of the experts' linear layers agree with finite differences") {
  const OnDevice cpu;
  Random random(12);
  const GroupedLinear g(random, {2, 0, 3}, 5, 4, DType::f64);
  const Tensor y = Tensor::empty({g.R, g.O}, DType::f64);
  const auto loss = [&] {
    ops::grouped_linear_forward(y, g.x, g.weights, g.counts);
    return dot(y, g.dy);
  };
  const Tensor dx = random.tensor(g.x.shape()), dweights = random.tensor(g.weights.shape());
  ops::grouped_linear_backward_input(dx, g.dy, g.weights, g.counts);
  ops::grouped_linear_backward_weight(dweights, g.dy, g.x, g.counts, /*accumulate=*/false);
  check_gradient(dx, g.x, loss, "dx");
  check_gradient(dweights, g.weights, loss, "dweights");
}

TEST_CASE("the operations of experts take no rows") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    const DType acc = accumulate_dtype(dtype);
    const int64_t E = 6, k = 2;
    const Tensor scores = Tensor::empty({0, E}, acc), gates = Tensor::empty({0, k}, acc);
    const Tensor choices = Tensor::empty({0, k}, DType::i32), rows = Tensor::empty({0, 5}, dtype);
    for (RouterScore kind : {RouterScore::softmax, RouterScore::sigmoid}) {
      ops::router_scores(scores, scores, kind);
      ops::router_scores_backward(scores, scores, scores, kind);
    }
    ops::choose_experts(choices, scores, {}, 2, 1);
    const Tensor counts = Tensor::from_host(Numbers(2 * E, 7), {2, E});
    ops::count_choices(counts, choices);
    REQUIRE(counts.counts() == std::vector<int64_t>(2 * E, 0));
    ops::drop_choices(choices, counts, 1);
    ops::gates_forward(gates, scores, choices, true, 1);
    ops::gates_backward(scores, gates, gates, scores, choices, true, 1);
    ops::assign_slots(choices, choices, std::vector<int64_t>(E));
    ops::permute(rows, rows, choices);
    ops::unpermute(rows, rows, choices, gates, true);
    ops::unpermute_backward(rows, gates, rows, rows, choices, gates);
    const Tensor loss = Tensor::from_host(Values{2.5}, {1}, DType::f64);
    const Tensor load = Tensor::zeros({2, E}, acc);
    ops::balance_loss_forward(loss, scores, load, 1, true);
    ops::balance_loss_backward(scores, scores, load, 1, true);
    ops::z_loss_forward(loss, scores, 1);
    ops::z_loss_backward(scores, scores, 1);
    ops::router_entropy(loss, scores);
    REQUIRE(loss.item() == 2.5);
  }
}

}  // namespace
}  // namespace usp::test
