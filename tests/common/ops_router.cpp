#include "expert_case.h"

/// Which experts a token goes to, how much of each it takes, and what balances them.
namespace usp::test {
namespace {

constexpr RouterScore kScores[] = {RouterScore::softmax, RouterScore::sigmoid};

/// Scores between 0 and 1.
Tensor random_scores(Random& random, int64_t T, int64_t E, DType dtype) {
  Values values = random.normals(T * E);
  for (double& value : values) value = 1 / (1 + std::exp(-value));
  return Tensor::from_host(values, {T, E}, dtype);
}

/// Multiples of a quarter: many equal ones.
Tensor with_ties(Random& random, const Shape& shape, DType dtype) {
  Values values(shape.numel());
  for (double& value : values) value = 0.25 * double(random.integer(-4, 4));
  return Tensor::from_host(values, shape, dtype);
}

TEST_CASE("a router's scores are the softmax of each row or the sigmoid of each logit") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kRouterDTypes) {
    for (int64_t E : {1, 7, 64, 193}) {
      CAPTURE(name(dtype), E);
      const int64_t T = 5;
      const Tensor logits = random.tensor({T, E}, dtype, 8), scores = Tensor::empty({T, E}, dtype);
      const Values x = logits.items();
      Values softmax, sigmoid;
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (int64_t e = 0; e < E; ++e) sum += std::exp(x[t * E + e]);
        for (int64_t e = 0; e < E; ++e) softmax.push_back(std::exp(x[t * E + e]) / sum);
      }
      for (double value : x) sigmoid.push_back(1 / (1 + std::exp(-value)));
      ops::router_scores(scores, logits, RouterScore::softmax);
      check_close(scores, softmax, tolerance_of(dtype), "softmax");
      ops::router_scores(scores, logits, RouterScore::sigmoid);
      check_close(scores, sigmoid, tolerance_of(dtype), "sigmoid");
    }
  }
}

TEST_CASE("scores of large logits are finite") {
  const OnDevice cpu;
  const Tensor scores = Tensor::empty({1, 3}, DType::f32);
  ops::router_scores(scores, Tensor::from_host(Values{900, -900, 900}, {1, 3}, DType::f32),
                     RouterScore::softmax);
  check_close(scores, Values{0.5, 0, 0.5}, 1e-6);
}

TEST_CASE("the gradients of a router's scores agree with finite differences, in place too") {
  const OnDevice cpu;
  for (RouterScore kind : kScores) {
    for (int64_t E : {1, 6, 70}) {
      CAPTURE(int(kind), E);
      Random random(2);
      const Shape shape{3, E};
      const Tensor logits = random.tensor(shape), dscores = random.tensor(shape);
      const Tensor scores = Tensor::empty(shape, DType::f64);
      const Tensor dlogits = Tensor::empty(shape, DType::f64);
      const auto loss = [&] {
        ops::router_scores(scores, logits, kind);
        return dot(scores, dscores);
      };
      loss();
      ops::router_scores_backward(dlogits, dscores, scores, kind);
      if (E > 1 || kind == RouterScore::sigmoid) check_gradient(dlogits, logits, loss, "dlogits");
      loss();  // of the logits where they were
      const Tensor in_place = clone(dscores);
      ops::router_scores_backward(in_place, in_place, scores, kind);
      REQUIRE(same_bits(in_place, dlogits));
      if (E > 1) continue;
      if (kind == RouterScore::softmax) check_close(dlogits, Values(3, 0.0), 0);
    }
  }
}

TEST_CASE("the gradients of a router's scores in f32 follow those in f64") {
  const OnDevice cpu;
  Random random(3);
  const Shape shape{4, 67};
  const Tensor scores = random_scores(random, 4, 67, DType::f32);
  const Tensor dscores = random.tensor(shape, DType::f32),
               narrow = Tensor::empty(shape, DType::f32);
  const Tensor wide = Tensor::empty(shape, DType::f64);
  const Tensor wide_scores = Tensor::empty(shape, DType::f64);
  const Tensor wide_dscores = Tensor::empty(shape, DType::f64);
  ops::copy(wide_scores, scores);
  ops::copy(wide_dscores, dscores);
  for (RouterScore kind : kScores) {
    ops::router_scores_backward(narrow, dscores, scores, kind);
    ops::router_scores_backward(wide, wide_dscores, wide_scores, kind);
    check_close(narrow, wide, 1e-5);
  }
}

