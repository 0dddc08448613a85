#include <nccl.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "comm/launch.h"
#include "comm/mesh.h"
#include "emulator/emulator.h"
#include "run/comm_config.h"
#include "tensor/ops.h"
#include "testing.h"

/// Ranks that exchange tensors on a GPU by way of the host, held against the same on the CPU.
namespace usp::test {
namespace {

using Bits = std::vector<char>;

/// What an exchange has left on a rank, and what the ledger has of it.
struct Outcome {
  std::map<std::string, Bits> tensors;
  std::map<std::string, std::vector<int64_t>> traffic;

  bool operator==(const Outcome&) const = default;
};

/// One rank's part, whose tensors come out of kernels and go into kernels: a copy that does not
/// wait for these, or they for it, has other values.
class Exchanger {
 public:
  Exchanger(const Communicator& world, DType dtype, int64_t count)
      : world_(world),
        dtype_(dtype),
        count_(count),
        random_(1000 + static_cast<uint64_t>(world.rank())) {}

  Outcome run() {
    collectives();
    messages();
    parts_of_any_size();
    groups();
    for (const auto& [key, entry] : Runtime::current().ledger().entries()) {
      outcome_.traffic[fmt::format("{} {}", key.first, name(key.second))] = {
          entry.calls, entry.payload_bytes, entry.wire_bytes, entry.net_bytes, entry.header_bytes};
    }
    return std::move(outcome_);
  }

 private:
  /// The last of a row of kernels makes it.
  Tensor made(int64_t count) {
    const Tensor x = random_.tensor({count}, dtype_);
    const Tensor sum = Tensor::empty({count}, dtype_);
    ops::add(sum, x, x);
    for (int i = 0; i < 3; ++i) ops::add(sum, sum, x);
    return sum;
  }
  Tensor room(int64_t count) const { return Tensor::empty({count}, dtype_); }
  /// A kernel reads it first.
  void keep(const std::string& name, const Tensor& x) {
    const Tensor twice = Tensor::empty(x.shape(), dtype_);
    ops::add(twice, x, x);
    outcome_.tensors[name] = bits_of(twice);
  }

  void collectives() {
    const int n = world_.size(), me = world_.rank();
    const Tensor sum = made(count_), most = made(count_);
    const Tensor whole = made(n * count_), slice = room(count_);
    const Tensor own = made(count_), all = room(n * count_);
    const Tensor in_place = made(n * count_);
    const Tensor from_all = room(n * count_);
    Handle reducing = world_.all_reduce_async(sum);
    Handle scattering = world_.reduce_scatter_async(slice, whole);
    Handle gathering = world_.all_gather_async(all, own);
    world_.all_reduce(most, ReduceOp::max);
    world_.all_gather(in_place, in_place.narrow(0, me * count_, count_));
    world_.all_to_all(from_all, whole);
    reducing.wait();
    scattering.wait();
    gathering.wait();
    keep("all_reduce", sum);
    keep("maximum", most);
    keep("reduce_scatter", slice);
    keep("all_gather", all);
    keep("all_gather in place", in_place);
    keep("all_to_all", from_all);
    world_.reduce_scatter(whole.narrow(0, me * count_, count_), whole);
    keep("reduce_scatter in place", whole.narrow(0, me * count_, count_));
    for (int root = 0; root < n; ++root) {
      const Tensor x = root == me ? made(count_) : room(count_);
      world_.broadcast(x, root);
      keep(fmt::format("broadcast of {}", root), x);
    }
  }

  void messages() {
    const int n = world_.size(), next = (world_.rank() + 1) % n, previous = (next + n - 2) % n;
    const Tensor sent = made(count_), got = room(count_), again = room(count_);
    std::vector<SendRecv> batch{{SendRecv::recv, got, previous},
                                {SendRecv::recv, again, previous},
                                {SendRecv::send, sent, next},
                                {SendRecv::send, sent, next}};
    world_.send_recv_async(batch).wait();
    keep("received", got);
    keep("received again", again);
  }

  void parts_of_any_size() {
    const int n = world_.size(), me = world_.rank();
    std::vector<int64_t> to, from;
    int64_t all_to = 0, all_from = 0;
    for (int rank = 0; rank < n; ++rank) {
      to.push_back((me + rank) % 3 * count_);  // none for some
      from.push_back((rank + me) % 3 * count_);
      all_to += to.back();
      all_from += from.back();
    }
    const Tensor output = room(all_from);
    world_.all_to_all_v_async(output, made(all_to), from, to).wait();
    keep("all_to_all_v", output);
  }

  void groups() {
    const Communicator pairs = world_.split("pairs", [](int rank) { return rank / 2; });
    const Tensor x = made(count_);
    pairs.all_reduce(x);
    keep("of a part", x);
    world_.barrier();
    outcome_.tensors["numbers"] = {static_cast<char>(world_.any(world_.rank() == 1)),
                                   static_cast<char>(world_.sum(1 + world_.rank()))};
  }

