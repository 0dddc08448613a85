#include "tensor/ops.h"
#include "testing.h"

/// A NaN or an infinity in any input must reach the output, and through it the gradient norm.
namespace usp::test {
namespace {

bool all_finite(const Tensor& tensor) {
  for (double value : tensor.items()) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

/// `run(inputs...)` returns its outputs' one tensor. Puts each of NaN, inf and -inf into a random
/// element of each input in turn and demands that the output is no longer finite.
void check_reaches(const std::vector<Tensor>& inputs, const std::function<Tensor()>& run,
                   std::string_view what) {
  Random random(inputs[0].numel());
  REQUIRE(all_finite(run()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Values clean = inputs[i].items();
    for (double bad : {kNaN, kInf, -kInf}) {
      INFO(what << ": input " << i << ", " << name(inputs[i].dtype()) << ", " << bad);
      Values values = clean;
      values[random.integer(0, std::ssize(values) - 1)] = bad;
      Tensor input = inputs[i];
      input.assign(values);
      REQUIRE(!all_finite(run()));
      input.assign(clean);
    }
  }
}

TEST_CASE("a NaN or an infinity passes through the elementwise operations") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(1);
    const Tensor a = random.tensor({4, 180}, dtype), b = random.tensor({4, 180}, dtype);
    const Tensor y = Tensor::empty({4, 180}, dtype), half = Tensor::empty({4, 90}, dtype);
    const Tensor narrow = random.tensor({4, 90}, dtype);
    const auto returning = [](const Tensor& result, const auto& run) {
      return [=] {
        run();
        return result;
      };
    };
    check_reaches({a, b}, returning(y, [=] { ops::add(y, a, b); }), "add");
    check_reaches({a}, returning(y, [=] { ops::copy(y, a); }), "copy");
    check_reaches({a}, returning(half, [=] { ops::swiglu_forward(half, a); }), "swiglu_forward");
    check_reaches({narrow, a}, returning(y, [=] { ops::swiglu_backward(y, narrow, a); }),
                  "swiglu_backward");
    const Tensor cos = random.tensor({5, 4}, accumulate_dtype(dtype));
    const Tensor x = random.tensor({1, 5, 2, 8}, dtype), rotated = Tensor::empty(x.shape(), dtype);
    check_reaches({x, cos},
                  returning(rotated,
                            [=] {
                              ops::copy(rotated, x);
                              ops::rope(rotated, cos, cos, Positions(0, 5), false);
                            }),
                  "rope");
    ops::fill(y, kInf);
    REQUIRE(!all_finite(y));
  }
}

TEST_CASE("a NaN or an infinity passes through matmul") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(2);
    const Tensor a = random.tensor({7, 19}, dtype), b = random.tensor({19, 11}, dtype);
    const Tensor start = random.tensor({7, 11}, dtype), c = Tensor::empty({7, 11}, dtype);
    check_reaches(
        {a, b, start},
        [&] {
          ops::copy(c, start);
          ops::matmul(c, a, b, /*accumulate=*/true);
          return c;
        },
        "matmul");
  }
}

TEST_CASE("a NaN or an infinity passes through the embedding and the norm") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(3);
    const DType acc = accumulate_dtype(dtype);
    const Tensor x = random.tensor({6, 100}, dtype), dy = random.tensor({6, 100}, dtype);
    const Tensor weight = random.tensor({100}, dtype), y = Tensor::empty({6, 100}, dtype);
    const Tensor rstd = Tensor::empty({6}, acc), dweight = Tensor::empty({100}, acc);
    const std::vector<int32_t> every_row = {3, 1, 0, 5, 4, 2};
    const Tensor tokens = Tensor::from_host(every_row, {6});
    const Tensor dtable = Tensor::empty({6, 100}, acc);
    const auto embed = [&] {
      ops::embedding_forward(y, x, tokens);
      return y;
    };
    check_reaches({x}, embed, "embedding_forward");
    const auto embed_backward = [&] {
      ops::embedding_backward(dtable, dy, tokens, 0, false);
      return dtable;
    };
    check_reaches({dy}, embed_backward, "embedding_backward");

    ops::rmsnorm_forward(y, rstd, x, weight, 1e-5);
    const auto backward_input = [&] {
      ops::rmsnorm_backward_input(y, dy, x, weight, rstd, dy);
      return y;
    };
    check_reaches({dy, x, weight, rstd}, backward_input, "rmsnorm_backward_input");
    const auto backward_weight = [&] {
      ops::rmsnorm_backward_weight(dweight, dy, x, rstd, false);
      return dweight;
    };
    check_reaches({dy, x, rstd}, backward_weight, "rmsnorm_backward_weight");
    const auto forward = [&] {
      ops::rmsnorm_forward(y, rstd, x, weight, 1e-5);
      return y;
    };
    check_reaches({x, weight}, forward, "rmsnorm_forward");
  }
}

