// Products beside an all-reduce, and each of the two alone, in turns: by how much they slow each
// other down, and what is gained by doing both at once. First over the link that this machine's
// ranks have, whose bytes its cores copy; then over an emulated one of an eighth of its speed, for
// most of whose time the cores are free.

#include <algorithm>

#include "base/args.h"
#include "base/clock.h"
#include "comm/launch.h"
#include "comm/links.h"
#include "tensor/console.h"
#include "tensor/ops.h"

namespace usp {
namespace {

constexpr double kSlower = 8;  // the emulated link
constexpr int64_t kShare = 3;  // products take that part of the all-reduce, each alone

/// Seconds that a rank spends on something, the mean of all ranks; they begin together.
double timed(const Communicator& world, const std::function<void()>& done) {
  world.barrier();
  const int64_t begin = clock_ns();
  done();
  return world.sum(seconds_since(begin)) / world.size();
}

/// What a turn took, in seconds.
struct Turn {
  double products, all_reduce;  ///< each alone
  double products_beside;       ///< while the all-reduce runs
  double both;                  ///< until both are done
};

class Bench {
 public:
  Bench(const Communicator& world, int64_t width, int64_t mib)
      : world_(world),
        width_(width),
        a_(Tensor::zeros({width, width}, DType::f32)),
        b_(Tensor::zeros({width, width}, DType::f32)),
        c_(Tensor::zeros({width, width}, DType::f32)),
        sums_(Tensor::zeros({mib * (1 << 20) / 4}, DType::f32)) {}

  /// So many products that they take a part of the all-reduce, by the fastest of a few.
  void choose_count() {
    constexpr int kTries = 5;
    count_ = 1;
    double each = 1e30, all = 1e30;
    for (int i = 0; i < kTries; ++i) {
      each = std::min(each, timed(world_, [&] { multiply(); }));
      all = std::min(all, timed(world_, [&] { all_reduce(); }));
    }
    count_ = std::max<int64_t>(1, std::llround(all / each / kShare));
  }

  // [turn]
  Turn turn() {
    Turn turn{};
    turn.products = timed(world_, [&] { multiply(); });
    turn.all_reduce = timed(world_, [&] { all_reduce(); });
    turn.both = timed(world_, [&] {
      const int64_t begin = clock_ns();
      Handle handle = world_.all_reduce_async(sums_);
      multiply();
      turn.products_beside = seconds_since(begin);
      handle.wait();
    });
    turn.products_beside = world_.sum(turn.products_beside) / world_.size();
    return turn;
  }
  // [turn]

  double gflop() const { return 2e-9 * double(count_) * double(c_.numel()) * double(width_); }

 private:
  void multiply() {
    for (int64_t i = 0; i < count_; ++i) ops::matmul(c_, a_, b_);
  }
  void all_reduce() { world_.all_reduce(sums_); }

  const Communicator& world_;
  int64_t width_;
  Tensor a_, b_, c_, sums_;
  int64_t count_ = 1;
};

/// The median, and between which values half of all lie.
void show(const char* what, std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](double share) { return values[size_t(share * double(values.size() - 1))]; };
  print("{:<42}{:>10.4g}   {:.4g} to {:.4g}\n", what, at(0.5), at(0.25), at(0.75));
}

void compare(Bench& bench, int64_t rounds) {
  bench.choose_count();
  bench.turn();
  std::vector<double> alone, all_reduce, rate, slower, together;
  for (int64_t i = 0; i < rounds; ++i) {
    const Turn turn = bench.turn();
    alone.push_back(bench.gflop() / turn.products);
    all_reduce.push_back(1e3 * turn.all_reduce);
    rate.push_back(turn.products / turn.products_beside);
    slower.push_back(turn.both / turn.all_reduce);
    together.push_back(turn.both / (turn.products + turn.all_reduce));
  }
  show("GFLOP/s of products alone", alone);
  show("ms of the all-reduce alone", all_reduce);
  show("rate of products beside over alone", rate);
  show("time of the all-reduce beside over alone", slower);
  show("both at once over one after the other", together);
}

int run(const Communicator& world, int argc, char** argv) {
  int64_t rounds = 40, width = 256, mib = 64;
  Args args("Times products beside an all-reduce, and each alone.");
  args.bind("rounds", rounds, "turns of each, at least 1");
  args.bind("width", width, "rows and columns of the matrices");
  args.bind("mib", mib, "of the all-reduce, in f32");
  if (!args.parse(argc, argv)) return 0;
  for (const auto& [flag, value] : {std::pair{"rounds", rounds}, {"width", width}, {"mib", mib}}) {
    if (value < 1) usage_error("{}={} must be at least 1; try --{} 32", flag, value, flag);
  }
  if (world.size() < 2) usage_error("an all-reduce needs two ranks; try --ranks 2");
  Runtime runtime(Device::cpu, world.rank(), world.size());
  const Runtime::Use use(runtime);
  const UncountedTraffic uncounted;
  Bench bench(world, width, mib);
  print("{} ranks, {} rounds, medians and the middle half\n\nthe link of this machine\n",
        world.size(), rounds);
  compare(bench, rounds);

  const Link own = measure_host_link(world);
  Links links;
  links.node = {own.latency_us, own.gb_per_s / kSlower};
  links.wake_up = measure_wake_up(world);
  world.engine().emulate(links);
  print("\nan emulated link of {:.3f} GB/s\n", links.node.gb_per_s);
  compare(bench, rounds);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
