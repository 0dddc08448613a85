// The playbook's numeric example, x [4, 2] and a matrix of 2 by 2, through a column-parallel and a
// row-parallel layer; and the messages of the two orders in which they can be combined.

#include "tensor_parallel/linears.h"

#include "base/args.h"
#include "comm/launch.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

constexpr int64_t kRanks = 2;
const std::vector<double> kX = {0, 1, 2, 3, 4, 5, 6, 7};  // [4, 2]
const std::vector<double> kWeight = {10, 20, 30, 40};     // W [2, 2]: the book's columns are rows

std::string text(const Tensor& matrix) {
  std::vector<std::string> rows;
  for (int64_t i = 0; i < matrix.size(0); ++i) {
    rows.push_back(fmt::format("[{}]", fmt::join(matrix.narrow(0, i, 1).items(), ", ")));
  }
  return fmt::format("[{}]", fmt::join(rows, ", "));
}

Tensor copy_of(const Tensor& tensor) {
  const Tensor copy = Tensor::empty(tensor.shape(), tensor.dtype());
  ops::copy(copy, tensor);
  return copy;
}

/// W, of which this rank has a slice of an axis: 0 for its rows, 1 for its columns.
Parameter slice_of_weight(const TensorRegion& region, int axis) {
  Parameter weight;
  weight.global_shape = {2, 2};
  region.share(weight, axis);
  const Slice& slice = weight.slices.front();
  const Tensor whole = Tensor::from_host(kWeight, weight.global_shape, DType::f64);
  weight.value = copy_of(whole.narrow(axis, slice.offset, slice.length));
  return weight;
}

/// y [T, O] from every rank's columns of it.
Tensor gather_columns(const Communicator& world, const Tensor& own) {
  const Tensor parts = Tensor::empty({world.size(), own.size(0)}, own.dtype());
  world.all_gather(parts, own.view({own.size(0)}));
  const Tensor y = Tensor::empty({own.size(0), world.size()}, own.dtype());
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    ops::copy(y.narrow(1, rank, 1), parts.narrow(0, rank, 1).view({own.size(0), 1}));
  }
  return y;
}

/// Prints what each rank has, from rank 0.
void show(const Communicator& world, const Tensor& own) {
  const Tensor all = Tensor::zeros({world.size() * own.size(0), own.size(1)}, DType::f64);
  world.all_gather(all, own);
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    print("  rank {}  {}\n", rank, text(all.narrow(0, rank * own.size(0), own.size(0))));
  }
}

int run(const Communicator& world, int argc, char** argv) {
  Args args("Computes the playbook's example of tensor parallelism on two ranks.");
  if (!args.parse(argc, argv)) return 0;
  if (world.size() != kRanks)
    usage_error("the example is for {0} ranks, not {1}; try --ranks {0}", kRanks, world.size());
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  TensorParallelConfig config;
  config.tp_size = kRanks;
  const TensorRegion region(config, world);
  Parameter rows = slice_of_weight(region, 0), columns = slice_of_weight(region, 1);
  const ColumnParallelLinear column({&rows}, "column", region);
  const RowParallelLinear row(columns, "row", region, /*ends_block=*/false);
  const Tensor x = Tensor::from_host(kX, {4, 2}, DType::f64);
  const Tensor own_x = copy_of(x.narrow(1, world.rank(), 1));
  const Pass pass;
  Linear::Saved saved;

  const Tensor y = column.forward(x, saved, pass);
  print("column-parallel: each rank's columns of y\n");
  show(world, y);
  print("column-parallel  y = {}\n", text(gather_columns(world, y)));
  print("row-parallel: columns of x\n");
  show(world, own_x);
  print("row-parallel     y = {}\n", text(row.forward(own_x, saved, pass)));

  const auto calls = [&] { return runtime.ledger().total().calls; };
  int64_t before = calls();
  row.forward(column.forward(x, saved, pass), saved, pass);
  print("column, then row: {} message\n", calls() - before);
  before = calls();
  gather_columns(world, column.forward(row.forward(own_x, saved, pass), saved, pass));
  print("row, then column: {} messages\n", calls() - before);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
