#include <algorithm>

#include "comm/algorithms.h"
#include "judge/judge.h"

namespace usp::judging {

struct Answer {
  Tensor (*row_parallel_forward)(const Communicator& tp, const Tensor& x, const Tensor& weight,
                                 const Tensor& residual);
};

namespace {

/// x [T, I], W [O, I] and the residual [T, O], and how many ranks split the I channels.
struct Layer {
  int ranks;
  int64_t T, I, O;

  std::string text() const {
    return fmt::format("{} rank{}, x [{}, {}], W [{}, {}]", ranks, ranks == 1 ? "" : "s", T, I, O,
                       I);
  }
  Values x() const { return normals(300 + I, T * I); }
  Values weight() const { return normals(400 + I, O * I); }
  Values residual() const { return normals(500 + I, T * O); }
  /// The rank's columns of a matrix [rows, I].
  Values columns(const Values& matrix, int rank) const {
    const auto [begin, count] = algorithms::slice(I, ranks, rank);
    Values own;
    for (size_t row = 0; row < matrix.size() / I; ++row) {
      const auto first = matrix.begin() + row * I + begin;
      own.insert(own.end(), first, first + count);
    }
    return own;
  }
  /// Σ x[i, c] W[o, c] over the channels c of a rank; -1: of all.
  Values product(int rank) const {
    const auto own = algorithms::slice(I, ranks, std::max(rank, 0));
    const int64_t begin = rank < 0 ? 0 : own.begin, end = rank < 0 ? I : begin + own.count;
    const Values a = x(), b = weight();
    Values y(T * O);
    for (int64_t i = 0; i < T * O; ++i) {
      for (int64_t c = begin; c < end; ++c) y[i] += a[i / O * I + c] * b[i % O * I + c];
    }
    return y;
  }
  /// residual_times * residual + product_times * y, element by element.
  Values with_residual(const Values& y, double residual_times, double product_times = 1) const {
    Values sum = residual();
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] = residual_times * sum[i] + product_times * y[i];
    }
    return sum;
  }
  /// x summed over the ranks, times a rank's columns of W: where all have as many columns.
  Values product_of_summed_x(int rank) const {
    const int64_t width = I / ranks;
    const Values a = x(), b = columns(weight(), rank);
    Values y(T * O);
    for (int64_t i = 0; i < T * O; ++i) {
      for (int64_t c = 0; c < I; ++c) y[i] += a[i / O * I + c] * b[i % O * width + c % width];
    }
    return y;
  }
};

Outcome run(const Answer& answer, const Layer& layer) {
  return run_ranks(layer.ranks, [&](const Communicator& tp) {
    const int64_t width = algorithms::slice(layer.I, layer.ranks, tp.rank()).count;
    const auto tensor = [](const Values& values, const Shape& shape) {
      return Tensor::from_host(values, shape, DType::f64);
    };
    const Tensor x = tensor(layer.columns(layer.x(), tp.rank()), {layer.T, width});
    const Tensor weight = tensor(layer.columns(layer.weight(), tp.rank()), {layer.O, width});
    const Tensor residual = tensor(layer.residual(), {layer.T, layer.O});
    return answer.row_parallel_forward(tp, x, weight, residual).items();
  });
}

std::vector<Suspect> suspects(const Layer& layer) {
  std::vector<Values> partial, bare_partial, summed_x, on_rank_0;
  const Values whole = layer.product(-1);
  for (int rank = 0; rank < layer.ranks; ++rank) {
    bare_partial.push_back(layer.product(rank));
    partial.push_back(layer.with_residual(bare_partial.back(), 1));
    on_rank_0.push_back(layer.with_residual(whole, rank == 0));
    if (layer.I % layer.ranks == 0) {
      summed_x.push_back(layer.with_residual(layer.product_of_summed_x(rank), 1));
    }
  }
  std::vector<Values> partial_0 = bare_partial;  // the residual on rank 0
  partial_0[0] = partial[0];
  const auto all = [&](const Values& values) { return std::vector(layer.ranks, values); };
  const std::string no_sum =
      "every rank returned its own partial product: the sum over the group is missing";
  const std::string mean =
      "this is the mean of the terms: they are added up, and divided by nothing";
  const double t = layer.ranks;
  return {{no_sum, partial},
          {no_sum, bare_partial},
          {no_sum, partial_0},
          {"the residual is missing: y is x Wᵀ alone", all(whole)},
          {"the residual is in the sum once for every rank: all have it, so it enters one term, or "
           "follows the sum",
           all(layer.with_residual(whole, t))},
          {"only rank 0 has added the residual: the others return x Wᵀ alone", on_rank_0},
          {mean, all(layer.with_residual(whole, 1, 1 / t))},
          {mean, all(layer.with_residual(whole, 1 / t, 1 / t))},
          {"x was summed over the ranks before the product: its columns on two ranks are different "
           "channels",
           summed_x}};
}

void judge_one(const Answer& answer, const Layer& layer) {
  const Outcome got = run(answer, layer);
  expect_values(layer.text(), "y", got,
                std::vector(layer.ranks, layer.with_residual(layer.product(-1), 1)),
                suspects(layer), "y is not the residual and the whole product");
  const int64_t t = layer.ranks, T = layer.T, I = layer.I, O = layer.O;
  if (T * O % t != 0) return;  // which ranks send the longer parts is the library's choice
  const auto each = [&](int64_t values) {
    return std::vector<int64_t>(t, values / t * bytes_of(DType::f64));
  };
  expect_traffic(layer.text(), got, each(2 * (t - 1) * T * O),
                 {{"the values are right, but every rank gathered x and W whole: send the terms' "
                   "sum, and no weight",
                   each((t - 1) * (T * I + O * I))},
                  {"the values are right, but every rank gathered the terms of all ranks: an "
                   "all-reduce sends 2 (t-1)/t of y",
                   each((t - 1) * t * T * O)},
                  {"the values are right, but the sum travels twice", each(4 * (t - 1) * T * O)}});
}

}  // namespace

void judge(const Answer& answer) {
  judge_one(answer, {3, 6, 9, 4});
  judge_one(answer, {4, 4, 16, 8});
  judge_one(answer, {2, 3, 7, 5});  // ranks with more columns than others, and an odd sum
  judge_one(answer, {1, 2, 5, 3});
}

Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed);
  const Layer layer = {1 + static_cast<int>(seed % 4), 1 + value % 5, 4 + value % 7, 1 + value % 6};
  Values all;
  for (const Values& values : run(answer, layer).values) {
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

}  // namespace usp::judging
