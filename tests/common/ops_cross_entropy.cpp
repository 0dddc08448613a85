#include <array>

#include "tensor/fused_ops.h"
#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// Cross entropy of T rows over V logits, on the whole vocabulary.
struct CrossEntropy {
  CrossEntropy(Random& random, int64_t T, int64_t V, DType dtype, double spread = 1)
      : logits(random.tensor({T, V}, dtype, spread)),
        targets(random.token_tensor(T, V)),
        scale(0.37),
        loss(Tensor::zeros({1}, DType::f64)),
        row_max(Tensor::empty({T}, accumulate_dtype(dtype))),
        row_sum(Tensor::empty({T}, accumulate_dtype(dtype))),
        target_logit(Tensor::empty({T}, accumulate_dtype(dtype))),
        lse(Tensor::empty({T}, accumulate_dtype(dtype))) {}

  double forward() {
    ops::fill(loss, 0);
    ops::cross_entropy_forward(row_max, row_sum, target_logit, logits, targets);
    ops::cross_entropy_loss(loss, lse, row_max, row_sum, target_logit, scale);
    return loss.item();
  }
  Tensor backward() const {
    const Tensor dlogits = Tensor::empty(logits.shape(), logits.dtype());
    ops::cross_entropy_backward(dlogits, logits, targets, lse, 0, scale);
    return dlogits;
  }

  Tensor logits, targets;
  double scale;
  Tensor loss, row_max, row_sum, target_logit, lse;
};

TEST_CASE("cross entropy is the scaled sum of -log softmax at the targets") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kFloatDTypes) {
    for (int64_t V : {2, 13, 301}) {
      CAPTURE(name(dtype), V);
      const int64_t T = 9;
      CrossEntropy entropy(random, T, V, dtype, 4);
      const Values x = entropy.logits.items();
      double loss = 0;
      Values lse, gradient;
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (int64_t v = 0; v < V; ++v) sum += std::exp(x[t * V + v]);
        const auto target = static_cast<int64_t>(entropy.targets.item(t));
        lse.push_back(std::log(sum));
        loss += entropy.scale * (lse[t] - x[t * V + target]);
        for (int64_t v = 0; v < V; ++v) {
          gradient.push_back(entropy.scale * (std::exp(x[t * V + v]) / sum - (v == target)));
        }
      }
      const double tolerance = tolerance_of(accumulate_dtype(dtype));
      check_close(Values{entropy.forward()}, Values{loss}, tolerance, "loss");
      check_close(entropy.lse, lse, tolerance, "lse");
      check_close(entropy.backward(), gradient, tolerance_of(dtype), "dlogits");
    }
  }
}

TEST_CASE("cross entropy reports each row's maximum, sum of exponentials and target logit") {
  const OnDevice cpu;
  const Values logits = {1, 5, 2, -1, -1, -1};
  const std::vector<int32_t> targets = {2, 0};
  const Tensor row_max = Tensor::empty({2}, DType::f64), row_sum = Tensor::empty({2}, DType::f64);
  const Tensor target_logit = Tensor::empty({2}, DType::f64);
  ops::cross_entropy_forward(row_max, row_sum, target_logit,
                             Tensor::from_host(logits, {2, 3}, DType::f64),
                             Tensor::from_host(targets, {2}));
  check_close(row_max, Values{5, -1}, 0);
  check_close(row_sum, Values{std::exp(-4) + 1 + std::exp(-3), 3}, 1e-15);
  check_close(target_logit, Values{2, -1}, 0);
}

TEST_CASE("cross entropy's gradient agrees with finite differences and may overwrite the logits") {
  const OnDevice cpu;
  for (uint64_t seed : {2, 3, 4}) {
    Random random(seed);
    CrossEntropy entropy(random, random.integer(1, 6), random.integer(2, 20), DType::f64);
    entropy.forward();
    const Tensor dlogits = entropy.backward();
    check_gradient(
        dlogits, entropy.logits, [&] { return entropy.forward(); }, "dlogits");
    entropy.forward();
    const Tensor in_place = clone(entropy.logits);
    ops::cross_entropy_backward(in_place, in_place, entropy.targets, entropy.lse, 0, entropy.scale);
    REQUIRE(same_bits(in_place, dlogits));
  }
}

TEST_CASE("the loss is added to what is there") {
  const OnDevice cpu;
  Random random(5);
  CrossEntropy entropy(random, 4, 7, DType::f64);
  const double loss = entropy.forward();
  ops::cross_entropy_loss(entropy.loss, entropy.lse, entropy.row_max, entropy.row_sum,
                          entropy.target_logit, 2 * entropy.scale);
  check_close(Values{entropy.loss.item()}, Values{3 * loss}, 1e-14);
}

TEST_CASE("cross entropy stays exact where the exponentials of the logits would overflow") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Random random(6);
    CrossEntropy entropy(random, 5, 30, dtype);
    // 1024 more for every logit: softmax does not notice. Whole multiples of 8, so that even bf16
    // holds the sums exactly.
    Values values = entropy.logits.items();
    for (double& value : values) value = std::round(value) * 8;
    entropy.logits.assign(values);
    const double loss = entropy.forward();
    const Tensor dlogits = entropy.backward();
    for (double& value : values) value += 1024;
    entropy.logits.assign(values);
    // lse lies between 1024 and 2048, where f32 rounds by up to 2^-14 = 6e-5: that much of dlogits.
    const double tolerance = dtype == DType::f64 ? 1e-12 : 4 * 0x1p-14;
    check_close(Values{entropy.forward()}, Values{loss}, tolerance, "loss");
    check_close(entropy.backward(), dlogits, std::max(tolerance, tolerance_of(dtype)), "dlogits");
  }
}

TEST_CASE("cross entropy on shards of the vocabulary combines to the whole") {
  const OnDevice cpu;
  Random random(7);
  const int64_t T = 10, V = 23;
  CrossEntropy whole(random, T, V, DType::f64, 3);
  const double loss = whole.forward();
  const Tensor dlogits = whole.backward();

  const std::array<int64_t, 4> bounds = {0, 1, 14, V};
  Values row_max(T, -kInf), target_logit(T);
  std::vector<Tensor> maxima, sums;  // of each shard
  const auto shard = [&](int i) {    // dense, as a rank's own logits are
    return whole.logits.narrow(1, bounds[i], bounds[i + 1] - bounds[i]).to_contiguous();
  };
  for (int i = 0; i < 3; ++i) {
    const Tensor max = Tensor::empty({T}, DType::f64), sum = Tensor::empty({T}, DType::f64);
    const Tensor target = Tensor::empty({T}, DType::f64);
    ops::cross_entropy_forward(max, sum, target, shard(i), whole.targets, bounds[i]);
    for (int64_t t = 0; t < T; ++t) {
      row_max[t] = std::max(row_max[t], max.item(t));
      target_logit[t] += target.item(t);
    }
    maxima.push_back(max);
    sums.push_back(sum);
  }
  const auto tensor = [&](const Values& values) {
    return Tensor::from_host(values, {T}, DType::f64);
  };
  const Tensor row_sum = Tensor::zeros({T}, DType::f64);
  for (int i = 0; i < 3; ++i) {
    ops::cross_entropy_rescale(sums[i], maxima[i], tensor(row_max));
    ops::accumulate(row_sum, sums[i]);
  }
  const Tensor sum = Tensor::zeros({1}, DType::f64), lse = Tensor::empty({T}, DType::f64);
  ops::cross_entropy_loss(sum, lse, tensor(row_max), row_sum, tensor(target_logit), whole.scale);
  check_close(Values{sum.item()}, Values{loss}, 1e-14, "loss");
  for (int i = 0; i < 3; ++i) {
    const Tensor logits = shard(i), part = Tensor::empty(logits.shape(), DType::f64);
    ops::cross_entropy_backward(part, logits, whole.targets, lse, bounds[i], whole.scale);
    check_close(part, dlogits.narrow(1, bounds[i], bounds[i + 1] - bounds[i]), 1e-14, "dlogits");
  }
}

TEST_CASE("a shard whose logits are all impossible adds nothing to the sums of the others") {
  const OnDevice cpu;
  for (DType dtype : {DType::f32, DType::f64}) {
    const Tensor sum = Tensor::from_host(Values{0, 2}, {2}, dtype);
    ops::cross_entropy_rescale(sum, Tensor::from_host(Values{-kInf, 1}, {2}, dtype),
                               Tensor::from_host(Values{-kInf, 3}, {2}, dtype));
    check_close(sum, Values{0, 2 * std::exp(-2)}, tolerance_of(dtype));
  }
}

/// Head and loss of T tokens on the shard [begin, end) of a vocabulary, as a whole or by chunks.
struct LossOfShard {
  LossOfShard(const Tensor& x, const Tensor& table, const Tensor& targets, int64_t begin,
              int64_t end)
      : x(x),
        weight(table.narrow(0, begin, end - begin)),
        targets(targets),
        begin(begin),
        row_max(Tensor::empty({x.size(0)}, acc())),
        row_sum(Tensor::empty({x.size(0)}, acc())),
        target_logit(Tensor::empty({x.size(0)}, acc())) {}

  DType acc() const { return accumulate_dtype(x.dtype()); }