/// What choose_experts() says it does, by sorting.
Numbers chosen_by_sorting(const Values& scores, const Values& bias, int64_t E, int64_t k,
                          int64_t groups, int64_t allowed) {
  const int64_t T = int64_t(scores.size()) / E, size = E / groups;
  const int64_t best = (k + allowed - 1) / allowed;
  Numbers choices;
  for (int64_t t = 0; t < T; ++t) {
    const auto priority = [&](int64_t e) { return scores[t * E + e] + bias[e]; };
    const Numbers order = sorted_by(E, priority);
    const auto of_group = [&](int32_t group) {
      double sum = 0;
      int64_t taken = 0;
      for (int32_t e : order) {
        if (e / size == group && taken++ < best) sum += priority(e);
      }
      return sum;
    };
    const Numbers best_groups = sorted_by(groups, of_group);
    int64_t taken = 0;
    for (int32_t e : order) {
      const auto end = best_groups.begin() + allowed;
      if (std::find(best_groups.begin(), end, e / size) == end || taken == k) continue;
      choices.push_back(e);
      ++taken;
    }
  }
  return choices;
}

TEST_CASE("a token chooses the experts of the highest score and bias, of equals the lower number") {
  const OnDevice cpu;
  Random random(4);
  struct Sizes {
    int64_t E, k;
  };
  for (DType dtype : kRouterDTypes) {
    for (const auto& [E, k] : {Sizes{1, 1}, {5, 2}, {5, 5}, {64, 6}, {97, 8}, {40, 40}}) {
      CAPTURE(name(dtype), E, k);
      const int64_t T = 23;
      const Tensor choices = Tensor::empty({T, k}, DType::i32);
      for (bool ties : {false, true}) {
        const Tensor scores =
            ties ? with_ties(random, {T, E}, dtype) : random.tensor({T, E}, dtype);
        const Tensor bias = with_ties(random, {E}, dtype);
        const Values none(E, 0.0);
        ops::choose_experts(choices, scores, {});
        REQUIRE(numbers_of(choices) == chosen_by_sorting(scores.items(), none, E, k, 1, 1));
        if (dtype == DType::f32 && !ties) continue;  // which rounds the sums, unlike the next line
        ops::choose_experts(choices, scores, bias);
        REQUIRE(numbers_of(choices) == chosen_by_sorting(scores.items(), bias.items(), E, k, 1, 1));
      }
    }
  }
}

TEST_CASE("a token chooses within its best groups of experts") {
  const OnDevice cpu;
  Random random(5);
  struct Sizes {
    int64_t E, k, groups, allowed;
  };
  // The first as in DeepSeek-V3, where a group counts by its best two.
  for (const auto& [E, k, groups, allowed] : {Sizes{256, 8, 8, 4},
                                              {32, 4, 4, 3},
                                              {12, 3, 4, 1},
                                              {12, 6, 4, 2},
                                              {6, 2, 6, 2},
                                              {24, 6, 3, 3}}) {
    CAPTURE(E, k, groups, allowed);
    const int64_t T = 31;
    const Tensor choices = Tensor::empty({T, k}, DType::i32);
    for (DType dtype : kRouterDTypes) {
      for (bool ties : {false, true}) {
        const Tensor scores =
            ties ? with_ties(random, {T, E}, dtype) : random_scores(random, T, E, dtype);
        const Tensor bias = with_ties(random, {E}, dtype), none = Tensor::zeros({E}, dtype);
        ops::choose_experts(choices, scores, {}, groups, allowed);
        const Numbers unbiased = numbers_of(choices);
        ops::choose_experts(choices, scores, none, groups, allowed);
        REQUIRE(numbers_of(choices) == unbiased);
        if (dtype == DType::f32 && !ties) continue;  // which rounds the sums, unlike the next lines
        REQUIRE(unbiased == chosen_by_sorting(scores.items(), none.items(), E, k, groups, allowed));
        ops::choose_experts(choices, scores, bias, groups, allowed);
        REQUIRE(numbers_of(choices) ==
                chosen_by_sorting(scores.items(), bias.items(), E, k, groups, allowed));
      }
    }
  }
}