TEST_CASE("a NaN or an infinity passes through attention, naive and blockwise") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      Random random(4);
      const DType acc = accumulate_dtype(dtype);
      // One position sees all keys, so that every element of k and v counts.
      const Positions queries(160, 1), keys(0, 150);
      const Tensor q = random.tensor({1, 1, 2, 4}, dtype), k = random.tensor({1, 150, 1, 4}, dtype);
      const Tensor v = random.tensor({1, 150, 1, 4}, dtype), dout = random.tensor(q.shape(), dtype);
      const Tensor out = Tensor::empty(q.shape(), dtype), lse = Tensor::empty({1, 2, 1}, acc);
      const Tensor probs = naive ? Tensor::empty({1, 2, 1, 150}, dtype) : Tensor();
      const Tensor gradients = Tensor::empty({1, 1 + 150, 2, 4}, acc);
      const auto forward = [&] {
        ops::attention_forward(out, lse, probs, q, k, v, 0.5, queries, keys);
        return out;
      };
      const auto backward = [&] {
        forward();
        const Tensor delta = Tensor::empty(lse.shape(), acc);
        ops::attention_delta(delta, dout, out);
        const Tensor dkv = gradients.narrow(1, 1, 150);
        ops::attention_backward(gradients.narrow(1, 0, 1), dkv.narrow(2, 0, 1), dkv.narrow(2, 1, 1),
                                dout, probs, q, k, v, lse, delta, 0.5, queries, keys,
                                /*accumulate=*/false);
        return gradients;
      };
      INFO((naive ? "naive" : "blockwise"));
      check_reaches({v}, forward, "attention_forward");
      check_reaches({q, k, v, dout}, backward, "attention_backward");
      // A score of -inf is a key with probability 0, so only NaN must reach the output from here.
      for (const Tensor& input : {q, k}) {
        Tensor poked = input;
        Values values = poked.items();
        values[3] = kNaN;
        const Values clean = poked.items();
        poked.assign(values);
        REQUIRE(!all_finite(forward()));
        poked.assign(clean);
      }
    }
  }
}

TEST_CASE("a NaN or an infinity passes through merged attention") {
  const OnDevice cpu;
  for (DType dtype : {DType::f64, DType::f32}) {
    Random random(7);
    const Tensor x = random.tensor({1, 5, 2, 40}, dtype), y = random.tensor(x.shape(), dtype);
    const Tensor x_lse = random.tensor({1, 2, 5}, dtype), y_lse = random.tensor({1, 2, 5}, dtype);
    const Tensor out = Tensor::empty(x.shape(), dtype), lse = Tensor::empty(x_lse.shape(), dtype);
    const auto merge = [&] {
      ops::copy(out, x);
      ops::copy(lse, x_lse);
      ops::attention_merge(out, lse, y, y_lse);
      return out;
    };
    check_reaches({x, y}, merge, "attention_merge");
    for (double bad : {kNaN, kInf}) {  // -inf is a row that saw no key
      for (Tensor poked : {x_lse, y_lse}) {
        const Values clean = poked.items();
        Values values = clean;
        values[3] = bad;
        poked.assign(values);
        REQUIRE(!all_finite(merge()));
        REQUIRE(!all_finite(lse));
        poked.assign(clean);
      }
    }
  }
}

TEST_CASE("a NaN or an infinity passes through the loss and its gradient") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(5);
    const DType acc = accumulate_dtype(dtype);
    const Tensor logits = random.tensor({5, 133}, dtype), targets = random.token_tensor(5, 133);
    const Tensor row_max = Tensor::empty({5}, acc), row_sum = Tensor::empty({5}, acc);
    const Tensor target_logit = Tensor::empty({5}, acc), lse = Tensor::empty({5}, acc);
    const Tensor loss = Tensor::empty({1}, DType::f64), dlogits = Tensor::empty({5, 133}, dtype);
    for (double bad : {kNaN, kInf}) {  // a logit of -inf is a token with probability 0
      for (int64_t index : {0, 140, 5 * 133 - 1}) {
        CAPTURE(name(dtype), bad, index);
        Values values = logits.items();
        values[index] = bad;
        const Tensor poked = Tensor::from_host(values, logits.shape(), dtype);
        ops::fill(loss, 0);
        ops::cross_entropy_forward(row_max, row_sum, target_logit, poked, targets);
        ops::cross_entropy_loss(loss, lse, row_max, row_sum, target_logit, 0.5);
        REQUIRE(!all_finite(loss));
        ops::cross_entropy_backward(dlogits, poked, targets, lse, 0, 0.5);
        REQUIRE(!all_finite(dlogits));
      }
    }
  }
}

TEST_CASE("a NaN or an infinity in a gradient reaches the norm") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(6);
    const Tensor gradient = random.tensor({9000}, dtype), sums = Tensor::zeros({3}, DType::f64);
    const Tensor coefficient = Tensor::empty({1}, DType::f64);
    const Tensor norm = Tensor::empty({1}, DType::f64);
    const auto run = [&] {
      ops::sum_squares(sums.narrow(0, 1, 1), gradient);
      ops::clip_coefficient(coefficient, norm, sums, 1.0);
      return norm;
    };
    check_reaches({gradient}, run, "gradient norm");
  }
}

}  // namespace
}  // namespace usp::test