  void forward_as_a_whole() {
    logits = Tensor::empty({x.size(0), weight.size(0)}, x.dtype());
    ops::linear_forward(logits, x, weight);
    ops::cross_entropy_forward(row_max, row_sum, target_logit, logits, targets, begin);
  }
  void forward_by_chunks(int64_t rows) {
    ops::linear_cross_entropy_forward(row_max, row_sum, target_logit, x, weight, targets, begin,
                                      rows);
  }
  void backward_as_a_whole(const Tensor& dx, const Tensor& dweight, const Tensor& lse,
                           bool accumulate) {
    ops::cross_entropy_backward(logits, logits, targets, lse, begin, kScale);
    ops::linear_backward_input(dx, logits, weight);
    ops::linear_backward_weight(dweight, logits, x, accumulate);
  }
  void backward_by_chunks(const Tensor& dx, const Tensor& dweight, const Tensor& lse, int64_t rows,
                          bool accumulate) const {
    ops::linear_cross_entropy_backward(dx, dweight, x, weight, targets, lse, begin, kScale, rows,
                                       accumulate);
  }
  /// The weight's gradient put off.
  void backward_in_two(const Tensor& dx, const Tensor& dweight, const Tensor& lse,
                       bool accumulate) const {
    const Tensor dlogits = Tensor::empty({x.size(0), weight.size(0)}, x.dtype());
    ops::linear_cross_entropy_backward_input(dx, dlogits, x, weight, targets, lse, begin, kScale);
    ops::linear_backward_weight(dweight, dlogits, x, accumulate);
  }

  static constexpr double kScale = 0.37;
  Tensor x, weight, targets, logits;
  int64_t begin;
  Tensor row_max, row_sum, target_logit;
};

TEST_CASE("linear and cross entropy by chunks are those of all logits at once") {
  const OnDevice cpu;
  Random random(8);
  const int64_t T = 11, H = 6, V = 29;
  for (DType dtype : kFloatDTypes) {
    const Tensor x = random.tensor({T, H}, dtype), table = random.tensor({V, H}, dtype, 0.3);
    const Tensor targets = random.token_tensor(T, V);
    // A logit of few rows may be rounded to the other neighbor in bf16.
    const double tolerance = dtype == DType::bf16 ? 1e-2 : tolerance_of(dtype);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, V}, {0, 13}, {13, V}}) {
      LossOfShard whole(x, table, targets, begin, end);
      whole.forward_as_a_whole();
      const Tensor lse = Tensor::empty({T}, whole.acc()), loss = Tensor::zeros({1}, DType::f64);
      ops::cross_entropy_loss(loss, lse, whole.row_max, whole.row_sum, whole.target_logit, 1);
      const Tensor before = random.tensor(whole.weight.shape(), whole.acc());
      for (const bool accumulate : {false, true}) {
        whole.forward_as_a_whole();  // backward has overwritten the logits
        const Tensor dx = Tensor::empty(x.shape(), dtype), dweight = clone(before);
        whole.backward_as_a_whole(dx, dweight, lse, accumulate);
        for (int64_t rows : {1, 4, 11, 50}) {
          CAPTURE(name(dtype), begin, end, accumulate, rows);
          LossOfShard chunks(x, table, targets, begin, end);
          chunks.forward_by_chunks(rows);
          check_close(chunks.row_max, whole.row_max, tolerance, "row_max");
          check_close(chunks.row_sum, whole.row_sum, tolerance, "row_sum");
          check_close(chunks.target_logit, whole.target_logit, tolerance, "target_logit");
          const Tensor own_dx = Tensor::empty(x.shape(), dtype), own_dweight = clone(before);
          chunks.backward_by_chunks(own_dx, own_dweight, lse, rows, accumulate);
          check_close(own_dx, dx, tolerance, "dx");
          check_close(own_dweight, dweight, tolerance, "dweight");
          const Tensor later = clone(before);
          chunks.backward_in_two(own_dx, later, lse, accumulate);
          check_close(own_dx, dx, tolerance, "dx, before dweight");
          check_close(later, dweight, tolerance, "dweight, put off");
        }
      }
    }
  }
}

TEST_CASE("linear and cross entropy by chunks never hold more rows of the logits than they say") {
  OnDevice cpu;
  Random random(9);
  const int64_t T = 64, H = 2, V = 1000, rows = 8;
  const Tensor x = random.tensor({T, H}), table = random.tensor({V, H});
  LossOfShard loss(x, table, random.token_tensor(T, V), 0, V);
  const Tensor dx = clone(x), dweight = clone(table);
  const auto more_than_before = [&](const auto& run) {
    constexpr Category kLogits = Category::activations;  // a product's workspace is its own
    cpu.allocator().reset_peaks();
    const int64_t before = cpu.allocator().live_bytes(kLogits);
    run();
    return cpu.allocator().peak_bytes(kLogits) - before;
  };
  const int64_t of_chunk = rows * V * bytes_of(DType::f64);
  CHECK(more_than_before([&] { loss.forward_by_chunks(rows); }) == of_chunk);
  const Tensor lse = loss.row_max;  // any number will do
  CHECK(more_than_before([&] { loss.backward_by_chunks(dx, dweight, lse, rows, false); }) ==
        of_chunk);
}

}  // namespace
}  // namespace usp::test