TEST_CASE("the best expert of all is left out where its group is none of the best") {
  const OnDevice cpu;
  for (DType dtype : kRouterDTypes) {
    const Tensor scores =
        Tensor::from_host(Values{0.75, 0.125, 0.5, 0.5, 0.25, 0.5}, {1, 6}, dtype);
    const Tensor choices = Tensor::empty({1, 2}, DType::i32);
    ops::choose_experts(choices, scores, {}, 3, 1);
    REQUIRE(numbers_of(choices) == Numbers{2, 3});
    ops::choose_experts(choices, scores, {}, 3, 2);  // a group counts by its best one
    REQUIRE(numbers_of(choices) == Numbers{0, 2});
    ops::choose_experts(choices, scores, {});
    REQUIRE(numbers_of(choices) == Numbers{0, 2});
  }
}

TEST_CASE("a token whose scores are no numbers still chooses different experts") {
  const OnDevice cpu;
  const Tensor choices = Tensor::empty({3, 3}, DType::i32);
  const Values scores = {kNaN, kNaN, kNaN, kNaN, 0.5, kNaN, 0.25, 1, -kInf, kInf, -kInf, kNaN};
  ops::choose_experts(choices, Tensor::from_host(scores, {3, 4}, DType::f32), {});
  REQUIRE(numbers_of(choices) == Numbers{0, 1, 2, 3, 0, 2, 1, 0, 2});
  ops::choose_experts(choices.narrow(1, 0, 3), Tensor::from_host(scores, {3, 4}, DType::f64),
                      Tensor::zeros({4}, DType::f64), 2, 2);
  REQUIRE(numbers_of(choices) == Numbers{0, 1, 2, 3, 0, 2, 1, 0, 2});
}

TEST_CASE("choices are counted for each run of tokens, those of -1 not at all") {
  const OnDevice cpu;
  Random random(6);
  for (int64_t runs : {1, 3, 24}) {
    const int64_t T = 24, E = 70, k = 5, of_run = T / runs * k;
    const Numbers chosen = random_choices(random, T, E, k, 0.2);
    std::vector<int64_t> expected;
    for (int64_t run = 0; run < runs; ++run) {
      const auto begin = chosen.begin() + run * of_run;
      for (int64_t count : counts_of({begin, begin + of_run}, E)) expected.push_back(count);
    }
    const Tensor counts = Tensor::empty({runs, E}, DType::i32);
    ops::count_choices(counts, Tensor::from_host(chosen, {T, k}));
    REQUIRE(counts.counts() == expected);
  }
}

TEST_CASE("what an expert has no room for is dropped, by token and then by choice") {
  const OnDevice cpu;
  Random random(7);
  for (int64_t runs : {1, 4}) {
    for (int64_t capacity : {0, 1, 3, 100}) {
      CAPTURE(runs, capacity);
      const int64_t T = 24, E = 6, k = 3, of_run = T / runs * k;
      const Numbers chosen = random_choices(random, T, E, k, 0.1);
      const Numbers before = random.tokens(runs * E, 3);
      Numbers expected = chosen;
      for (int64_t run = 0; run < runs; ++run) {
        Numbers count(before.begin() + run * E, before.begin() + (run + 1) * E);
        for (int64_t i = run * of_run; i < (run + 1) * of_run; ++i) {
          if (chosen[i] < 0) continue;
          if (count[chosen[i]] >= capacity) expected[i] = -1;
          ++count[chosen[i]];
        }
      }
      const Tensor choices = Tensor::from_host(chosen, {T, k});
      ops::drop_choices(choices, Tensor::from_host(before, {runs, E}), capacity);
      REQUIRE(numbers_of(choices) == expected);
    }
  }
}

