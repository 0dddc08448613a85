// Times an all-reduce of tensors on a GPU by way of the host, under mpiexec, in turns with what it
// cannot do without: the tensors' way to the host and back, and what it moves in the host's memory.
// Prints JSON.

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>

#include "base/args.h"
#include "comm/communicator.h"
#include "comm/mpi_transport.h"
#include "tensor/console.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "tensor/side_copies.h"

namespace usp {
namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Pinned memory for the lifetime of the object.
class Pinned {
 public:
  Pinned(Accelerator& device, int64_t bytes)
      : device_(device), data_(device.take(Device::cpu, bytes)) {
    USP_CHECK(data_ != nullptr, "there are no {} bytes of pinned memory", bytes);
  }
  ~Pinned() { device_.give_back(Device::cpu, data_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  void* data() const { return data_; }

 private:
  Accelerator& device_;
  void* data_;
};

/// What an all-reduce of n ranks moves at least in the memory of the host for each of them, read
/// and written, as bytes that a copy of half as many moves. Each sum of 1/n of the elements reads n
/// contributions and writes one result; the other results are read and written.
int64_t copied_bytes(int64_t bytes, int ranks) { return bytes * (3 * ranks - 1) / (2 * ranks); }

/// Median milliseconds, the mean over the ranks, by what is done.
using Times = std::array<std::vector<double>, 4>;

Times measure(const Communicator& world, int64_t bytes, int64_t rounds) {
  Runtime& runtime = Runtime::current();
  Accelerator& device = *runtime.accelerator();
  auto& copies = dynamic_cast<SideCopies&>(device);
  const Tensor x = Tensor::zeros({bytes / 4}, DType::f32);
  const Pinned pinned(device, bytes);
  Runtime host(Device::cpu, world.rank());
  const auto on_host = [&](int64_t numel) {
    const Runtime::Use use(host);
    return Tensor::zeros({numel}, DType::f32);
  };
  const int64_t moved = copied_bytes(bytes, world.size()) / 4;
  const Tensor from = on_host(moved), to = on_host(moved);
  const SideCopies::Copy down{pinned.data(), x.address(), bytes},
      up{x.address(), pinned.data(), bytes};
  const std::array<std::function<void()>, 4> calls = {[&] {
                                                        world.all_reduce(x);
                                                        device.wait();
                                                      },
                                                      [&] {
                                                        copies.download({&down, 1})->wait();
                                                      },
                                                      [&] {
                                                        const Runtime::Use use(host);
                                                        ops::copy(to, from);
                                                      },
                                                      [&] {
                                                        copies.upload({&up, 1})->wait();
                                                      }};
  Times times;
  for (int64_t i = -1; i < rounds; ++i) {
    ops::fill(x, world.rank() + 1);
    for (size_t kind = 0; kind < calls.size(); ++kind) {
      device.wait();
      world.barrier();
      const auto begin = std::chrono::steady_clock::now();
      calls[kind]();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      const double ms = world.sum(took.count()) / world.size();
      if (i >= 0) times[kind].push_back(ms);
    }
    const double sum = world.size() * (world.size() + 1) / 2;
    USP_CHECK(x.item() == sum && x.item(bytes / 4 - 1) == sum, "the sum is {}, not {}", x.item(),
              sum);
  }
  return times;
}

int run(int argc, char** argv) {
  MpiProcess mpi(&argc, &argv);
  int64_t bytes = 256 << 20, rounds = 7;
  Args args("Times an all-reduce of tensors on a GPU by way of the host.");
  args.bind("bytes", bytes, "of the tensor");
  args.bind("rounds", rounds, "calls");
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cuda, mpi.rank());
  const Runtime::Use use(runtime);
  const std::unique_ptr<Transport> transport = mpi.make_transport();
  QueueEngine engine(*transport);
  const Communicator world = Communicator::world(engine);
  const Times times = measure(world, bytes, rounds);
  if (mpi.rank() == 0) {
    print(
        "{{\"ranks\": {}, \"bytes\": {}, \"all_reduce_ms\": {:.4f}, \"download_ms\": {:.4f}, "
        "\"host_ms\": {:.4f}, \"upload_ms\": {:.4f}}}\n",
        world.size(), bytes, median(times[0]), median(times[1]), median(times[2]),
        median(times[3]));
  }
  engine.leave(std::chrono::seconds(10));
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }
