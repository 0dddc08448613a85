// Times the collectives that ./book bench reports, under mpiexec: an all-reduce of a few bytes, and
// a large one next to the MPI library's own, in turns; or how true emulated links are; or the parts
// of an all-reduce; or large collectives on emulated nodes. Prints JSON.

#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/args.h"
#include "comm/communicator.h"
#include "comm/links.h"
#include "comm/mpi_transport.h"
#include "tensor/runtime.h"

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

/// How long a message of this many bytes takes: half of its time there and back, ranks 0 and 1.
double one_way_us(const Communicator& world, int64_t bytes, int rounds) {
  const Tensor x = Tensor::zeros({bytes / 4}, DType::f32);
  const int peer = 1 - world.rank();
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    world.barrier();
    const Clock::time_point begin = Clock::now();
    if (world.rank() == 0) world.send(x, peer);
    world.recv(x, peer);
    if (world.rank() == 1) world.send(x, peer);
    times.push_back(1e6 * seconds_since(begin) / 2);
  }
  return median(times);
}

/// Emulated links next to what was asked of them, as a JSON array; on two ranks.
int measure_links(MpiProcess& mpi) {
  constexpr Link kLinks[] = {{100, 1}, {500, 1}, {1000, 0.25}};
  std::string text;
  for (const Link& link : kLinks) {
    const std::unique_ptr<Transport> transport = mpi.make_transport();
    QueueEngine engine(*transport);
    const Communicator world = Communicator::world(engine);
    engine.emulate({0, link, {}, measure_wake_up(world)});
    for (int64_t bytes : {4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}) {
      const double asked = link.latency_us + double(bytes) / link.gb_per_s * 1e-3;
      const int rounds = std::clamp(static_cast<int>(2e5 / asked), 3, 100);
      const double measured = one_way_us(world, bytes, rounds);
      text += fmt::format(
          "{}{{\"latency_us\": {}, \"gb_per_s\": {}, \"bytes\": {}, \"asked_us\": {:.1f}, "
          "\"measured_us\": {:.1f}, \"ratio\": {:.4f}}}",
          text.empty() ? "" : ", ", link.latency_us, link.gb_per_s, bytes, asked, measured,
          measured / asked);
    }
    engine.leave(std::chrono::seconds(10));
  }
  if (mpi.rank() == 0) fmt::print("[{}]\n", text);
  return 0;
}

/// Median milliseconds of an all-reduce, and of the two collectives that it is made of, in turns.
std::string time_parts(const Communicator& world, int64_t bytes, int rounds) {
  const int64_t numel = bytes / 4;
  const Tensor x = Tensor::zeros({numel}, DType::f32);
  const Tensor shard = Tensor::zeros({numel / world.size()}, DType::f32);
  std::array<std::vector<double>, 3> times;
  for (int i = -1; i < rounds; ++i) {
    for (int kind = 0; kind < 3; ++kind) {
      world.barrier();
      const Clock::time_point begin = Clock::now();
      if (kind == 0) world.all_reduce(x);
      if (kind == 1) world.reduce_scatter(shard, x);
      if (kind == 2) world.all_gather(x, shard);
      if (i >= 0) times[kind].push_back(1e3 * seconds_since(begin));
    }
  }
  return fmt::format(
      "\"bytes\": {}, \"all_reduce_ms\": {:.3f}, \"reduce_scatter_ms\": {:.3f}, "
      "\"all_gather_ms\": {:.3f}",
      bytes, median(times[0]), median(times[1]), median(times[2]));
}

