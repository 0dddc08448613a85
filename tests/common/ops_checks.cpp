#include "tensor/expert_ops.h"
#include "tensor/fused_ops.h"
#include "tensor/ops.h"
#include "tensor/recorder.h"
#include "testing.h"

namespace usp::test {
namespace {

Tensor f32(const Shape& shape) { return Tensor::zeros(shape, DType::f32); }
Tensor f64(const Shape& shape) { return Tensor::zeros(shape, DType::f64); }
Tensor i32(int64_t count) { return Tensor::zeros({count}, DType::i32); }

TEST_CASE("an operation refuses a wrong shape and names the operand, its shape and the right one") {
  const OnDevice cpu;
  const auto refuses = [](const std::function<void()>& call, std::vector<std::string> parts) {
    check_throws<Error>(call, parts);
  };
  refuses([] { ops::add(f32({2, 3}), f32({2, 3}), f32({3, 2})); }, {"add: b", "[3, 2]", "[2, 3]"});
  refuses([] { ops::copy(f32({4}), f32({5})); }, {"copy", "[4]", "[5]"});
  refuses([] { ops::matmul(f32({2, 2}), f32({2, 3}), f32({4, 2})); }, {"[2, 3]", "[4, 2]"});
  refuses([] { ops::matmul(f32({2, 5}), f32({2, 3}), f32({3, 2})); }, {"c", "[2, 5]", "[2, 2]"});
  refuses([] { ops::linear_forward(f32({2, 4}), f32({2, 3}), f32({4, 5})); }, {"[2, 3]"});
  refuses([] { ops::swiglu_forward(f32({2, 4}), f32({2, 4})); }, {"gate_up", "[2, 4]", "[2, 8]"});
  refuses([] { ops::embedding_forward(f32({3, 4}), f32({9, 4}), i32(2)); }, {"tokens", "[3]"});
  const Tensor x = f32({3, 4}), row = f32({4});
  refuses([&] { ops::rmsnorm_forward(x, row, x, row, 0); }, {"rstd", "[4]", "[3]"});
  refuses([] { ops::sum_squares(f64({2}), f32({3})); }, {"sum", "[2]", "[1]"});
  refuses([] { ops::sum_squares({}, f32({3})); }, {"sum", "undefined", "[1]"});
  const Tensor rows = f32({3}), head = f32({7, 4});
  const auto loss = [&](const Tensor& of_row, int64_t targets, int64_t at_once) {
    ops::linear_cross_entropy_forward(rows, rows, of_row, x, head, i32(targets), 0, at_once);
  };
  refuses([&] { loss(rows, 5, 2); }, {"linear_cross_entropy", "5 rows", "3 of x"});
  refuses([&] { loss(row, 3, 2); }, {"linear_cross_entropy", "4 rows", "3 of x"});
  refuses([&] { loss(rows, 3, 0); }, {"linear_cross_entropy", "0 rows at once"});
  const auto backward = [&](const Tensor& dx, const Tensor& lse) {
    ops::linear_cross_entropy_backward(dx, head, x, head, i32(3), lse, 0, 1, 2, false);
  };
  refuses([&] { backward(f32({4, 4}), rows); }, {"linear_cross_entropy", "4 rows", "3 of x"});
  refuses([&] { backward(x, row); }, {"linear_cross_entropy", "4 rows", "3 of x"});
  const Tensor state = f32({5}), one = f64({1});
  refuses([&] { ops::adamw(state, state, state, f32({4}), state, one, {}); }, {"adamw: v"});
}

TEST_CASE("an operation refuses a wrong dtype and names both") {
  const OnDevice cpu;
  const Tensor bf = Tensor::zeros({2, 3}, DType::bf16);
  check_throws<Error>([&] { ops::add(f32({2, 3}), f32({2, 3}), bf); }, {"add: b", "bf16", "f32"});
  check_throws<Error>([&] { ops::matmul(bf, f32({2, 3}), f32({3, 3})); }, {"f32", "bf16"});
  check_throws<Error>([&] { ops::matmul(f64({2, 2}), bf, bf.transposed()); }, {"bf16", "f64"});
  const Tensor y = f32({2, 4}), table = f32({9, 4}), tokens = f32({2});
  check_throws<Error>([&] { ops::embedding_forward(y, table, tokens); }, {"tokens", "f32", "i32"});
  check_throws<Error>([&] { ops::sum_squares(f32({1}), bf); }, {"sum", "f32", "f64"});
  check_throws<Error>([] { ops::add(i32(3), i32(3), i32(3)); }, {"i32"});
  const Tensor out = Tensor::zeros({1, 2, 3, 4}, DType::bf16), lse = f32({1, 3, 2});
  check_throws<Error>([&] { ops::attention_merge(out, lse, out, lse); }, {"out", "bf16", "f32"});
  check_throws<Error>([&] { ops::attention_rescale(out, lse, lse); }, {"[1, 3, 2]", "[1, 2, 3]"});
}

TEST_CASE("attention refuses heads and positions that do not fit") {
  const OnDevice cpu;
  const auto attend = [](int64_t heads, int64_t kv_heads, const Positions& queries,
                         const Positions& keys, const Shape& probs) {
    const Tensor q = f32({1, 4, heads, 8}), kv = f32({1, 6, kv_heads, 8});
    ops::attention_forward(q, f32({1, heads, 4}), f32(probs), q, kv, kv, 1, queries, keys);
  };
  const Positions four(0, 4), six(0, 6);
  attend(4, 2, four, six, {1, 4, 4, 6});
  check_throws<Error>([&] { attend(4, 3, four, six, {1, 4, 4, 6}); }, {"4 query heads", "3 kv"});
  check_throws<Error>([&] { attend(4, 2, six, six, {1, 4, 4, 6}); }, {"6 query", "4 queries"});
  check_throws<Error>([&] { attend(4, 2, four, four, {1, 4, 4, 6}); }, {"4 key", "6 keys"});
  check_throws<Error>([&] { attend(4, 2, four, six, {1, 4, 6, 4}); }, {"probs", "[1, 4, 4, 6]"});
  const Tensor q = f32({1, 4, 2, 8}), lse = f32({1, 2, 4});
  check_throws<Error>(
      [&] { ops::attention_forward(f64(q.shape()), lse, {}, q, q, q, 1, four, four); },
      {"attention_forward: out", "f64", "f32"});
  const Documents three({0, 0, 0}, {1, 3});
  check_throws<Error>([&] { ops::attention_forward(q, lse, {}, q, q, q, 1, four, four, three); },
                      {"documents", "[1, 3]", "[1, 4]"});
}

TEST_CASE("RoPE refuses odd channels and positions beyond its table") {
  const OnDevice cpu;
  const Tensor table = f32({5, 2}), even = f32({1, 2, 1, 4}), odd = f32({1, 2, 1, 3});
  const auto rope = [&](const Tensor& x, const Positions& positions) {
    return [&table, x, positions] { ops::rope(x, table, table, positions, false); };
  };
  rope(even, {3, 2})();
  check_throws<Error>(rope(odd, {0, 2}), {"rope", "[1, 2, 1, 3]"});
  check_throws<Error>(rope(even, {4, 2}), {"rope", "2 positions", "6", "table of 5"});
  check_throws<Error>(rope(even, {0, 3}), {"rope", "3 positions"});
}

TEST_CASE("matmul refuses an output whose rows are not contiguous") {
  const OnDevice cpu;
  const Tensor c = f32({3, 2}).transposed(), a = f32({2, 4}), b = f32({4, 3});
  check_throws<Error>([&] { ops::matmul(c, a, b); }, {"matmul", "rows of c"});
}

TEST_CASE("operations on strided tensors are refused where the kernel needs contiguous ones") {
  const OnDevice cpu;
  const Tensor strided = f32({4, 6}).narrow(1, 0, 3), dense = f32({4, 3});
  check_throws<Error>([&] { ops::fill(strided, 1); }, {"fill", "contiguous"});
  check_throws<Error>([&] { ops::add(dense, dense, strided); }, {"add: b", "contiguous"});
  check_throws<Error>([&] { ops::sum_squares(f64({1}), strided); }, {"sum_squares", "contiguous"});
}

TEST_CASE("the operations of a router refuse what does not fit") {
  const OnDevice cpu;
  const auto choices = [](int64_t T, int64_t k) { return Tensor::zeros({T, k}, DType::i32); };
  const auto refuses = [](const std::function<void()>& call, std::vector<std::string> parts) {
    check_throws<Error>(call, parts);
  };
  const Tensor scores = f32({4, 6}), gates = f32({4, 2}), bf = Tensor::zeros({4, 6}, DType::bf16);
  const auto choose = [&](int64_t k, const Tensor& bias, int64_t groups, int64_t allowed) {
    return [=] { ops::choose_experts(choices(4, k), scores, bias, groups, allowed); };
  };
  refuses([&] { ops::router_scores(bf, bf, {}); }, {"logits", "bf16", "f32 or f64"});
  refuses([&] { ops::router_scores(f32({4, 5}), scores, {}); }, {"scores", "[4, 5]", "[4, 6]"});
  refuses([&] { ops::router_scores_backward(scores, f64({4, 6}), scores, {}); }, {"dscores"});
  refuses(choose(2, f32({5}), 1, 1), {"bias", "[5]", "[6]"});
  refuses(choose(2, {}, 4, 1), {"4 groups must divide 6 experts", "1, 2, 3 or 6"});
  refuses(choose(2, {}, 3, 4), {"4 of 3 groups", "from 1 to 3"});
  refuses(choose(2, {}, 3, 0), {"0 of 3 groups"});
  refuses(choose(5, {}, 3, 2), {"5 choices of 6 experts in 2 of 3 groups", "from 1 to 4"});
  refuses(choose(0, {}, 1, 1), {"0 choices", "from 1 to 6"});
  refuses([&] { ops::choose_experts(choices(3, 2), scores, {}); }, {"choices", "[3, 2]", "[4, 2]"});
  refuses([&] { ops::choose_experts(gates, scores, {}); }, {"choices", "f32", "i32"});
  refuses([&] { ops::count_choices(choices(3, 6), choices(4, 2)); }, {"4 tokens", "3 runs"});
  refuses([&] { ops::count_choices(choices(0, 6), choices(4, 2)); }, {"0 runs"});
  refuses([&] { ops::count_choices(f32({1, 6}), choices(4, 2)); }, {"counts", "f32", "i32"});
  refuses([&] { ops::drop_choices(choices(4, 2), choices(3, 6), 1); }, {"before", "3 runs"});
  refuses([&] { ops::drop_choices(choices(4, 2), choices(2, 6), -1); }, {"-1 choices", "try 1"});
  refuses([&] { ops::gates_forward(f32({4, 3}), scores, choices(4, 2), true, 1); }, {"gates"});
  refuses(
      [&] {
        ops::gates_backward(scores, gates, f64({4, 2}), scores, choices(4, 2), true, 1);
      },
      {"gates", "f64", "f32"});
}

TEST_CASE("what balances the experts refuses what does not fit") {
  const OnDevice cpu;
  const auto refuses = [](const std::function<void()>& call, std::vector<std::string> parts) {
    check_throws<Error>(call, parts);
  };
  const Tensor loss = f64({1}), scores = f32({4, 6}), gates = f32({4, 2});
  refuses(
      [&] {
        ops::balance_loss_forward(loss, scores, f32({2, 5}), 1, true);
      },
      {"load", "[2, 6]"});
  refuses([&] { ops::balance_loss_backward(scores, scores, f32({3, 6}), 1, true); }, {"3 runs"});
  refuses([&] { ops::z_loss_forward(f32({1}), scores, 1); }, {"loss", "f32", "f64"});
  refuses([&] { ops::z_loss_backward(gates, scores, 1); }, {"dlogits", "[4, 2]"});
  refuses([&] { ops::router_entropy(loss, {}); }, {"scores", "tokens, experts"});
  refuses([&] { ops::balance_bias(f32({6}), f32({4}), 1); }, {"load", "[4]", "[6]"});
  refuses([&] { ops::balance_bias(i32(6), i32(6), 1); }, {"bias", "i32", "f32 or f64"});
}

TEST_CASE("the operations on rows of experts refuse what does not fit") {
  const OnDevice cpu;
  using Counts = std::vector<int64_t>;
  const auto refuses = [](const std::function<void()>& call, std::vector<std::string> parts) {
    check_throws<Error>(call, parts);
  };
  const Tensor slots = Tensor::zeros({4, 2}, DType::i32), x = f32({4, 3}), rows = f32({8, 3});
  const Tensor gates = f32({4, 2});
  refuses([&] { ops::assign_slots(slots, slots, Counts{5, 4}); }, {"add up to 9", "8 choices"});
  refuses([&] { ops::assign_slots(slots, slots, Counts{5, -1}); }, {"-1 choices"});
  refuses([&] { ops::assign_slots(slots, gates, Counts{8}); }, {"choices", "f32", "i32"});
  refuses([&] { ops::permute(f32({8, 2}), x, slots); }, {"permute", "[8, 2]", "[8, 3]"});
  refuses([&] { ops::permute(rows, f32({3, 3}), slots); }, {"slots", "[4, 2]", "[3, 2]"});
  refuses([&] { ops::permute(f64({8, 3}), x, slots); }, {"permute", "f64", "f32"});
  refuses([&] { ops::unpermute(x, rows, slots, f64({4, 2})); }, {"gates", "f64", "f32"});
  refuses([&] { ops::unpermute(x, rows, slots, f32({4, 1})); }, {"gates", "[4, 1]", "[4, 2]"});
  for (const bool fused : {true, false}) {
    Runtime::current().backend().fuse(fused);
    refuses([&] { ops::unpermute_onto(x, f32({3, 3}), rows, slots, {}); }, {"[3, 3]", "[4, 3]"});
    refuses([&] { ops::unpermute_onto(x, f64({4, 3}), rows, slots, {}); }, {"f64", "f32"});
  }
  refuses(
      [&] {
        ops::unpermute_backward(f32({7, 3}), gates, x, rows, slots, gates);
      },
      {"drows", "[7, 3]", "[8, 3]"});
  refuses([&] { ops::unpermute_backward(rows, {}, x, rows, slots, gates); }, {"dgates"});
  const Tensor weights = f32({2, 5, 3}), y = f32({8, 5});
  const auto forward = [&](const Tensor& out, const Tensor& in, const Counts& counts) {
    return [=] { ops::grouped_linear_forward(out, in, weights, counts); };
  };
  refuses(forward(y, rows, {5, 4}), {"add up to 9", "8 rows"});
  refuses(forward(y, rows, {9, -1}), {"an expert with -1 rows"});
  refuses(forward(y, rows, {3, 3, 2}), {"3 counts", "2 experts"});
  refuses(forward(f32({8, 3}), rows, {5, 3}), {"[8, 3]", "[8, 5]"});
  refuses(forward(y, f32({8, 5}), {5, 3}), {"[8, 5]", "[8, 3]"});
  refuses(forward(f64({8, 5}), f64({8, 3}), {5, 3}), {"weights", "f32", "f64"});
  refuses([&] { ops::grouped_linear_backward_input(rows, y, f32({5, 3}), Counts{8}); }, {"[5, 3]"});
  const Tensor wide = f64({2, 5, 3});
  refuses(
      [&] {
        ops::grouped_linear_backward_weight(wide, y, rows, Counts{5, 3}, false);
      },
      {"dweights", "f64", "f32"});
}

TEST_CASE("the experts' linear layers count an operation pair for each row, input and output") {
  OnDevice meta(Device::meta);
  const Tensor x = f32({7, 5}), weights = f32({2, 3, 5}), y = f32({7, 3});
  const std::vector<int64_t> counts = {7, 0};
  const int64_t once = 2 * 7 * 5 * 3;  // whatever the number of experts
  ops::grouped_linear_forward(y, x, weights, counts);
  REQUIRE(meta.runtime.flops() == once);
  ops::grouped_linear_backward_input(x, y, weights, counts);
  REQUIRE(meta.runtime.flops() == 2 * once);
  ops::grouped_linear_backward_weight(weights, y, x, counts, true);
  REQUIRE(meta.runtime.flops() == 3 * once);
}

/// Adds up calls and the bytes of their operands.
struct Moved : Recorder {
  void op(std::string_view, int64_t, int64_t of_op, std::span<const Tensor* const>, bool) override {
    ++calls;
    bytes += of_op;
  }
  int64_t post(const Posted&) override { return 0; }
  void wait(int64_t) override {}
  void begin_phase(std::string_view, int64_t, int64_t) override {}
  void end_phase() override {}

