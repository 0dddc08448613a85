// A tour of the eight collectives of the playbook's appendix A0, with its inputs: what each rank
// holds before and after. Made for 3 ranks, runs on any number.

#include <cmath>
#include <thread>

#include "base/args.h"
#include "base/clock.h"
#include "comm/launch.h"
#include "ring.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {
namespace {

std::string text(std::span<const double> values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

/// Prints one line per rank, from rank 0: `before` -> `after`.
void show(const Communicator& world, const char* title, const Tensor& before, const Tensor& after) {
  const auto collect = [&](const Tensor& own) {
    const Tensor all = Tensor::zeros({world.size(), own.numel()}, DType::f64);
    gather(world, all, own.view({own.numel()}), 0);
    return all;
  };
  const Tensor inputs = collect(before), outputs = collect(after);
  print("\n{}\n", title);
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::vector<double> in = inputs.narrow(0, rank, 1).items();
    const std::vector<double> out = outputs.narrow(0, rank, 1).items();
    print("  rank {}  {:<15} -> {}\n", rank, text(in), text(out));
  }
}

Tensor values(std::vector<double> numbers) {
  return Tensor::from_host(numbers, {std::ssize(numbers)}, DType::f64);
}

Tensor copy_of(const Tensor& tensor) {
  const Tensor copy = Tensor::empty(tensor.shape(), tensor.dtype());
  ops::copy(copy, tensor);
  return copy;
}

void tour(const Communicator& world) {
  const int n = world.size();
  const double mine = world.rank() + 1;
  const Tensor own = values({mine, mine, mine, mine, mine});

  Tensor x = world.rank() == 0 ? values({1, 2, 3, 4, 5}) : values({0, 0, 0, 0, 0});
  Tensor before = copy_of(x);
  world.broadcast(x, /*root=*/0);
  show(world, "broadcast from rank 0", before, x);

  x = copy_of(own);
  reduce(world, x, /*root=*/0);
  show(world, "reduce to rank 0 (sum; written with send and recv)", own, x);

  x = copy_of(own);
  world.all_reduce(x);
  show(world, "all_reduce (sum)", own, x);

  x = copy_of(own);
  ring_all_reduce(world, x);
  show(world, "all_reduce (sum; a ring, written with send and recv)", own, x);

  Tensor all = Tensor::zeros({n, 5}, DType::f64);
  gather(world, all, own, /*root=*/0);
  show(world, "gather to rank 0 (written with send and recv)", own, all);

  all = Tensor::zeros({n, 5}, DType::f64);
  world.all_gather(all, own);
  show(world, "all_gather", own, all);

  // What rank 0 hands out: the rows that all_gather has just collected.
  const Tensor table = world.rank() == 0 ? all : Tensor::zeros({n, 5}, DType::f64);
  x = values({0, 0, 0, 0, 0});
  scatter(world, x, table, /*root=*/0);
  show(world, "scatter from rank 0 (written with send and recv)", table, x);

  std::vector<double> powers;
  for (int j = 0; j < n; ++j) {
    for (double base : {1.0, 2.0}) powers.push_back(std::pow(mine * base, j + 1));
  }
  x = values({0, 0});
  world.reduce_scatter(x, values(powers));
  show(world, "reduce_scatter (sum)", values(powers), x);
}

/// Rank r sleeps r seconds; all leave together.
void barrier(const Communicator& world) {
  const int64_t begin = clock_ns();
  std::this_thread::sleep_for(std::chrono::seconds(world.rank()));
  const Tensor slept = values({double(world.rank())});
  world.barrier();
  const double waited = seconds_since(begin);
  show(world, "barrier: seconds that the rank slept -> seconds until it came out", slept,
       values({std::round(waited * 100) / 100}));
}

int run(const Communicator& world, int argc, char** argv) {
  Args args("Shows what each collective does, on a few numbers.");
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  print("{} rank{}; each line: what the rank holds before -> after\n", world.size(),
        world.size() == 1 ? "" : "s");
  tour(world);
  barrier(world);
  const Ledger::Entry total = runtime.ledger().total();
  print("\nRank 0 sent {} bytes of tensors in {} calls.\n", total.wire_bytes, total.calls);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
