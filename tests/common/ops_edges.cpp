#include "base/rng.h"
#include "tensor/expert_ops.h"
#include "tensor/ops.h"
#include "testing.h"

/// Sizes of exactly a warp, a tile or a block of the kernels for GPUs, and one more: where a count
/// that is rounded the wrong way leaves out the last row or column.
namespace usp::test {
namespace {

constexpr double kRounding = 1e-12;  // f64 in another order

TEST_CASE("a norm's weight gradient has every row, however many blocks of rows there are") {
  const OnDevice cpu;
  Random random(21);
  const int64_t H = 3;
  for (int64_t rows : {63, 64, 65, 128, 129}) {
    CAPTURE(rows);
    const Tensor dy = random.tensor({rows, H}), x = random.tensor({rows, H});
    const Tensor rstd = random.tensor({rows}), dweight = Tensor::empty({H}, DType::f64);
    ops::rmsnorm_backward_weight(dweight, dy, x, rstd, /*accumulate=*/false);
    const Values d = dy.items(), in = x.items(), r = rstd.items();
    Values expected(H);
    for (int64_t i = 0; i < rows * H; ++i) expected[i % H] += d[i] * in[i] * r[i / H];
    check_close(dweight, expected, kRounding);
  }
}

TEST_CASE("a sum of squares has every element, however many partial sums there are") {
  const OnDevice cpu;
  constexpr int64_t kOfASum = 16384, kThreads = 256;
  for (int64_t count : {kOfASum, kOfASum + 1, kThreads * kOfASum + 1}) {
    CAPTURE(count);
    Values numbers(count);
    numbers.front() = 2;
    numbers.back() = 3;
    const Tensor x = Tensor::from_host(numbers, {count}, DType::f32);
    const Tensor sum = Tensor::empty({1}, DType::f64);
    ops::sum_squares(sum, x);
    REQUIRE(sum.item() == 13);
  }
}

TEST_CASE("the loss has every row, and dropout every column, of more than a block") {
  const OnDevice cpu;
  for (int64_t rows : {256, 257, 513}) {
    CAPTURE(rows);
    Values sums(rows, 1.0), picked(rows);
    picked.back() = -7;
    const Tensor loss = Tensor::zeros({1}, DType::f64), lse = Tensor::empty({rows}, DType::f64);
    const Tensor zeros = Tensor::zeros({rows}, DType::f64);
    ops::cross_entropy_loss(loss, lse, zeros, Tensor::from_host(sums, {rows}, DType::f64),
                            Tensor::from_host(picked, {rows}, DType::f64), 1);
    REQUIRE(loss.item() == 7);
    check_close(lse, Values(rows), 0);
  }
  for (int64_t H : {256, 257}) {
    CAPTURE(H);
    const RandomStream random(3, "edges");
    const Tensor x = Tensor::from_host(Values(H, 1.0), {1, H}, DType::f64);
    const Tensor y = Tensor::empty({1, H}, DType::f64);
    ops::fill(y, kNaN);
    ops::dropout(y, x, 0.5, random, /*first_row=*/4);
    Values expected(H);
    for (int64_t h = 0; h < H; ++h) expected[h] = random.uniform(4, uint64_t(h)) >= 0.5 ? 2 : 0;
    check_close(y, expected, 0);
  }
}

TEST_CASE("a table's gradient has every token and every column, of more than a warp") {
  const OnDevice cpu;
  for (int64_t num_tokens : {33, 512, 513, 1025}) {  // which a GPU links 512 at a time
    for (int64_t H : {32, 33, 64, 65, 66, 130}) {
      CAPTURE(num_tokens, H);
      const Tensor tokens = Tensor::from_host(std::vector<int32_t>(num_tokens, 1), {num_tokens});
      const Tensor dy = Tensor::from_host(Values(num_tokens * H, 1.0), {num_tokens, H}, DType::f64);
      const Tensor dtable = Tensor::empty({2, H}, DType::f64);
      ops::embedding_backward(dtable, dy, tokens, /*vocab_offset=*/0, /*accumulate=*/false);
      Values expected(2 * H);
      std::fill(expected.begin() + H, expected.end(), double(num_tokens));
      check_close(dtable, expected, 0);
    }
  }
}

TEST_CASE("rows of attention are merged, and multiplied, in every channel of wide heads") {
  const OnDevice cpu;
  Random random(22);
  const int64_t S = 2;
  for (int64_t D : {32, 33, 64, 65, 128, 129}) {
    CAPTURE(D);
    const Shape heads{1, S, 1, D};
    const Tensor out = random.tensor(heads), part = random.tensor(heads);
    const Tensor lse = Tensor::zeros({1, 1, S}, DType::f64);
    const Tensor part_lse = Tensor::zeros({1, 1, S}, DType::f64);
    const Tensor delta = Tensor::empty({1, 1, S}, DType::f64);
    const Values x = out.items(), y = part.items();
    Values products(S), means(S * D);
    for (int64_t i = 0; i < S * D; ++i) {
      products[i / D] += x[i] * y[i];
      means[i] = (x[i] + y[i]) / 2;
    }
    ops::attention_delta(delta, out, part);
    check_close(delta, products, kRounding);
    ops::attention_merge(out, lse, part, part_lse);
    check_close(out, means, kRounding);
    check_close(lse, Values(S, std::log(2.0)), kRounding);
  }
}

TEST_CASE("gates and rotations have every channel of rows wider than a block") {
  const OnDevice cpu;
  Random random(23);
  for (int64_t F : {256, 257, 512, 514}) {
    CAPTURE(F);
    const Tensor gate_up = random.tensor({2, 2 * F}), dy = random.tensor({2, F});
    const Tensor y = Tensor::empty({2, F}, DType::f64);
    const Tensor gradient = Tensor::empty({2, 2 * F}, DType::f64);
    ops::swiglu_forward(y, gate_up);
    ops::swiglu_backward(gradient, dy, gate_up);
    const Values x = gate_up.items(), d = dy.items();
    Values expected(2 * F), of_both(4 * F);
    for (int64_t i = 0; i < 2 * F; ++i) {
      const int64_t gate = i / F * 2 * F + i % F, up = gate + F;
      const double sigmoid = 1 / (1 + std::exp(-x[gate]));
      expected[i] = x[gate] * sigmoid * x[up];
      of_both[gate] = d[i] * x[up] * sigmoid * (1 + x[gate] * (1 - sigmoid));
      of_both[up] = d[i] * x[gate] * sigmoid;
    }
    check_close(y, expected, kRounding);
    check_close(gradient, of_both, kRounding);
  }
  for (int64_t N : {128, 129}) {  // of two pairs each
    CAPTURE(N);
    const Tensor x = random.tensor({1, 1, N, 4});
    Values turned = x.items();
    for (int64_t n = 0; n < N; ++n) {  // by a quarter
      for (int64_t i : {4 * n, 4 * n + 1}) {
        std::swap(turned[i], turned[i + 2]);
        turned[i] = -turned[i];
      }
    }
    const Tensor sin = Tensor::from_host(Values{1, 1}, {1, 2}, DType::f64);
    ops::rope(x, Tensor::zeros({1, 2}, DType::f64), sin, Positions(0, 1), /*inverse=*/false);
    check_close(x, turned, 0);
  }
}

TEST_CASE("a norm and a table have every column of rows wider than a warp or a block") {
  const OnDevice cpu;
  Random random(24);
  for (int64_t H : {32, 33, 64, 66, 257, 514}) {
    CAPTURE(H);
    const Tensor x = random.tensor({1, H}), dy = random.tensor({1, H}), y = random.tensor({1, H});
    const Tensor weight = random.tensor({H}), rstd = Tensor::empty({1}, DType::f64);
    ops::rmsnorm_forward(y, rstd, x, weight, /*eps=*/0);
    const Values in = x.items(), w = weight.items(), d = dy.items();
    double squares = 0, along = 0;
    for (int64_t h = 0; h < H; ++h) {
      squares += in[h] * in[h];
      along += d[h] * w[h] * in[h];
    }
    const double r = 1 / std::sqrt(squares / double(H));
    Values normed(H), gradient(H);
    for (int64_t h = 0; h < H; ++h) {
      normed[h] = in[h] * r * w[h];
      gradient[h] = d[h] * w[h] * r - in[h] * along * r * r * r / double(H);
    }
    check_close(y, normed, kRounding);
    ops::rmsnorm_backward_input(y, dy, x, weight, rstd, /*dresidual=*/{});
    check_close(y, gradient, 1e-11);
    ops::fill(y, kNaN);
    ops::embedding_forward(y, x, Tensor::from_host(std::vector<int32_t>{0}, {1}));
    check_close(y, in, 0);
  }
}

TEST_CASE("a query's probabilities are of every key, of more than a warp") {
  const OnDevice cpu;
  for (int64_t K : {32, 33, 64, 65, 66}) {
    CAPTURE(K);
    const Shape shape{1, 1, 1, K};
    const Tensor scores = Tensor::zeros(shape, DType::f64),
                 probs = Tensor::zeros(shape, DType::f64);
    const Tensor lse = Tensor::empty({1, 1, 1}, DType::f64);
    Backend& backend = Runtime::current().backend();
    backend.causal_softmax_forward(probs, lse, scores, 1, Positions(K - 1, 1), Positions(0, K), {});
    check_close(lse, Values{std::log(double(K))}, kRounding);
    check_close(probs, Values(K, 1 / double(K)), kRounding);
    const Tensor part_lse =
        Tensor::from_host(Values{lse.item() - std::log(2.0)}, {1, 1, 1}, DType::f64);
    ops::attention_rescale(probs, part_lse, lse);
    check_close(probs, Values(K, 0.5 / double(K)), kRounding);
    const Tensor ones = Tensor::from_host(Values(K, 1.0), shape, DType::f64);
    backend.causal_softmax_backward(ones, ones, probs, Tensor::zeros({1, 1, 1}, DType::f64), 2);
    check_close(ones, Values(K, 1 / double(K)), kRounding);
  }
}

TEST_CASE("rows reach their experts and return with every column, of more than a block") {
  const OnDevice cpu;
  Random random(25);
  for (int64_t H : {64, 66, 128, 130, 257, 512, 514}) {
    CAPTURE(H);
    const Tensor x = random.tensor({2, H}), rows = Tensor::empty({2, H}, DType::f64);
    const Tensor slots = Tensor::from_host(std::vector<int32_t>{1, 0}, {2, 1});
    const Tensor gates = Tensor::from_host(Values{2, 4}, {2, 1}, DType::f64);
    ops::fill(rows, kNaN);
    ops::permute(rows, x, slots);
    Values in = x.items(), swapped(in.begin() + H, in.end()), doubled = in;
    swapped.insert(swapped.end(), in.begin(), in.begin() + H);
    check_close(rows, swapped, 0);
    const Tensor y = Tensor::empty({2, H}, DType::f64), dgates = Tensor::empty({2, 1}, DType::f64);
    ops::fill(y, kNaN);
    ops::unpermute(y, rows, slots, gates);
    double squares[2] = {};
    for (int64_t i = 0; i < 2 * H; ++i) {
      squares[i / H] += in[i] * in[i];
      doubled[i] = in[i] * (i < H ? 2 : 4);
      swapped[i] *= i < H ? 4 : 2;
    }
    check_close(y, doubled, 0);
    ops::unpermute_backward(rows, dgates, x, rows, slots, gates);
    check_close(rows, swapped, 0);
    check_close(dgates, Values{squares[0], squares[1]}, kRounding);
  }
}

TEST_CASE("experts are counted, dropped and given rows for every choice, of more than a warp") {
  const OnDevice cpu;
  for (int64_t of_run : {32, 33, 64, 65}) {
    CAPTURE(of_run);
    std::vector<int32_t> numbers(2 * of_run, 0);
    numbers[of_run - 1] = numbers.back() = 1;
    const Tensor choices = Tensor::from_host(numbers, {2 * of_run, 1});
    const Tensor counts = Tensor::empty({2, 2}, DType::i32);
    ops::count_choices(counts, choices);
    const Values all{double(of_run - 1), 1, double(of_run - 1), 1};
    check_close(counts, all, 0);
    const Tensor slots = Tensor::empty({2 * of_run, 1}, DType::i32);
    ops::assign_slots(slots, choices, std::vector<int64_t>{2 * of_run - 2, 2});
    Values rows(2 * of_run);
    for (int64_t i = 0; i < of_run - 1; ++i) {
      rows[i] = double(i);
      rows[of_run + i] = double(of_run - 1 + i);
    }
    rows[of_run - 1] = double(2 * of_run - 2);
    rows.back() = double(2 * of_run - 1);
    check_close(slots, rows, 0);
    ops::drop_choices(choices, Tensor::from_host(std::vector<int32_t>{0, 0, 0, 1}, {2, 2}), 1);
    Values kept(2 * of_run, -1);
    kept[0] = kept[of_run] = 0;
    kept[of_run - 1] = 1;  // of the second run, one lies ahead
    check_close(choices, kept, 0);
  }
}

}  // namespace
}  // namespace usp::test