/// The parts of an all-reduce next to the whole, as a JSON array: on an emulated link, and on this
/// machine's own.
int measure_parts(MpiProcess& mpi, int64_t bytes, int rounds) {
  std::string text;
  for (const Link& link : {Link{500, 0.25}, Link{}}) {
    const std::unique_ptr<Transport> transport = mpi.make_transport();
    QueueEngine engine(*transport);
    const Communicator world = Communicator::world(engine);
    if (link.gb_per_s > 0) engine.emulate({0, link, {}, measure_wake_up(world)});
    text += fmt::format("{}{{\"link\": [{}, {}], {}}}", text.empty() ? "" : ", ", link.latency_us,
                        link.gb_per_s, time_parts(world, bytes, rounds));
    engine.leave(std::chrono::seconds(10));
  }
  if (mpi.rank() == 0) fmt::print("[{}]\n", text);
  return 0;
}

/// Milliseconds of every call, the mean over the ranks, of three collectives in turns on emulated
/// links, as JSON. Every one has a message of so many bytes: what is reduced, or what is gathered.
int measure_nodes(MpiProcess& mpi, Links links, int64_t bytes, int rounds) {
  const std::unique_ptr<Transport> transport = mpi.make_transport();
  QueueEngine engine(*transport);
  const Communicator world = Communicator::world(engine);
  if (world.size() > 1) links.wake_up = measure_wake_up(world);
  engine.emulate(links);
  const int64_t numel = bytes / 4 / world.size() * world.size();
  const Tensor x = Tensor::zeros({numel}, DType::f32);
  const Tensor shard = Tensor::zeros({numel / world.size()}, DType::f32);
  constexpr std::array kNames = {"all_reduce", "all_gather", "reduce_scatter"};
  std::array<std::string, kNames.size()> times;
  for (int i = -2; i < rounds; ++i) {
    for (size_t kind = 0; kind < kNames.size(); ++kind) {
      world.barrier();
      const Clock::time_point begin = Clock::now();
      if (kind == 0) world.all_reduce(x);
      if (kind == 1) world.all_gather(x, shard);
      if (kind == 2) world.reduce_scatter(shard, x);
      const double ms = 1e3 * world.sum(seconds_since(begin)) / world.size();
      if (i >= 0) times[kind] += fmt::format("{}{:.4f}", times[kind].empty() ? "" : ", ", ms);
    }
  }
  if (mpi.rank() == 0) {
    fmt::print("{{\"ranks\": {}, \"bytes\": {}", world.size(), numel * 4);
    for (size_t kind = 0; kind < kNames.size(); ++kind) {
      fmt::print(", \"{}\": [{}]", kNames[kind], times[kind]);
    }
    fmt::print("}}\n");
  }
  engine.leave(std::chrono::seconds(10));
  return 0;
}

int run(int argc, char** argv) {
  MpiProcess mpi(&argc, &argv);
  int64_t small = 4096, large = 16 << 20, rounds = 200;
  bool links = false, parts = false;
  int64_t node_size = 0;
  std::string node_link = "node=20,0.04", net_link = "net=40,0.005";
  Args args("Times collectives.");
  args.bind("links", links, "instead: how true emulated links are to their figures");
  args.bind("parts", parts, "instead: a large reduce-scatter and all-gather beside an all-reduce");
  args.bind("node_size", node_size, "instead: large collectives on nodes of this many ranks");
  args.bind("node_link", node_link, "of ranks of a node: microseconds, GB/s");
  args.bind("net_link", net_link, "of ranks of two nodes");
  args.bind("small", small, "bytes of the small all-reduce");
  args.bind("large", large, "bytes of the large all-reduce");
  args.bind("rounds", rounds, "calls of the small one; a tenth of it of the large one");
  if (!args.parse(argc, argv)) return 0;
  Runtime runtime(Device::cpu, mpi.rank());
  const Runtime::Use use(runtime);
  const int large_rounds = static_cast<int>(std::max<int64_t>(1, rounds / 10));
  if (links) return measure_links(mpi);
  if (parts) return measure_parts(mpi, large, large_rounds);
  if (node_size > 0) {
    Links nodes;
    nodes.node_size = node_size;
    parse_link(node_link, nodes);
    parse_link(net_link, nodes);
    return measure_nodes(mpi, nodes, large, large_rounds);
  }
  std::vector<double> latencies, ours, theirs;
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
