#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("an embedding looks up the row of each token") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Tensor table = random.tensor({11, 5}, dtype), tokens = random.token_tensor(30, 11);
    const Tensor y = Tensor::empty({30, 5}, dtype);
    ops::embedding_forward(y, table, tokens);
    for (int64_t t = 0; t < 30; ++t) {
      const auto row = static_cast<int64_t>(tokens.item(t));
      REQUIRE(same_bits(y.narrow(0, t, 1), table.narrow(0, row, 1)));
    }
  }
}

TEST_CASE("an embedding's gradient sums the rows of every token, over the old one or onto it") {
  const OnDevice cpu;
  Random random(2);
  const int64_t V = 7, H = 130, T = 200;  // several blocks of channels, many tokens a row
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const DType acc = accumulate_dtype(dtype);
    const Tensor dy = random.tensor({T, H}, dtype), tokens = random.token_tensor(T, V);
    const Tensor before = random.tensor({V, H}, acc);
    Values sums(V * H);
    for (int64_t t = 0; t < T; ++t) {
      const auto row = static_cast<int64_t>(tokens.item(t));
      for (int64_t h = 0; h < H; ++h) sums[row * H + h] += dy.item(t * H + h);
    }
    const Tensor dtable = clone(before);
    ops::embedding_backward(dtable, dy, tokens, 0, /*accumulate=*/false);
    check_close(dtable, sums, tolerance_of(acc), "overwritten");
    const Tensor added = clone(before);
    ops::embedding_backward(added, dy, tokens, 0, /*accumulate=*/true);
    for (int64_t i = 0; i < V * H; ++i) sums[i] += before.item(i);
    check_close(added, sums, tolerance_of(acc), "added");
  }
}

TEST_CASE("an embedding's gradient agrees with finite differences") {
  const OnDevice cpu;
  for (uint64_t seed : {3, 4, 5}) {
    Random random(seed);
    const int64_t V = random.integer(1, 9), H = random.integer(1, 6), T = random.integer(1, 12);
    const Tensor table = random.tensor({V, H}), dy = random.tensor({T, H});
    const Tensor tokens = random.token_tensor(T, V);
    const Tensor dtable = Tensor::empty({V, H}, DType::f64);
    ops::embedding_backward(dtable, dy, tokens, 0, false);
    const auto loss = [&] {
      const Tensor y = Tensor::empty({T, H}, DType::f64);
      ops::embedding_forward(y, table, tokens);
      return dot(y, dy);
    };
    check_gradient(dtable, table, loss, "dtable");
  }
}

TEST_CASE("embedding shards of the vocabulary add up to the whole") {
  const OnDevice cpu;
  Random random(6);
  const int64_t V = 29, H = 6, T = 40;
  const Tensor table = random.tensor({V, H}), dy = random.tensor({T, H});
  std::vector<int32_t> ids = random.tokens(T, V);
  ids[0] = 17;  // the first of a shard
  const Tensor tokens = Tensor::from_host(ids, {T});
  const Tensor whole = Tensor::empty({T, H}, DType::f64);
  const Tensor dtable = Tensor::empty({V, H}, DType::f64);
  ops::embedding_forward(whole, table, tokens);
  ops::embedding_backward(dtable, dy, tokens, 0, false);

  const Tensor sum = Tensor::zeros({T, H}, DType::f64);
  const Tensor dshards = Tensor::empty({V, H}, DType::f64);
  // Uneven, one of them empty. With 16 rows and 40 tokens the workspace ends with a block of
  // memory: who takes the first token of the next shard for one of this shard's leaves it.
  const int64_t bounds[] = {0, 1, 17, 17, V};
  for (int shard = 0; shard < 4; ++shard) {
    const int64_t begin = bounds[shard], length = bounds[shard + 1] - begin;
    const Tensor part = Tensor::empty({T, H}, DType::f64);
    ops::embedding_forward(part, table.narrow(0, begin, length), tokens, begin);
    ops::add(sum, sum, part);
    ops::embedding_backward(dshards.narrow(0, begin, length), dy, tokens, begin, false);
  }
  REQUIRE(same_bits(sum, whole));
  REQUIRE(same_bits(dshards, dtable));
}

}  // namespace
}  // namespace usp::test
