// Times the collectives that ./book bench reports, under mpiexec: an all-reduce of a few bytes, and
// a large one next to the MPI library's own, in turns. Prints one JSON object.

#include <mpi.h>

#include <algorithm>
#include <chrono>

#include "args.h"
#include "comm/communicator.h"
#include "comm/mpi_transport.h"
#include "runtime.h"

namespace usp {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Median seconds of one call, over `rounds` timed calls.
double time_all_reduce(const Communicator& world, int64_t bytes, int rounds) {
  const Tensor x = Tensor::zeros({bytes / 4}, DType::f32);
  for (int i = 0; i < 3; ++i) world.all_reduce(x);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const Clock::time_point begin = Clock::now();
    world.all_reduce(x);
    times.push_back(seconds_since(begin));
  }
  return median(times);
}

/// The same of the MPI library's own blocking call.
double time_mpi_all_reduce(int64_t bytes, int rounds) {
  std::vector<float> x(bytes / 4);
  std::vector<double> times;
  for (int i = -3; i < rounds; ++i) {
    const Clock::time_point begin = Clock::now();
    MPI_Allreduce(MPI_IN_PLACE, x.data(), static_cast<int>(x.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    if (i >= 0) times.push_back(seconds_since(begin));
  }
  return median(times);
}

int run(int argc, char** argv) {
  MpiProcess mpi(&argc, &argv);
  int64_t small = 4096, large = 16 << 20, rounds = 200;
  Args args("Times collectives.");
  args.bind("small", small, "bytes of the small all-reduce");
  args.bind("large", large, "bytes of the large all-reduce");
  args.bind("rounds", rounds, "calls of the small one; a tenth of it of the large one");
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cpu, mpi.rank());
  const Runtime::Use use(runtime);
  std::vector<double> latencies, ours, theirs;
  const int large_rounds = static_cast<int>(std::max<int64_t>(1, rounds / 10));
  for (int turn = 0; turn < 5; ++turn) {
    {  // While the engine lives, only its thread may call MPI.
      const std::unique_ptr<Transport> transport = mpi.make_transport();
      QueueEngine engine(*transport);
      const Communicator world = Communicator::world(engine);
      latencies.push_back(time_all_reduce(world, small, static_cast<int>(rounds)));
      ours.push_back(time_all_reduce(world, large, large_rounds));
      engine.leave(std::chrono::seconds(10));
    }
    theirs.push_back(time_mpi_all_reduce(large, large_rounds));
  }
  if (mpi.rank() == 0) {
    fmt::print(
        "{{\"ranks\": {}, \"small_bytes\": {}, \"small_us\": {:.1f}, \"large_bytes\": {}, "
        "\"large_ms\": {:.3f}, \"mpi_ms\": {:.3f}, \"ratio\": {:.3f}}}\n",
        mpi.size(), small, 1e6 * median(latencies), large, 1e3 * median(ours), 1e3 * median(theirs),
        median(theirs) / median(ours));
  }
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }
