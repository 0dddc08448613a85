// 2D tensor parallelism: an MLP on a square of ranks beside the MLP on one, and the bytes that a
// rank sends beside those of 1D tensor parallelism, that is of column- and row-parallel layers.
// Runs on 1, 4, 9, ... ranks.

#include "tensor_2d.h"

#include "base/args.h"
#include "base/rng.h"
#include "comm/launch.h"
#include "tensor/console.h"
#include "tensor/runtime.h"
#include "tensor_parallel/region.h"

namespace usp {
namespace {

constexpr MlpMoves kInputsMove{Moves::input, Moves::input};
constexpr MlpMoves kWideStays{Moves::input, Moves::output};  // what is h_ff wide

struct Sizes {
  int64_t hidden_size = 4096, ffn_hidden_size = 14336, seq_len = 8192;  // of Llama 8B
};

Tensor random(const char* name, const Shape& shape) {
  const RandomStream stream(1, name);
  std::vector<double> values(shape.numel());
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.normal(i);
  return Tensor::from_host(values, shape, DType::f64);
}

/// Whether |a - b| <= 1e-10 max |b| everywhere; no NaN is.
bool close(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.items(), y = b.items();
  double scale = 0;
  for (double value : y) scale = std::max(scale, std::abs(value));
  bool all = x.size() == y.size();
  for (size_t i = 0; all && i < x.size(); ++i) all = std::abs(x[i] - y[i]) <= 1e-10 * scale;
  return all;
}

/// Throws Error unless an MLP over all ranks gives what it gives on one.
void check_against_one_rank(const Communicator& world) {
  const Grid grid(world), one(world.split("one", [](int rank) { return rank; }));
  const int Q = grid.side();
  const int64_t T = 5 * Q, H = 3 * Q, F = 7 * Q;
  const Tensor x = random("x", {T, H}), dy = random("dy", {T, H});
  const Tensor gate = random("gate", {F, H}), up = random("up", {F, H});
  const Tensor down = random("down", {H, F});
  Mlp2D::Saved saved, saved_alone;
  const Mlp2D alone(one, kWideStays, Mlp2D::interleave(gate, up, 1), down);
  const Tensor y_alone = alone.forward(x, saved_alone), dx_alone = alone.backward(dy, saved_alone);
  const Tensor dgate = alone.gate_up.grad().narrow(0, 0, F);
  const Tensor dup = alone.gate_up.grad().narrow(0, F, F);
  for (const auto& moves : {kInputsMove, kWideStays}) {
    const Mlp2D mlp(grid, moves, Mlp2D::interleave(gate, up, Q), down);
    const Tensor y = mlp.forward(grid.block(x), saved), dx = mlp.backward(grid.block(dy), saved);
    const bool same =
        close(y, grid.block(y_alone)) && close(dx, grid.block(dx_alone)) &&
        close(mlp.gate_up.grad(), mlp.gate_up.block_of(Mlp2D::interleave(dgate, dup, Q))) &&
        close(mlp.down.grad(), mlp.down.block_of(alone.down.grad()));
    if (world.any(!same)) fail("an MLP on {} x {} ranks differs from that on one", Q, Q);
  }
  print("{} x {} ranks: an MLP's output and gradients are those of one rank, to 1e-10\n\n", Q, Q);
}

/// Bytes that one of this many ranks sends in `pass`, from the ledger of a run without data.
int64_t bytes_sent(int ranks, const std::function<void(const Communicator&)>& pass) {
  Runtime runtime(Device::meta, /*rank=*/0, ranks);
  const Runtime::Use use(runtime);
  DryEngine engine(/*rank=*/0, ranks);
  pass(Communicator::world(engine));
  return runtime.ledger().total().wire_bytes;
}

/// An MLP whose first layer is column-parallel and whose second is row-parallel.
int64_t bytes_in_1d(const Sizes& sizes, int ranks) {
  return bytes_sent(ranks, [&](const Communicator& tp) {
    const TensorRegion region({.tp_size = ranks}, tp);
    const Tensor y = Tensor::empty({sizes.seq_len, sizes.hidden_size}, DType::bf16);
    region.leave(y, Pass{}).wait();
    region.enter_backward(y).wait();  // dx, which has the shape of y
  });
}

int64_t bytes_in_2d(const Sizes& sizes, int ranks, MlpMoves moves) {
  return bytes_sent(ranks, [&](const Communicator& tp) {
    const Grid grid(tp);
    const auto matrix = [](int64_t rows, int64_t columns) {
      return Tensor::empty({rows, columns}, DType::bf16);
    };
    const Mlp2D mlp(grid, moves, matrix(2 * sizes.ffn_hidden_size, sizes.hidden_size),
                    matrix(sizes.hidden_size, sizes.ffn_hidden_size));
    const Tensor x = grid.block(matrix(sizes.seq_len, sizes.hidden_size));
    Mlp2D::Saved saved;
    mlp.backward(mlp.forward(x, saved), saved);
  });
}

/// The fewest tokens, a multiple of the grid's side, of which the ledger counts less in 2D than in
/// 1D; "never" where a million are too few.
std::string first_less(Sizes sizes, int side, MlpMoves moves) {
  const auto less = [&](int64_t multiple) {
    sizes.seq_len = multiple * side;
    return bytes_in_2d(sizes, side * side, moves) < bytes_in_1d(sizes, side * side);
  };
  int64_t few = 0, enough = 1;
  for (; !less(enough); enough *= 2) {
    if (sizes.seq_len > 1'000'000) return "never";
    few = enough;
  }
  while (enough - few > 1) {
    const int64_t between = (few + enough) / 2;
    (less(between) ? enough : few) = between;
  }
  return fmt::format("{}", enough * side);
}

std::string mib(double bytes) { return fmt::format("{:.1f}", bytes / (1 << 20)); }

/// A line of a table: what the ledger counts, and beside it what the formula says.
void print_line(const std::vector<std::string>& cells) {
  print("{:>4}  {:5} {:>7} {:>8}  {:>15} {:>8}  {:>14} {:>8}\n", cells[0], cells[1], cells[2],
        cells[3], cells[4], cells[5], cells[6], cells[7]);
}

void print_traffic(const Sizes& sizes) {
  const int64_t H = sizes.hidden_size, F = sizes.ffn_hidden_size;
  std::vector<std::vector<std::string>> sent, break_even;
  for (int side : {2, 4, 8}) {
    const int tp = side * side;
    const MlpTraffic line = MlpTraffic::in_1d(H, tp);
    const std::string ranks = fmt::format("{}", tp), grid = fmt::format("{0} x {0}", side);
    sent.push_back(
        {ranks, grid, mib(double(bytes_in_1d(sizes, tp))), mib(2 * line.elements(sizes.seq_len))});
    break_even.push_back({ranks, grid, "", ""});
    for (const MlpMoves& moves : {kInputsMove, kWideStays}) {
      const MlpTraffic square = MlpTraffic::in_2d(H, F, side, moves);
      sent.back().push_back(mib(double(bytes_in_2d(sizes, tp, moves))));
      sent.back().push_back(mib(2 * square.elements(sizes.seq_len)));
      const double more_than = tokens_until_less(square, line);
      break_even.back().push_back(first_less(sizes, side, moves));
      break_even.back().push_back(
          std::isinf(more_than) ? "never" : fmt::format("> {:.0f}", std::floor(more_than)));
    }
  }
  print("MiB that a rank sends, forward and backward: h = {}, h_ff = {}, s b = {}, bf16\n", H, F,
        sizes.seq_len);
  print_line(
      {"tp", "grid", "1D", "formula", "2D, inputs move", "formula", "2D, h_ff stays", "formula"});
  for (const auto& cells : sent) print_line(cells);
  print("tokens s b from which on 2D sends less than 1D\n");
  for (const auto& cells : break_even) print_line(cells);
}

int run(const Communicator& world, int argc, char** argv) {
  Args args("Shows 2D tensor parallelism on an MLP, and what it sends beside 1D.");
  Sizes sizes;
  args.bind("hidden_size", sizes.hidden_size, "width of the model");
  args.bind("ffn_hidden_size", sizes.ffn_hidden_size, "width of the MLP");
  args.bind("seq_len", sizes.seq_len, "tokens of the one sample in a micro-batch");
  if (!args.parse(argc, argv)) return 0;
  for (const auto& [flag, value] : {std::pair{"hidden_size", sizes.hidden_size},
                                    {"ffn_hidden_size", sizes.ffn_hidden_size},
                                    {"seq_len", sizes.seq_len}}) {
    check_positive(flag, value);
  }
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  check_against_one_rank(world);
  print_traffic(sizes);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