  int64_t calls = 0, bytes = 0;
};

TEST_CASE("a fused operation is one call, without the bytes between its parts") {
  OnDevice meta(Device::meta);
  const auto moved = [&](bool fused, const std::function<void()>& run) {
    Moved counted;
    meta.runtime.backend().fuse(fused);
    meta.runtime.tell(&counted);
    run();
    meta.runtime.tell(nullptr);
    return std::pair{counted.calls, counted.bytes};
  };
  const Tensor x = f32({7, 5}), weight = f32({3, 5}), y = f32({7, 3}), residual = f32({7, 3});
  const auto onto = [&] { ops::linear_forward(y, x, weight, residual); };
  const int64_t product = y.bytes() + x.bytes() + weight.bytes();
  CHECK(moved(false, onto) == std::pair{int64_t{2}, product + 3 * y.bytes()});
  CHECK(moved(true, onto) == std::pair{int64_t{1}, product + residual.bytes()});
  const Tensor rows = f32({8, 3}), slots = i32(14).view({7, 2}), gates = f32({7, 2});
  const auto summed = [&] { ops::unpermute_onto(y, residual, rows, slots, gates); };
  const int64_t sum = y.bytes() + rows.bytes() + slots.bytes() + gates.bytes();
  CHECK(moved(false, summed) == std::pair{int64_t{2}, sum + 3 * y.bytes()});
  CHECK(moved(true, summed) == std::pair{int64_t{1}, sum + residual.bytes()});
  const std::vector<Tensor> gradients = {x, weight, y};
  const auto squares = [&] { ops::add_squares(f64({1}), gradients); };
  CHECK(moved(false, squares) == std::pair{int64_t{3}, product});
  CHECK(moved(true, squares) == std::pair{int64_t{1}, product});
}

TEST_CASE("the operations count their floating-point operations") {
  OnDevice meta(Device::meta);
  const auto flops_of = [&](const std::function<void()>& run) {
    const int64_t before = meta.runtime.flops();
    run();
    return meta.runtime.flops() - before;
  };
  const Tensor x = f32({7, 5}), weight = f32({3, 5}), y = f32({7, 3});
  REQUIRE(flops_of([&] { ops::linear_forward(y, x, weight); }) == 2 * 7 * 5 * 3);
  REQUIRE(flops_of([&] { ops::linear_backward_input(x, y, weight); }) == 2 * 7 * 5 * 3);
  REQUIRE(flops_of([&] { ops::linear_backward_weight(weight, y, x, false); }) == 2 * 7 * 5 * 3);
  REQUIRE(flops_of([&] { ops::add(x, x, x); }) == 0);

  // 2 samples, 4 heads, 8 channels; 5 queries see 1 + 2 + 3 + 4 + 5 keys.
  const Tensor q = f32({2, 5, 4, 8}), kv = f32({2, 5, 2, 8}), lse = f32({2, 4, 5});
  const Positions five(0, 5);
  const int64_t one_matmul = 2 * 2 * 4 * 8 * 15;
  for (bool naive : {true, false}) {
    const Tensor probs = naive ? f32({2, 4, 5, 5}) : Tensor();
    const auto forward = [&] { ops::attention_forward(q, lse, probs, q, kv, kv, 1, five, five); };
    const auto backward = [&] {
      ops::attention_backward(q, kv, kv, q, probs, q, kv, kv, lse, lse, 1, five, five,
                              /*accumulate=*/true);
    };
    REQUIRE(flops_of(forward) == 2 * one_matmul);
    REQUIRE(flops_of(backward) == (naive ? 4 : 5) * one_matmul);
    // Documents of 2 and 3 tokens, and of 4 and 1: 1 + 2 and 1 + 2 + 3, 1 + 2 + 3 + 4 and 1.
    const Documents documents({0, 0, 2, 2, 2, 0, 0, 0, 0, 4}, {2, 5});
    const int64_t fewer = 2 * 4 * 8 * (9 + 11);
    REQUIRE(flops_of([&] {
              ops::attention_forward(q, lse, probs, q, kv, kv, 1, five, five, documents);
            }) == 2 * fewer);
    REQUIRE(flops_of([&] {
              ops::attention_backward(q, kv, kv, q, probs, q, kv, kv, lse, lse, 1, five, five,
                                      /*accumulate=*/true, documents);
            }) == (naive ? 4 : 5) * fewer);
  }
}

}  // namespace
}  // namespace usp::test