  const Communicator& world_;
  DType dtype_;
  int64_t count_;
  Random random_;
  Outcome outcome_;
};

/// By rank. `kind`: of the engine, on a GPU.
std::vector<Outcome> exchange(int ranks, DType dtype, int64_t count, Device device,
                              int64_t scratch = Engine::kScratchLimit,
                              EngineKind kind = EngineKind::staged) {
  std::vector<Outcome> outcomes(ranks);
  run_threads(
      ranks,
      [&](const Communicator& world) {
        world.engine().limit_scratch(scratch);
        world.engine().set_device_kind(kind);
        outcomes[world.rank()] = Exchanger(world, dtype, count).run();
      },
      60, device);
  return outcomes;
}

/// One order of the emulated device's queues after the other.
class StreamOrder {
 public:
  StreamOrder()
      : use_([] {
          using emulator::Order;
          emulator::Options options = emulator::options;
          options.streams = GENERATE(Order::forward, Order::reverse, Order::shuffled);
          return options;
        }()) {}

 private:
  emulator::Use use_;
};

/// What NCCL does not send, and what times it takes, aside.
std::vector<Outcome> without_headers(std::vector<Outcome> outcomes) {
  for (Outcome& outcome : outcomes) {
    for (auto& [operation, traffic] : outcome.traffic) traffic.back() = 0;
  }
  return outcomes;
}

TEST_CASE("ranks on a GPU exchange what ranks on the CPU exchange, bit for bit and byte for byte",
          "[streams]") {
  const StreamOrder order;
  for (int ranks : {2, 3, 4}) {
    for (DType dtype : kFloatDTypes) {
      for (int64_t count : {1, 3001}) {  // along with a header, and alone
        CAPTURE(ranks, name(dtype), count);
        const bool same = exchange(ranks, dtype, count, Device::cuda) ==
                          exchange(ranks, dtype, count, Device::cpu);
        REQUIRE(same);
      }
    }
  }
}

TEST_CASE("eight ranks on a GPU exchange what eight on the CPU do, by the host and by NCCL") {
  const std::vector<Outcome> cpu = exchange(8, DType::bf16, 3001, Device::cpu);
  const bool staged = exchange(8, DType::bf16, 3001, Device::cuda) == cpu;
  REQUIRE(staged);
  const bool nccl =
      without_headers(exchange(8, DType::bf16, 3001, Device::cuda, Engine::kScratchLimit,
                               EngineKind::nccl)) == without_headers(cpu);
  REQUIRE(nccl);
}

TEST_CASE("a reduction in pieces has the same bits on a GPU", "[streams]") {
  const StreamOrder order;
  const bool same = exchange(3, DType::f32, 3001, Device::cuda, /*scratch=*/1000) ==
                    exchange(3, DType::f32, 3001, Device::cpu, /*scratch=*/1000);
  REQUIRE(same);
}

/// What a test waits for that is a deadlock here; on a sound engine it takes no time.
emulator::Options with_little_patience() {
  emulator::Options options = emulator::options;
  options.patience = 1;
  return options;
}

/// Makes a GPU's copies of a tensor wait for each other: a piece leaves for the host once the
/// fourth before it is back; and it gets back once the next one has left and was queued to come
/// back, too.
class SideBySide {
 public:
  /// Takes how many pieces there are, and how large they are on either way.
  SideBySide(int64_t pieces, int64_t there_bytes, int64_t back_bytes)
      : pieces_(pieces), there_bytes_(there_bytes), back_bytes_(back_bytes) {}

  /// From here on, until it is called without tensors.
  void watch(const Tensor& input, const Tensor& output) {
    input_ = static_cast<const char*>(input.address());
    output_ = static_cast<const char*>(output.address());
  }
  bool may_begin(const emulator::HostCopy& copy) const {
    const int64_t pieces_back = back_ / back_bytes_;
    if (leaves(copy)) return there_ + int64_t(copy.bytes) <= there_bytes_ * (pieces_back + 4);
    const int64_t next = std::min(pieces_, pieces_back + 2);
    return !comes_back(copy) || (there_ >= there_bytes_ * next && queued_ >= back_bytes_ * next);
  }
  void note_queued(const emulator::HostCopy& copy) {
    if (comes_back(copy)) queued_ += int64_t(copy.bytes);
  }
  void note_over(const emulator::HostCopy& copy) {
    if (leaves(copy)) there_ += int64_t(copy.bytes);
    if (comes_back(copy)) back_ += int64_t(copy.bytes);
  }
  bool is_over() const {
    return there_ == pieces_ * there_bytes_ && back_ == pieces_ * back_bytes_;
  }

 private:
  bool leaves(const emulator::HostCopy& copy) const {
    return !copy.to_device && is_in(copy.from, input_, pieces_ * there_bytes_);
  }
  bool comes_back(const emulator::HostCopy& copy) const {
    return copy.to_device && is_in(copy.to, output_, pieces_ * back_bytes_);
  }
  static bool is_in(const void* address, const char* begin, int64_t bytes) {
    return begin != nullptr && address >= begin && address < begin + bytes;
  }

