#pragma once

#include <cmath>

#include "comm/communicator.h"
#include "tensor/ops.h"

namespace usp {

// 2D tensor parallelism, as in Xu et al. (2021), https://arxiv.org/abs/2104.05343: every product of
// matrices is SUMMA, an algorithm of van de Geijn and Watts (1997),
// https://www.netlib.org/lapack/lawnspdf/lawn96.pdf.
//
// Dimensions in this file: T tokens, I and O the features that a linear layer reads and writes,
// H hidden_size, F ffn_hidden_size, Q rows and Q columns of ranks.

/// Q² ranks as a square: rank r stands in row r / Q and column r % Q.
class Grid {
 public:
  /// Throws UsageError where the ranks do not fill a square.
  explicit Grid(const Communicator& tp)
      : side_(side_of(tp.size())),
        row_(tp.split("row", [this](int rank) { return rank / side_; })),
        column_(tp.split("column", [this](int rank) { return rank % side_; })) {}

  int side() const { return side_; }                      ///< Q
  const Communicator& row() const { return row_; }        ///< ranks of this row, by their column
  const Communicator& column() const { return column_; }  ///< ranks of this column, by their row

  /// Block (i, j) of Q x Q equal blocks of a matrix, contiguous. Throws UsageError where Q does not
  /// divide an axis.
  Tensor block(const Tensor& matrix, int i, int j) const {
    const int64_t height = length(matrix.size(0)), width = length(matrix.size(1));
    return matrix.narrow(0, i * height, height).narrow(1, j * width, width).to_contiguous();
  }
  /// This rank's block of activations [T, I].
  Tensor block(const Tensor& matrix) const { return block(matrix, column_.rank(), row_.rank()); }

 private:
  static int side_of(int ranks) {
    const int side = static_cast<int>(std::lround(std::sqrt(ranks)));
    if (side * side != ranks) {
      usage_error("tp_size={} must be a square; try {} or {}", ranks, side * side,
                  (side + 1) * (side + 1));
    }
    return side;
  }
  int64_t length(int64_t whole) const {
    if (whole % side_ != 0) {
      usage_error("{} x {} ranks cannot split an axis of {}; try {}", side_, side_, whole,
                  (whole / side_ + 1) * side_);
    }
    return whole / side_;
  }

  int side_;
  Communicator row_, column_;
};

// [steps]
/// What rank `root` of a row or column holds, on all ranks of it; `own`: this rank's.
inline Tensor spread(const Communicator& line, const Tensor& own, int root) {
  const Tensor panel = line.rank() == root ? own : Tensor::empty(own.shape(), own.dtype());
  line.broadcast(panel, root);
  return panel;
}

/// On rank `root` of a row or column: sum += the terms of all its ranks, in their order.
inline void collect(const Communicator& line, const Tensor& sum, const Tensor& term, int root) {
  if (line.rank() != root) return line.send(term, root);
  const Tensor arrived = Tensor::empty(term.shape(), term.dtype());
  for (int peer = 0; peer < line.size(); ++peer) {
    if (peer != root) line.recv(arrived, peer);
    ops::add(sum, sum, peer == root ? term : arrived);
  }
}
// [steps]

/// Activations of a linear layer that travel along the rows of the grid. The others stay
/// where they are.
enum class Moves { input, output };
using MlpMoves = std::pair<Moves, Moves>;  ///< of an MLP's first layer and of its second

/// y = x Wᵀ with a block of each matrix on every rank; sums are in the dtype of the tensors.
///
/// |        | one GPU | rank (i, j) of Q x Q                                                    |
/// |--------|---------|-------------------------------------------------------------------------|
/// | x, dx  | [T, I]  | [T/Q, I/Q], block (i, j)                                                |
/// | y, dy  | [T, O]  | [T/Q, O/Q], block (i, j)                                                |
/// | W, dW  | [O, I]  | [O/Q, I/Q], block (j, i) where the input moves, (i, j) where the output |
///
/// A product takes Q steps. In step l a column works with the block of W of its rank in row l, and
/// a row with the block of x or dy of its rank in column l; or it adds up the block of y or dx that
/// belongs there. So a rank holds one block of others at a time, of each kind.
class Linear2D {
 public:
  struct Saved {
    Tensor x;  ///< [T/Q, I/Q]
  };

  /// `matrix`: all of W [O, I], of which a block is kept.
  Linear2D(const Grid& grid, Moves moves, const Tensor& matrix)
      : grid_(grid), moves_(moves), weight_(block_of(matrix)), grad_(zeros(weight_.shape())) {}

  // [forward]
  /// x [T/Q, I/Q] -> y [T/Q, O/Q]
  Tensor forward(const Tensor& x, Saved& saved) const {
    saved.x = x;
    const Tensor y = zeros({x.size(0), weight_.size(0)});
    for (int step = 0; step < grid_.side(); ++step) {
      const Tensor weight = spread(grid_.column(), weight_, step);
      if (moves_ == Moves::input) {
        const Tensor panel = spread(grid_.row(), x, step);  // of x
        ops::matmul(y, panel, weight.transposed(), /*accumulate=*/true);
      } else {
        const Tensor term = zeros(y.shape());
        ops::linear_forward(term, x, weight);
        collect(grid_.row(), y, term, step);
      }
    }
    return y;
  }
  // [forward]

  // [backward]
  /// dy [T/Q, O/Q] -> dx [T/Q, I/Q]; grad() += this rank's block of dW.
  Tensor backward(const Tensor& dy, const Saved& saved) const {
    const Tensor dx = zeros(saved.x.shape());
    const Tensor dweight = zeros(weight_.shape());  // a partial sum
    for (int step = 0; step < grid_.side(); ++step) {
      const Tensor weight = spread(grid_.column(), weight_, step);
      if (moves_ == Moves::input) {
        const Tensor term = zeros(dx.shape());
        ops::linear_backward_input(term, dy, weight);
        collect(grid_.row(), dx, term, step);
        ops::linear_backward_weight(dweight, dy, spread(grid_.row(), saved.x, step), false);
      } else {
        const Tensor panel = spread(grid_.row(), dy, step);  // of dy: both products read it
        ops::matmul(dx, panel, weight, /*accumulate=*/true);
        ops::linear_backward_weight(dweight, panel, saved.x, false);
      }
      collect(grid_.column(), grad_, dweight, step);
    }
    return dx;
  }
  // [backward]

  /// This rank's block of a matrix [O, I]: W, or what dW should be.
  Tensor block_of(const Tensor& matrix) const {
    const int i = grid_.column().rank(), j = grid_.row().rank();
    return moves_ == Moves::input ? grid_.block(matrix, j, i) : grid_.block(matrix, i, j);
  }
  const Tensor& grad() const { return grad_; }  ///< [O/Q, I/Q]: the sum since the beginning

 private:
  Tensor zeros(const Shape& shape) const { return Tensor::zeros(shape, weight_.dtype()); }

  Grid grid_;
  Moves moves_;
  Tensor weight_, grad_;
};

/// y = down(silu(gate(x)) * up(x)), gate and up as one linear layer.
class Mlp2D {
 public:
  struct Saved {
    Linear2D::Saved gate_up, down;
    Tensor hidden;  ///< [T/Q, 2F/Q]: gate columns, then up columns
  };

  /// W_gate_up [2F, H] as interleave() makes it, W_down [H, F].
  Mlp2D(const Grid& grid, MlpMoves moves, const Tensor& gate_up, const Tensor& down)
      : gate_up(grid, moves.first, gate_up), down(grid, moves.second, down) {}

  /// [2F, H] from gate and up [F, H]: of each of `side` ranks the rows of both, so that a rank has
  /// the same columns of the two outputs.
  static Tensor interleave(const Tensor& gate, const Tensor& up, int64_t side) {
    const int64_t rows = gate.size(0) / side, H = gate.size(1);
    const Tensor both = Tensor::empty({side, 2, rows, H}, gate.dtype());
    ops::copy(both.narrow(1, 0, 1), gate.view({side, 1, rows, H}));
    ops::copy(both.narrow(1, 1, 1), up.view({side, 1, rows, H}));
    return both.view({2 * gate.size(0), H});
  }

  /// x [T/Q, H/Q] -> [T/Q, H/Q]
  Tensor forward(const Tensor& x, Saved& saved) const {
    saved.hidden = gate_up.forward(x, saved.gate_up);
    const Tensor activated =
        Tensor::empty({x.size(0), saved.hidden.size(1) / 2}, x.dtype());  // [T/Q, F/Q]
    ops::swiglu_forward(activated, saved.hidden);
    return down.forward(activated, saved.down);
  }

  /// dy [T/Q, H/Q] -> dx [T/Q, H/Q]
  Tensor backward(const Tensor& dy, const Saved& saved) const {
    const Tensor dactivated = down.backward(dy, saved.down);
    const Tensor dhidden = Tensor::empty(saved.hidden.shape(), dy.dtype());
    ops::swiglu_backward(dhidden, dactivated, saved.hidden);
    return gate_up.backward(dhidden, saved.gate_up);
  }

  const Linear2D gate_up, down;
};

// [traffic]
/// Elements that a rank sends for the forward and backward pass of an MLP over T tokens.
struct MlpTraffic {
  double per_token, of_weights;

  double elements(int64_t tokens) const { return per_token * double(tokens) + of_weights; }

  /// A column-parallel and a row-parallel layer: an all-reduce of y [T, H], and one of dx.
  static MlpTraffic in_1d(int64_t H, int ranks) { return {4.0 * H * (ranks - 1) / ranks, 0}; }
  /// SwiGLU over Q x Q ranks: W travels twice and dW once. So does an input, x twice and dx once;
  /// of an output y and dy travel.
  static MlpTraffic in_2d(int64_t H, int64_t F, int side, MlpMoves moves) {
    const double share = (side - 1) / double(side * side);
    const int64_t first = moves.first == Moves::input ? 3 * H : 2 * 2 * F;
    const int64_t second = moves.second == Moves::input ? 3 * F : 2 * H;
    return {share * double(first + second), share * 3 * double(3 * F * H)};
  }
};

/// From more tokens on than this, `a` sends less than `b`, which moves no weights; infinity: never.
inline double tokens_until_less(const MlpTraffic& a, const MlpTraffic& b) {
  const double gain = b.per_token - a.per_token;
  return gain > 0 ? a.of_weights / gain : HUGE_VAL;
}
// [traffic]

}  // namespace usp
