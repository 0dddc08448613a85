#pragma once

#include "comm/launch.h"
#include "examples/tensor_2d.h"
#include "technique/data_parallel/data_parallel_parity.h"
#include "tensor_parallel/region.h"
#include "testing.h"

/// Layers on a square of ranks next to the serial ones, and what they send.
namespace usp::test {

inline constexpr MlpMoves kInputsMove{Moves::input, Moves::input};
inline constexpr MlpMoves kOutputsMove{Moves::output, Moves::output};
inline constexpr MlpMoves kWideStays{Moves::input, Moves::output};
inline constexpr MlpMoves kWideMoves{Moves::output, Moves::input};
inline constexpr MlpMoves kAllMoves[] = {kInputsMove, kOutputsMove, kWideStays, kWideMoves};

/// Throws unless a rank's part is what is expected there.
inline void expect_block(const Tensor& block, const Tensor& expected, const std::string& what) {
  USP_CHECK(block.shape() == expected.shape(), "{}: {} instead of {}", what,
            block.shape().to_string(), expected.shape().to_string());
  expect_close(block.items(), expected.items(), 1e-10, what);
}

/// The same on every rank.
inline Tensor normal(uint64_t seed, const Shape& shape) { return Random(seed).tensor(shape); }

/// Two micro-batches through a layer over all ranks, and through the serial matmuls.
inline void check_linear_2d(const Communicator& world, Moves moves) {
  const Grid grid(world);
  const int64_t Q = grid.side(), T = 5 * Q, I = 3 * Q, O = 7 * Q;
  const std::string what =
      fmt::format("tp {} {}", world.size(), moves == Moves::input ? "input" : "output");
  const Tensor weight = normal(1, {O, I});
  const Linear2D layer(grid, moves, weight);
  const Tensor dweight = Tensor::zeros({O, I}, DType::f64);
  for (uint64_t micro = 0; micro < 2; ++micro) {
    const Tensor x = normal(10 + micro, {T, I}), dy = normal(20 + micro, {T, O});
    const Tensor y = Tensor::zeros({T, O}, DType::f64), dx = Tensor::zeros({T, I}, DType::f64);
    ops::linear_forward(y, x, weight);
    ops::linear_backward_input(dx, dy, weight);
    ops::linear_backward_weight(dweight, dy, x, /*accumulate=*/true);
    Linear2D::Saved saved;
    expect_block(layer.forward(grid.block(x), saved), grid.block(y), what + ": y");
    expect_block(layer.backward(grid.block(dy), saved), grid.block(dx), what + ": dx");
    expect_block(layer.grad(), layer.block_of(dweight), what + ": dW");
  }
}

/// An MLP over all ranks, beside one of whole matrices.
inline void check_mlp_2d(const Communicator& world) {
  const Grid grid(world);
  const int64_t Q = grid.side(), T = 5 * Q, H = 3 * Q, F = 7 * Q;
  const Tensor x = normal(1, {T, H}), dy = normal(2, {T, H});
  const Tensor gate_up = normal(3, {2 * F, H}), down = normal(4, {H, F});
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f64); };
  const Tensor hidden = zeros({T, 2 * F}), activated = zeros({T, F}), y = zeros({T, H});
  ops::linear_forward(hidden, x, gate_up);
  ops::swiglu_forward(activated, hidden);
  ops::linear_forward(y, activated, down);
  const Tensor dactivated = zeros({T, F}), dhidden = zeros({T, 2 * F}), dx = zeros({T, H});
  const Tensor ddown = zeros({H, F}), dgate_up = zeros({2 * F, H});
  ops::linear_backward_input(dactivated, dy, down);
  ops::linear_backward_weight(ddown, dy, activated, false);
  ops::swiglu_backward(dhidden, dactivated, hidden);
  ops::linear_backward_input(dx, dhidden, gate_up);
  ops::linear_backward_weight(dgate_up, dhidden, x, false);
  const auto of_grid = [&](const Tensor& both) {
    return Mlp2D::interleave(both.narrow(0, 0, F), both.narrow(0, F, F), Q);
  };
  for (const auto& moves : kAllMoves) {
    const std::string what = fmt::format("tp {}", world.size());
    const Mlp2D mlp(grid, moves, of_grid(gate_up), down);
    Mlp2D::Saved saved;
    expect_block(mlp.forward(grid.block(x), saved), grid.block(y), what + ": y");
    expect_block(mlp.backward(grid.block(dy), saved), grid.block(dx), what + ": dx");
    expect_block(mlp.gate_up.grad(), mlp.gate_up.block_of(of_grid(dgate_up)), what + ": gate, up");
    expect_block(mlp.down.grad(), mlp.down.block_of(ddown), what + ": down");
  }
}

/// What this rank sends in a forward and backward pass, in elements of f64.
inline double sent_by_mlp(const Communicator& world, MlpMoves moves, int64_t T, int64_t H,
                          int64_t F) {
  const auto matrix = [](int64_t rows, int64_t columns) {
    return Tensor::zeros({rows, columns}, DType::f64);
  };
  const Grid grid(world);
  const Mlp2D mlp(grid, moves, matrix(2 * F, H), matrix(H, F));
  const Tensor x = grid.block(matrix(T, H));
  const Ledger::Entry before = Runtime::current().ledger().total();
  Mlp2D::Saved saved;
  mlp.backward(mlp.forward(x, saved), saved);
  return double((Runtime::current().ledger().total() - before).wire_bytes) / 8;
}

/// What this rank has sent by the communicator of this name.
inline int64_t sent_over(const std::string& communicator) {
  int64_t bytes = 0;
  for (const auto& [key, entry] : Runtime::current().ledger().entries()) {
    if (key.first == communicator) bytes += entry.wire_bytes;
  }
  return bytes;
}

}  // namespace usp::test