  int64_t pieces_, there_bytes_, back_bytes_;
  std::atomic<const char*> input_ = nullptr, output_ = nullptr;
  std::atomic<int64_t> there_ = 0, queued_ = 0, back_ = 0;  ///< bytes; queued: for the way back
};

TEST_CASE("pieces of a reduction go to the host, are summed and go back to the GPU side by side",
          "[streams]") {
  const StreamOrder order;
  const int ranks = GENERATE(2, 3);
  const bool all = GENERATE(true, false);  // all-reduce, or reduce-scatter
  CAPTURE(ranks, all);
  constexpr int64_t kPieces = 12, kElements = 50;  // of a piece of each rank's slice
  const int64_t bytes = ranks * kElements * 8;
  std::deque<SideBySide> copies;
  for (int rank = 0; rank < ranks; ++rank) {
    copies.emplace_back(kPieces, bytes, all ? bytes : bytes / ranks);
  }
  emulator::Options options = with_little_patience();
  emulator::CopyHooks hooks;
  hooks.may_begin = [&](const emulator::HostCopy& copy) {
    return std::ranges::all_of(copies, [&](const auto& of) { return of.may_begin(copy); });
  };
  hooks.queued = [&](const emulator::HostCopy& copy) {
    for (SideBySide& of_rank : copies) of_rank.note_queued(copy);
  };
  hooks.over = [&](const emulator::HostCopy& copy) {
    for (SideBySide& of_rank : copies) of_rank.note_over(copy);
  };
  options.copies = std::make_shared<emulator::CopyHooks>(hooks);
  const emulator::Use use(options);
  run_threads(
      ranks,
      [&](const Communicator& world) {
        world.engine().limit_scratch(2 * kElements * 8 * (ranks - 1));
        const Tensor x = Tensor::empty({ranks * kPieces * kElements}, DType::f64);
        const Tensor slice = Tensor::empty({kPieces * kElements}, DType::f64);
        const Tensor& result = all ? x : slice;
        ops::fill(x, 1 + world.rank());
        SideBySide& of_rank = copies[world.rank()];
        of_rank.watch(x, result);
        if (all) world.all_reduce(x);
        if (!all) world.reduce_scatter(slice, x);
        Runtime::current().wait();
        of_rank.watch(Tensor(), Tensor());
        USP_CHECK(of_rank.is_over(), "not every piece was copied once each way");
        const double sum = ranks * (ranks + 1) / 2;
        USP_CHECK(result.items() == Values(result.numel(), sum), "the sum is {}", result.item(0));
      },
      20, Device::cuda);
}

TEST_CASE("an all-gather in place lets a rank read its own part meanwhile, and copies it once",
          "[streams]") {
  const StreamOrder order;
  constexpr int64_t kCount = 5000;
  std::atomic<int64_t> there = 0, back = 0;
  emulator::Options options = emulator::options;
  emulator::CopyHooks hooks;
  hooks.queued = [](const emulator::HostCopy&) {};
  hooks.may_begin = [](const emulator::HostCopy&) { return true; };
  hooks.over = [&](const emulator::HostCopy& copy) {
    if (copy.bytes >= kCount * 8) (copy.to_device ? back : there) += int64_t(copy.bytes);
  };
  options.copies = std::make_shared<emulator::CopyHooks>(hooks);
  const emulator::Use use(options);
  run_threads(
      3,
      [&](const Communicator& world) {
        const Tensor all = Tensor::empty({3 * kCount}, DType::f64);
        const Tensor own = all.narrow(0, world.rank() * kCount, kCount);
        const Tensor twice = Tensor::empty({kCount}, DType::f64);
        ops::fill(all, 0);
        ops::fill(own, 1 + world.rank());
        Handle gathering = world.all_gather_async(all, own);
        ops::add(twice, own, own);
        gathering.wait();
        for (int rank = 0; rank < 3; ++rank) {
          const bool same = all.narrow(0, rank * kCount, 1).item() == 1 + rank;
          USP_CHECK(same, "the part of rank {} has not come", rank);
        }
        USP_CHECK(twice.item(kCount - 1) == 2 + 2 * world.rank(), "twice its own is {}",
                  twice.item(kCount - 1));
      },
      20, Device::cuda);
  // Each rank's part goes to the host, and those of two others come to its GPU.
  REQUIRE(there == 3 * kCount * 8);
  REQUIRE(back == 3 * 2 * kCount * 8);
}

TEST_CASE("NCCL's ranks exchange what ranks on the CPU exchange, and count it as they do",
          "[streams]") {
  const StreamOrder order;
  for (int ranks : {2, 3, 4}) {
    for (DType dtype : kFloatDTypes) {
      for (int64_t count : {1, 3001}) {
        CAPTURE(ranks, name(dtype), count);
        const bool same = without_headers(exchange(ranks, dtype, count, Device::cuda,
                                                   Engine::kScratchLimit, EngineKind::nccl)) ==
                          without_headers(exchange(ranks, dtype, count, Device::cpu));
        REQUIRE(same);
      }
    }
  }
}

TEST_CASE("NCCL brings integers, too") {
  run_threads(
      2,
      [](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        const std::vector<int32_t> mine{10 + world.rank(), 7};
        const Tensor own = Tensor::from_host(mine, {2}), all = Tensor::empty({4}, DType::i32);
        world.all_gather(all, own);
        USP_CHECK(all.items() == Values({10, 7, 11, 7}), "another one came");
      },
      20, Device::cuda);
}

/// Numbers that differ from rank to rank.
Tensor numbers(int64_t count, double first) {
  Values values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = first + double(i % 1009);
  return Tensor::from_host(values, {count}, DType::f64);
}

TEST_CASE("the host waits for no message of NCCL's, and reads what it has brought", "[streams]") {
  const StreamOrder order;
  run_threads(
      3,
      [](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        const Accelerator& accelerator = *Runtime::current().accelerator();
        const Tensor x = Tensor::zeros({3000}, DType::f64), sum = Tensor::zeros({3000}, DType::f64);
        const int64_t before = accelerator.waits();
        for (int i = 0; i < 5; ++i) {
          ops::fill(x, world.rank() + i);
          Handle handle = world.all_reduce_async(x);
          handle.wait();
          ops::add(sum, sum, x);
        }
        USP_CHECK(accelerator.waits() == before, "the host has waited");
        USP_CHECK(sum.items() == Values(3000, 5 * 3 + 3 * 10), "{}", sum.item());
      },
      60, Device::cuda);
}

TEST_CASE("what a GPU computes meanwhile does not wait for a message of NCCL's") {
  const StreamOrder order;
  const emulator::Use use(with_little_patience());
  std::atomic<bool> computed = false;
  run_threads(
      2,
      [&](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        const Tensor x = numbers(3000, world.rank()), y = Tensor::zeros({3000}, DType::f64);
        world.all_reduce(x);  // when they have their communicator
        USP_CHECK(x.item(1) == 3, "{}", x.item(1));
        for (int i = 0; world.rank() == 1 && !computed && i < 3000; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        Handle handle = world.all_reduce_async(x);
        ops::fill(y, 7);
        if (world.rank() == 0) {
          USP_CHECK(y.item() == 7, "{}", y.item());
          computed = true;
        }
        handle.wait();
        USP_CHECK(x.item(1) == 6, "{}", x.item(1));
      },
      60, Device::cuda);
}

TEST_CASE("NCCL's collectives of several groups begin in the order in which they were queued",
          "[streams]") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    emulator::Options options = with_little_patience();
    options.streams = emulator::Order::shuffled;
    options.seed = seed;
    const emulator::Use use(options);
    run_threads(
        2,
        [](const Communicator& world) {
          world.engine().set_device_kind(EngineKind::nccl);
          const Communicator twin = world.split("twin", [](int) { return 0; });
          const Tensor x = numbers(3000, world.rank()), y = numbers(3000, 5 * world.rank());
          for (int i = 0; i < 3; ++i) {
            Handle first = world.all_reduce_async(x), second = twin.all_reduce_async(y);
            second.wait();
            first.wait();
          }
          USP_CHECK(x.item(1) == 3 * 4 && y.item(1) == 7 * 4, "{} {}", x.item(1), y.item(1));
        },
        60, Device::cuda);
  }
}

TEST_CASE("what has arrived is not overwritten by the next message before it is on the GPU",
          "[streams]") {
  const StreamOrder order;
  run_threads(
      2,
      [](const Communicator& world) {
        constexpr int64_t kCount = 5000;
        std::vector<Tensor> got;
        for (int i = 0; i < 4; ++i) {
          if (world.rank() == 0) {
            world.send(numbers(kCount, 10000 * i), 1);
            continue;
          }
          got.push_back(Tensor::empty({kCount}, DType::f64));
          Handle handle = world.recv_async(got.back(), 0);
          std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the host does other things
          handle.wait();
        }
        for (size_t i = 0; i < got.size(); ++i) {
          USP_CHECK(same_bits(got[i], numbers(kCount, 10000 * double(i))),
                    "message {} of {} is another one", i, got.size());
        }
      },
      60, Device::cuda);
}

/// The most pinned memory that two ranks have meanwhile, which sum tensors of ever other sizes.
size_t pinned_by_sums_of_many_sizes() {
  constexpr int64_t kMessages = 40;
  const auto count_of = [](int64_t message) { return 10000 + 1500 * message; };
  std::atomic<size_t> most = 0;
  run_threads(
      2,
      [&](const Communicator& world) {
        std::vector<Tensor> sums;
        for (int64_t i = 0; i < kMessages; ++i) {
          sums.push_back(numbers(count_of(i), world.rank()));
          world.all_reduce(sums.back());
          size_t now = emulator::pinned_bytes(), seen = most;
          while (now > seen && !most.compare_exchange_weak(seen, now)) {
          }
        }
        for (int64_t i = 0; i < kMessages; ++i) {
          const Tensor expected = numbers(count_of(i), 0);
          ops::add(expected, expected, numbers(count_of(i), 1));
          USP_CHECK(same_bits(sums[i], expected), "sum {} of {} is another one", i, kMessages);
        }
      },
      60, Device::cuda);
  return most;
}

TEST_CASE("pinned memory of sizes that come no more is given back, and no message is lost by it") {
  const size_t all = pinned_by_sums_of_many_sizes();  // 12 MB of a rank's sums, and of its uploads
  REQUIRE(setenv("USP_MOST_PINNED", "1000000", /*replace=*/1) == 0);
  const size_t kept = pinned_by_sums_of_many_sizes();
  unsetenv("USP_MOST_PINNED");
  CAPTURE(all, kept);
  REQUIRE(kept + 8000000 < all);
}

TEST_CASE("a GPU's memory is not used again before wait()", "[streams]") {
  const StreamOrder order;
  run_threads(
      2,
      [](const Communicator& world) {
        constexpr int64_t kCount = 5000;
        const Allocator& allocator = Runtime::current().allocator();
        Tensor result = Tensor::zeros({kCount}, DType::f64);
        const int64_t before = allocator.live_bytes();
        Handle handle;
        {
          const Tensor x = numbers(kCount, world.rank());
          handle = world.all_reduce_async(x);
        }
        USP_CHECK(allocator.live_bytes() == before + kCount * 8, "{} bytes live, {} before",
                  allocator.live_bytes(), before);
        ops::fill(Tensor::empty({kCount}, DType::f64), kNaN);  // which may lie where x has lain
        handle.wait();
        USP_CHECK(allocator.live_bytes() == before, "{} bytes live", allocator.live_bytes());
        // Nor does a message touch what lies there by now.
        const Tensor next = Tensor::empty({kCount}, DType::f64);
        ops::fill(next, 7);
        ops::add(result, result, next);
        USP_CHECK(result.items() == Values(kCount, 7), "a message has changed another tensor");
      },
      60, Device::cuda);
}

TEST_CASE("to begin an exchange the host does not wait, and a wait is for the message alone") {
  run_threads(
      2,
      [](const Communicator& world) {
        const Accelerator& accelerator = *Runtime::current().accelerator();
        const Tensor x = numbers(3000, world.rank());
        const int64_t before = accelerator.waits();
        Handle handle = world.all_reduce_async(x);
        ops::add(Tensor::empty({3000}, DType::f64), numbers(3000, 0), numbers(3000, 0));
        USP_CHECK(accelerator.waits() == before, "the host has waited");
        handle.wait();
        USP_CHECK(accelerator.waits() <= before + 1, "the host has waited {} times",
                  accelerator.waits() - before);
      },
      60, Device::cuda);
}

TEST_CASE("what ranks tell each other about themselves never touches a GPU") {
  run_threads(
      3,
      [](const Communicator& world) {
        Allocator& allocator = Runtime::current().allocator();
        allocator.record_events(true);
        const int64_t waits = Runtime::current().accelerator()->waits();
        world.any(world.rank() == 1);
        world.sum(2);
        world.barrier();
        const Communicator part = world.split("part", [](int rank) { return rank % 2; });
        const auto texts = world.all_gather_text(fmt::format("rank {}", world.rank()));
        USP_CHECK(texts[2] == "rank 2", "{}", texts[2]);
        const HostScope on_host;
        const Tensor x = numbers(5000, world.rank());
        world.all_reduce(x);
        USP_CHECK(x.data<double>()[1] == 6, "{}", x.data<double>()[1]);
        USP_CHECK(allocator.events().empty(), "{} allocations", allocator.events().size());
        USP_CHECK(Runtime::current().accelerator()->waits() == waits, "the host has waited");
      },
      60, Device::cuda);
}

TEST_CASE("ranks take the GPUs of their machine in turn, and know who shares theirs") {
  for (int gpus : {1, 2, 3}) {
    emulator::Options options = emulator::options;
    options.device_count = gpus;
    const emulator::Use use(options);
    std::vector<std::string> addresses(3);
    run_threads(
        3,
        [&](const Communicator& world) {
          const auto& device = dynamic_cast<SideCopies&>(*Runtime::current().accelerator());
          addresses[world.rank()] = device.address();
          const Tensor x = numbers(3000, world.rank());
          world.all_reduce(x);
          USP_CHECK(x.item(1) == 6, "{}", x.item(1));
        },
        60, Device::cuda);
    REQUIRE(std::set(addresses.begin(), addresses.end()).size() == size_t(gpus));
  }
}

/// What use_nccl() says on each of 3 ranks where so many GPUs are seen, and this NCCL; "" if
/// nothing.
std::vector<std::string> refusals(int gpus, int nccl_version) {
  emulator::Options options = emulator::options;
  options.device_count = gpus;
  options.nccl_version = nccl_version;
  const emulator::Use use(options);
  std::vector<std::string> said(3);
  run_threads(
      3,
      [&](const Communicator& world) {
        try {
          use_nccl(world);
        } catch (const RefusedTogether& error) {
          said[world.rank()] = error.what();
        }
      },
      60, Device::cuda);
  return said;
}

TEST_CASE("NCCL wants a GPU for each rank, and all ranks say the same where there is none") {
  const auto each = [](const std::string& text) { return std::vector<std::string>(3, text); };
  const auto sharing = [&](int other) {
    return each(fmt::format(
        "comm=nccl: ranks 0 and {} share a GPU, and NCCL wants one for each rank; try --comm mpi, "
        "or as many ranks as there are GPUs",
        other));
  };
  REQUIRE(refusals(4, 0) == each(""));
  REQUIRE(refusals(3, 30000) == each(""));
  REQUIRE(refusals(2, 0) == sharing(2));
  REQUIRE(refusals(1, 0) == sharing(1));
  for (const auto& [version, text] : {std::pair(21903, "2.19.3"), std::pair(2804, "2.8.4")}) {
    REQUIRE(refusals(3, version) ==
            each(fmt::format("comm=nccl: the NCCL here is {}, and this program was built with "
                             "2.28.9; try LD_LIBRARY_PATH=/folder/with/that or a later one, or "
                             "--comm mpi",
                             text)));
  }
}

TEST_CASE("NCCL's ranks of a host that see one GPU each are told to see all") {
  setenv("CUDA_VISIBLE_DEVICES", "0", /*replace=*/1);
  const std::vector<std::string> one = refusals(3, 0);
  setenv("NCCL_P2P_DISABLE", "1", /*replace=*/1);
  const std::vector<std::string> by_the_host = refusals(3, 0);
  unsetenv("NCCL_P2P_DISABLE");
  setenv("CUDA_VISIBLE_DEVICES", "0,1,2", /*replace=*/1);
  const std::vector<std::string> all = refusals(3, 0);
  unsetenv("CUDA_VISIBLE_DEVICES");
  REQUIRE(one ==
          std::vector<std::string>(
              3,
              "comm=nccl: ranks 0 and 1 of a host see one GPU each, and NCCL maps the memory "
              "of both; try srun --gpus-per-node in place of --gpus-per-task, "
              "NCCL_P2P_DISABLE=1, or --comm mpi"));
  REQUIRE(all == std::vector<std::string>(3));
  REQUIRE(by_the_host == all);
}

TEST_CASE("NCCL's ranks share a GPU from 2.30 on, where they are told to") {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", /*replace=*/1);
  const std::vector<std::string> allowed = refusals(1, 23000), old = refusals(1, 22999);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  REQUIRE(allowed == std::vector<std::string>(3));
  REQUIRE(old ==
          std::vector<std::string>(
              3,
              "comm=nccl: ranks 0 and 1 share a GPU, which NCCL allows from 2.30 on, and the "
              "NCCL here is 2.29.99; try --comm mpi, or as many ranks as there are GPUs"));
  REQUIRE(refusals(1, 23000)[0].find("share a GPU, and NCCL wants one for each rank") !=
          std::string::npos);
}

TEST_CASE("input and output of an exchange lie on one device") {
  check_throws<Error>(
      [] {
        run_threads(
            2,
            [](const Communicator& world) {
              const Tensor there = Tensor::zeros({2}, DType::f64);
              const HostScope on_host;
              world.all_gather(Tensor::zeros({4}, DType::f64), there);
            },
            10, Device::cuda);
      },
      {"all_gather", "cuda", "cpu"});
}

TEST_CASE("ranks on GPUs that disagree, fail or do not come are reported as those on CPUs are") {
  const auto run = [](const std::function<void(const Communicator&)>& body) {
    run_threads(2, body, /*timeout_seconds=*/1, Device::cuda);
  };
  check_throws<Error>(
      [&] {
        run([](const Communicator& world) {
          world.all_reduce(numbers(world.rank() == 0 ? 4000 : 5000, 0));
        });
      },
      {"disagree", "4000", "5000"});
  check_throws<Error>(
      [&] {
        run([](const Communicator& world) {
          if (world.rank() == 1) throw Error("rank 1 has a fault");
          world.all_reduce(numbers(4000, 0));
        });
      },
      {"rank 1 has a fault"});
  check_throws<Error>(
      [&] {
        run([](const Communicator& world) {
          if (world.rank() == 0) world.recv(Tensor::empty({5}, DType::f64), 1);
          if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        });
      },
      {"recv #1 of world from rank 1 (f64, 5 elements) is not finished after 1.0 s; what the ranks "
       "are in:\n  rank 0 waits in recv #1 of world from rank 1 (f64, 5 elements) for ",
       "\n  rank 1 is outside communication for ", "; last finished: nothing"});
}

/// Two ranks that have exchanged a tensor by NCCL, and so have their communicator.
void run_by_nccl(double timeout_seconds,
                 const std::function<void(const Communicator&, const Tensor&)>& body) {
  run_threads(
      2,
      [&](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        const Tensor x = numbers(4000, world.rank());
        world.all_reduce(x);
        x.items();
        body(world, x);
      },
      timeout_seconds, Device::cuda);
}

TEST_CASE("a message of NCCL's that fails, or never ends, ends the run") {
  const auto run = [](const std::function<void(const Communicator&, const Tensor&)>& body) {
    run_by_nccl(/*timeout_seconds=*/1, body);
  };
  const auto reduce = [](const Communicator& world, const Tensor& x) {
    world.all_reduce(x);
    x.items();  // a host that waits for it goes on
    world.barrier();
  };
  check_throws<Error>(
      [&] {
        run([&](const Communicator& world, const Tensor& x) {
          if (world.rank() == 0) return reduce(world, x);
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        });
      },
      {"all_reduce #2 of world (f64, 4000 elements) is not finished after 1.0 s; what the ranks "
       "are "
       "in:\n  rank 0 is in all_reduce #2 of world (f64, 4000 elements) for ",
       "\n  rank 1 is outside communication for ", "; last finished: all_reduce #1 of world"});
  check_throws<Error>(
      [&] {
        run([&](const Communicator& world, const Tensor& x) {
          if (world.rank() == 1) throw Error("rank 1 has a fault");
          reduce(world, x);
        });
      },
      {"rank 1 has a fault"});
  emulator::Options options = emulator::options;
  options.nccl_error = ncclRemoteError;
  const emulator::Use use(options);
  check_throws<Error>(
      [&] {
        run([&](const Communicator& world, const Tensor& x) {
          if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
          reduce(world, x);
        });
      },
      {"all_reduce", "of world", "remote process exited"});
}

/// Ranks that send by NCCL, in whatever order of the device's queues, without a problem.
void exchange_by_nccl(int ranks, const std::function<void(const Communicator&)>& body) {
  const StreamOrder order;
  const emulator::Use use(with_little_patience());
  run_threads(
      ranks,
      [&](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        body(world);
      },
      20, Device::cuda);
  REQUIRE(emulator::take_report().text() == "");
}

TEST_CASE("in a ring of NCCL's each rank may send before it receives") {
  exchange_by_nccl(3, [](const Communicator& world) {
    const Tensor here = numbers(1000, world.rank()), coming = Tensor::empty({1000}, DType::f64);
    Handle sending = world.send_async(here, (world.rank() + 1) % 3);
    Handle receiving = world.recv_async(coming, (world.rank() + 2) % 3);
    sending.wait();
    receiving.wait();
    USP_CHECK(coming.item(1) == (world.rank() + 2) % 3 + 1, "{}", coming.item(1));
  });
}

TEST_CASE("two stages of NCCL's may each ask for the other's message before they send their own") {
  exchange_by_nccl(2, [](const Communicator& world) {
    const Tensor here = numbers(1000, world.rank()), coming = Tensor::empty({1000}, DType::f64);
    Handle receiving = world.recv_async(coming, 1 - world.rank());
    Handle sending = world.send_async(here, 1 - world.rank());
    receiving.wait();
    sending.wait();
    USP_CHECK(coming.item(1) == 2 - world.rank(), "{}", coming.item(1));
  });
}

TEST_CASE("NCCL connects neighbors alone, where these were announced") {
  exchange_by_nccl(3, [](const Communicator& world) {
    world.connect_pairs({{0, 1}, {1, 2}});
    const Tensor x = numbers(10, 5);
    if (world.rank() > 0) world.recv(x, world.rank() - 1);
    ops::add(x, x, x);
    if (world.rank() < 2) world.send(x, world.rank() + 1);
    USP_CHECK(x.item() == 10 << world.rank(), "{}", x.item());
    if (world.rank() == 2) {
      check_throws<Error>([&] { world.send(x, 0); }, {"send", "no messages were announced"});
    }
  });
}

TEST_CASE("a call in which NCCL waits for a rank that does not come is named when time is over") {
  emulator::Options options = emulator::options;
  options.patience = 20;
  const emulator::Use use(options);
  check_throws<Error>(
      [&] {
        run_by_nccl(/*timeout_seconds=*/1, [&](const Communicator& world, const Tensor& x) {
          const Tensor y = Tensor::empty(x.shape(), x.dtype());
          if (world.rank() == 0) return world.all_to_all(y, x);
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
          world.barrier();
        });
      },
      {"all_to_all #2 of world (f64, 0 elements) is not finished after 1.0 s; what the ranks are "
       "in:\n  rank 0 is in all_to_all #2 of world (f64, 0 elements) for ",
       "\n  rank 1 is outside communication for "});
  REQUIRE(emulator::take_report().text() == "");
}

TEST_CASE("no thread of a rank asks a GPU of another one") {
  emulator::Options options = emulator::options;
  options.device_count = 2;
  const emulator::Use use(options);
  for (EngineKind kind : {EngineKind::staged, EngineKind::nccl}) {
    CAPTURE(kind == EngineKind::nccl);
    const bool same =
        without_headers(exchange(2, DType::f32, 3001, Device::cuda, Engine::kScratchLimit, kind)) ==
        without_headers(exchange(2, DType::f32, 3001, Device::cpu));
    REQUIRE(emulator::take_report().text() == "");
    REQUIRE(same);
  }
}

TEST_CASE("NCCL's ranks that disagree are told so, long before an operation takes too long") {
  using Body = std::function<void(const Communicator&, const Tensor&)>;
  const auto disagree = [](const Body& first, const Body& second,
                           const std::vector<std::string>& words) {
    const auto begin = std::chrono::steady_clock::now();
    check_throws<Error>(
        [&] {
          run_by_nccl(/*timeout_seconds=*/60, [&](const Communicator& world, const Tensor& x) {
            (world.rank() == 0 ? first : second)(world, x);
            x.items();
            world.barrier();
          });
        },
        words);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    CAPTURE(took.count());
    REQUIRE(took.count() < 20);
  };
  const Body reduce = [](const Communicator& world, const Tensor& x) { world.all_reduce(x); };
  const std::string here = "all_reduce #2 (f64, 4000 elements)";
  disagree(
      reduce,
      [](const Communicator& world, const Tensor& x) { world.all_reduce(x.narrow(0, 0, 3999)); },
      {"ranks of world disagree", here, "all_reduce #2 (f64, 3999 elements)"});
  disagree(reduce,
           [](const Communicator& world, const Tensor&) {
             world.all_reduce(Tensor::zeros({4000}, DType::f32));
           },
           {"ranks of world disagree", here, "all_reduce #2 (f32, 4000 elements)"});
  disagree(reduce,
           [](const Communicator& world, const Tensor& x) { world.all_reduce(x, ReduceOp::max); },
           {"ranks of world disagree", here, "all_reduce #2 (f64, 4000 elements, max)"});
  disagree(reduce, [](const Communicator& world, const Tensor& x) { world.broadcast(x, 0); },
           {"ranks of world disagree", here, "broadcast #2, root 0 (f64, 4000 elements)"});
  disagree(
      [](const Communicator& world, const Tensor& x) { world.send(x, 1); },
      [](const Communicator& world, const Tensor& x) { world.recv(x.narrow(0, 0, 10), 0); },
      {"ranks of world disagree", "send #1 (f64, 4000 elements)", "recv #1 of 10 elements of f64"});
  const auto exchange = [](int64_t to, int64_t from) {
    return [=](const Communicator& world, const Tensor& x) {
      const int64_t own = world.rank() == 0 ? 0 : 1;
      std::vector<int64_t> sent{to, to}, got{from, from};
      sent[own] = got[own] = 5;
      // Not empty: a rank may read it before it hears that nothing comes.
      const Tensor output = Tensor::zeros({5 + from}, DType::f64);
      world.all_to_all_v_async(output, x.narrow(0, 0, 5 + to), got, sent).wait();
      output.items();
    };
  };
  disagree(exchange(3, 4), exchange(6, 3),
           {"ranks of world disagree", "all_to_all #2", "48 bytes came, 32 were expected"});
}

TEST_CASE("a rank that fails gives up what its GPU waits for, and its thread ends") {
  const auto begin = std::chrono::steady_clock::now();
  check_throws<Error>(
      [] {
        run_by_nccl(/*timeout_seconds=*/30, [](const Communicator& world, const Tensor& x) {
          if (world.rank() == 1) {
            const HostScope on_host;
            return world.recv(Tensor::empty({1}, DType::f64), 0);  // which rank 0 never sends
          }
          const Handle handle = world.all_reduce_async(x);  // to which rank 1 does not come
          throw Error("rank 0 has a fault");
        });
      },
      {"rank 0 has a fault"});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CAPTURE(took.count());
  REQUIRE(took.count() < 8);
}

TEST_CASE("a communicator that is given up while a rank starts something on it is let go by all") {
  emulator::Options options = with_little_patience();
  options.nccl_starts_late = 0.2;
  const emulator::Use use(options);
  check_throws<Error>(
      [] {
        run_by_nccl(/*timeout_seconds=*/20, [](const Communicator& world, const Tensor& x) {
          if (world.rank() == 1) throw Error("rank 1 has a fault");
          world.all_reduce(x);
          x.items();
          world.barrier();
        });
      },
      {"rank 1 has a fault"});
  REQUIRE(emulator::take_report().text() == "");
}

TEST_CASE("a communicator that a rank joins while the run is given up is let go by all") {
  emulator::Options options = with_little_patience();
  options.nccl_joins_late = 0.6;
  const emulator::Use use(options);
  check_throws<Error>(
      [] {
        run_threads(
            3,
            [](const Communicator& world) {
              world.engine().set_device_kind(EngineKind::nccl);
              const Communicator two = world.split("two", [](int rank) { return rank / 2; });
              if (world.rank() == 2) {
                std::this_thread::sleep_for(std::chrono::milliseconds(300));
                throw Error("rank 2 has a fault");
              }
              const Tensor x = numbers(10, 5);
              two.all_reduce(x);
              x.items();
              world.barrier();
            },
            20, Device::cuda);
      },
      {"rank 2 has a fault"});
  REQUIRE(emulator::take_report().text() == "");
}

TEST_CASE("a GPU that answers slowly keeps no rank from hearing of a failure, or of time") {
  using Clock = std::chrono::steady_clock;
  const auto run = [](const std::function<void(const Communicator&)>& of_rank_1) {
    emulator::Options options = emulator::options;
    options.slow_until = Clock::now() + std::chrono::seconds(6);
    const emulator::Use use(options);
    run_by_nccl(/*timeout_seconds=*/1, [&](const Communicator& world, const Tensor& x) {
      emulator::options.nccl_hangs = true;  // by any rank: from the second all-reduce on
      world.all_reduce(x);
      if (world.rank() == 1) return of_rank_1(world);
      world.barrier();  // the host's
    });
  };
  const auto begin = Clock::now();
  check_throws<Error>([&] { run([](const Communicator&) { throw Error("rank 1 has a fault"); }); },
                      {"rank 1 has a fault"});
  check_throws<Error>(
      [&] {
        run([](const Communicator&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        });
      },
      {"is not finished after 1.0 s"});
  const std::chrono::duration<double> took = Clock::now() - begin;
  CAPTURE(took.count());
  REQUIRE(took.count() < 5);
}

}  // namespace
}  // namespace usp::test