TEST_CASE("who holds part of a sample drops what the holder of the whole would") {
  const OnDevice cpu;
  Random random(8);
  const int64_t T = 30, E = 5, k = 2, first = 12, capacity = 9;
  const Tensor whole = Tensor::from_host(random_choices(random, T, E, k), {T, k});
  const Tensor early = clone(whole.narrow(0, 0, first));
  const Tensor late = clone(whole.narrow(0, first, T - first));
  const Tensor none = Tensor::zeros({1, E}, DType::i32), ahead = clone(none);
  ops::count_choices(ahead, early);
  ops::drop_choices(whole, none, capacity);
  ops::drop_choices(early, none, capacity);
  ops::drop_choices(late, ahead, capacity);
  REQUIRE(same_bits(early, whole.narrow(0, 0, first)));
  REQUIRE(same_bits(late, whole.narrow(0, first, T - first)));
}

/// Gates of random choices.
struct Gates {
  Gates(Random& random, int64_t T, int64_t E, int64_t k, DType dtype, bool normalised)
      : normalised(normalised),
        scores(random_scores(random, T, E, dtype)),
        choices(Tensor::from_host(random_choices(random, T, E, k), {T, k})),
        gates(Tensor::empty({T, k}, dtype)),
        dgates(random.tensor({T, k}, dtype)) {
    forward();
  }
  void forward() { ops::gates_forward(gates, scores, choices, normalised, scale); }
  void backward(const Tensor& dscores) const {
    ops::gates_backward(dscores, dgates, gates, scores, choices, normalised, scale);
  }

  bool normalised;
  double scale = 2.5;
  Tensor scores, choices, gates, dgates;
};

TEST_CASE("gates are the scaled scores of the chosen, or their shares") {
  const OnDevice cpu;
  for (DType dtype : kRouterDTypes) {
    for (bool normalised : {false, true}) {
      CAPTURE(name(dtype), normalised);
      Random random(9);
      const int64_t T = 9, E = 40, k = 6;
      const Gates run(random, T, E, k, dtype, normalised);
      const Values scores = run.scores.items();
      const Numbers choices = numbers_of(run.choices);
      Values expected;
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += scores[t * E + choices[t * k + j]];
        for (int64_t j = 0; j < k; ++j) {
          expected.push_back(2.5 * scores[t * E + choices[t * k + j]] / (normalised ? sum : 1));
        }
      }
      check_close(run.gates, expected, tolerance_of(dtype));
    }
  }
}

TEST_CASE("shares of the chosen softmax scores are the softmax over the chosen logits") {
  const OnDevice cpu;
  Random random(16);
  const int64_t T = 9, E = 12, k = 3;
  const Tensor logits = random.tensor({T, E}), scores = Tensor::empty({T, E}, DType::f64);
  ops::router_scores(scores, logits, RouterScore::softmax);
  const Tensor choices = Tensor::empty({T, k}, DType::i32);
  ops::choose_experts(choices, scores, /*bias=*/{}, /*nodes=*/1, /*nodes_of_token=*/1);
  const Tensor gates = Tensor::empty({T, k}, DType::f64);
  ops::gates_forward(gates, scores, choices, /*normalised=*/true, /*scale=*/1);
  const Values x = logits.items();
  const Numbers chosen = numbers_of(choices);
  Values expected;
  for (int64_t t = 0; t < T; ++t) {
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += std::exp(x[t * E + chosen[t * k + j]]);
    for (int64_t j = 0; j < k; ++j) {
      expected.push_back(std::exp(x[t * E + chosen[t * k + j]]) / sum);
    }
  }
  check_close(gates, expected, 1e-14);
}

TEST_CASE("the gates' gradient agrees with finite differences and is added") {
  const OnDevice cpu;
  for (bool normalised : {false, true}) {
    for (int64_t k : {1, 2, 7}) {
      CAPTURE(normalised, k);
      Random random(10);
      Gates run(random, 4, 7, k, DType::f64, normalised);
      const auto loss = [&] {
        run.forward();
        return dot(run.gates, run.dgates);
      };
      const Tensor dscores = Tensor::zeros(run.scores.shape(), DType::f64);
      run.backward(dscores);
      // The only share of a token is 1, whatever its score.
      if (normalised && k == 1) {
        REQUIRE(std::sqrt(dot(dscores, dscores)) <= 1e-14);
      } else {
        check_gradient(dscores, run.scores, loss, "dscores");
      }
      run.forward();
      const Tensor added = random.tensor(run.scores.shape());
      Values expected = added.items();
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += dscores.item(int64_t(i));
      run.backward(added);
      check_close(added, expected, 1e-15);
    }
  }
}

TEST_CASE("the gates' gradient in f32 follows the one in f64") {
  const OnDevice cpu;
  for (bool normalised : {false, true}) {
    Random narrow_numbers(11), wide_numbers(11);
    const Gates narrow(narrow_numbers, 30, 9, 3, DType::f32, normalised);
    const Gates wide(wide_numbers, 30, 9, 3, DType::f64, normalised);
    const Tensor dscores = Tensor::zeros({30, 9}, DType::f32);
    const Tensor exact = Tensor::zeros({30, 9}, DType::f64);
    narrow.backward(dscores);
    wide.backward(exact);
    check_close(dscores, exact, 1e-5);
  }
}

TEST_CASE("gates of scores that are all zero are zero, and so is what they send back") {
  const OnDevice cpu;
  Random random(12);
  Gates run(random, 2, 4, 3, DType::f32, /*normalised=*/true);
  ops::fill(run.scores, 0);
  run.forward();
  check_close(run.gates, Values(6, 0.0), 0);
  const Tensor dscores = Tensor::zeros({2, 4}, DType::f32);
  run.backward(dscores);
  check_close(dscores, Values(8, 0.0), 0);
}

/// scale * the sum of load * p, in f64.
double plain_balance_loss(const Values& scores, const Values& load, int64_t T, int64_t E,
                          int64_t runs, double scale, bool normalised) {
  double loss = 0;
  for (int64_t t = 0; t < T; ++t) {
    double sum = 0;
    for (int64_t e = 0; e < E; ++e) sum += scores[t * E + e];
    for (int64_t e = 0; e < E; ++e) {
      const double p = scores[t * E + e] / (normalised ? sum : 1);
      loss += scale * load[t / (T / runs) * E + e] * p;
    }
  }
  return loss;
}

TEST_CASE("the balance loss weighs each run's scores by its loads; its gradient is exact") {
  const OnDevice cpu;
  Random random(13);
  const int64_t T = 12, E = 37;
  for (bool normalised : {false, true}) {
    for (int64_t runs : {1, 3, 12}) {
      CAPTURE(normalised, runs);
      for (DType dtype : kRouterDTypes) {
        const Tensor scores = random_scores(random, T, E, dtype);
        const Tensor load = random.tensor({runs, E}, dtype);
        const Tensor loss = Tensor::from_host(Values{0.5}, {1}, DType::f64);
        ops::balance_loss_forward(loss, scores, load, 0.3, normalised);
        const double expected =
            plain_balance_loss(scores.items(), load.items(), T, E, runs, 0.3, normalised);
        REQUIRE(std::abs(loss.item() - 0.5 - expected) <= tolerance_of(dtype) * double(T));
      }
      const Tensor scores = random_scores(random, T, E, DType::f64);
      const Tensor load = random.tensor({runs, E}), before = random.tensor({T, E});
      const Tensor dscores = clone(before);
      ops::balance_loss_backward(dscores, scores, load, 0.3, normalised);
      const auto loss = [&] {
        const Tensor sum = Tensor::zeros({1}, DType::f64);
        ops::balance_loss_forward(sum, scores, load, 0.3, normalised);
        return sum.item() + dot(before, scores);
      };
      check_gradient(dscores, scores, loss, "dscores");
    }
  }
}

TEST_CASE("the balance loss's gradient in f32 follows the one in f64") {
  const OnDevice cpu;
  Random random(14);
  const Tensor scores = random_scores(random, 6, 37, DType::f32);
  const Tensor load = random.tensor({2, 37}, DType::f32),
               wide_load = Tensor::empty({2, 37}, DType::f64);
  const Tensor wide_scores = Tensor::empty({6, 37}, DType::f64);
  ops::copy(wide_scores, scores);
  ops::copy(wide_load, load);
  for (bool normalised : {false, true}) {
    const Tensor narrow = Tensor::zeros({6, 37}, DType::f32),
                 wide = Tensor::zeros({6, 37}, DType::f64);
    ops::balance_loss_backward(narrow, scores, load, 0.3, normalised);
    ops::balance_loss_backward(wide, wide_scores, wide_load, 0.3, normalised);
    check_close(narrow, wide, 1e-5);
  }
}

TEST_CASE("the z-loss is the squared log of the sum of exponentials; its gradient is exact") {
  const OnDevice cpu;
  Random random(15);
  for (int64_t E : {1, 5, 130}) {
    const int64_t T = 6;
    for (DType dtype : kRouterDTypes) {
      CAPTURE(E, name(dtype));
      const Tensor logits = random.tensor({T, E}, dtype, 4);
      const Values x = logits.items();
      const Tensor loss = Tensor::from_host(Values{0.5}, {1}, DType::f64);
      double expected = 0;
      Values gradient;
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (int64_t e = 0; e < E; ++e) sum += std::exp(x[t * E + e]);
        expected += 0.2 * std::log(sum) * std::log(sum);
        for (int64_t e = 0; e < E; ++e) {
          gradient.push_back(0.4 * std::log(sum) * std::exp(x[t * E + e]) / sum);
        }
      }
      ops::z_loss_forward(loss, logits, 0.2);
      check_close(Values{loss.item() - 0.5}, Values{expected}, tolerance_of(dtype), "loss");
      const Tensor dlogits = Tensor::zeros({T, E}, dtype);
      ops::z_loss_backward(dlogits, logits, 0.2);
      check_close(dlogits, gradient, tolerance_of(dtype), "dlogits");
    }
    const Tensor logits = random.tensor({T, E}), before = random.tensor({T, E});
    const Tensor dlogits = clone(before);
    ops::z_loss_backward(dlogits, logits, 0.2);
    const auto loss = [&] {
      const Tensor sum = Tensor::zeros({1}, DType::f64);
      ops::z_loss_forward(sum, logits, 0.2);
      return sum.item() + dot(before, logits);
    };
    check_gradient(dlogits, logits, loss, "dlogits");
  }
}

TEST_CASE("the entropy of a router is that of its tokens' shares, in nats") {
  const OnDevice cpu;
  for (DType dtype : kRouterDTypes) {
    const Tensor even = Tensor::empty({3, 8}, dtype);
    ops::fill(even, 0.7);
    const Tensor sum = Tensor::from_host(Values{1}, {1}, DType::f64);
    ops::router_entropy(sum, even);
    check_close(Values{sum.item()}, Values{1 + 3 * std::log(8)}, tolerance_of(dtype), "even");
    const Tensor sure = Tensor::from_host(Values{0, 0.5, 0, 1, 0, 1}, {2, 3}, dtype);
    ops::fill(sum, 0);
    ops::router_entropy(sum, sure);
    check_close(Values{sum.item()}, Values{std::log(2)}, tolerance_of(dtype), "one and two of 3");
    Random random(16);
    const Tensor scores = random_scores(random, 7, 45, dtype);
    const Values s = scores.items();
    double expected = 0;
    for (int64_t t = 0; t < 7; ++t) {
      const double total = std::accumulate(&s[t * 45], &s[t * 45] + 45, 0.0);
      for (int64_t e = 0; e < 45; ++e) {
        expected -= s[t * 45 + e] / total * std::log(s[t * 45 + e] / total);
      }
    }
    ops::fill(sum, 0);
    ops::router_entropy(sum, scores);
    check_close(Values{sum.item()}, Values{expected}, tolerance_of(dtype), "random");
  }
}

TEST_CASE("the bias rises for experts below the mean load and falls for those above") {
  const OnDevice cpu;
  for (DType dtype : kRouterDTypes) {
    const Tensor bias = Tensor::from_host(Values{1, 2, 3, -1}, {4}, dtype);
    ops::balance_bias(bias, Tensor::from_host(Values{3, 5, 9, 3}, {4}, dtype), 0.25);
    check_close(bias, Values{1.25, 2, 2.75, -0.75}, 0);
    Random random(17);
    const int64_t E = 300;
    const Tensor many = Tensor::zeros({E}, dtype), load = random.tensor({E}, dtype);
    const Values loads = load.items();
    const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / double(E);
    Values expected;
    for (double of_expert : loads) expected.push_back(of_expert < mean ? 0.5 : -0.5);
    ops::balance_bias(many, load, 0.5);
    check_close(many, expected, 0);
  }
}

}  // namespace
}  // namespace usp::test
