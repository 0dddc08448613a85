#include <atomic>
#include <thread>

#include "comm/launch.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Tensor zeros(int64_t count) { return Tensor::zeros({count}, DType::f32); }

/// Fails the test unless the run ends within seconds with an Error that has all of `parts`.
void check_run_fails(int ranks, const std::function<void(const Communicator&)>& body,
                     const std::vector<std::string>& parts, double timeout = 30) {
  const Clock::time_point begin = Clock::now();
  check_throws<Error>([&] { run_threads(ranks, body, timeout); }, parts);
  REQUIRE(Clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("ranks that call different collectives hear of it, with both names") {
  check_run_fails(2,
                  [](const Communicator& world) {
                    world.barrier();
                    if (world.rank() == 0) world.all_reduce(zeros(100));
                    if (world.rank() == 1) world.all_gather(zeros(200), zeros(100));
                  },
                  {"ranks of world disagree", "all_reduce #2 (f32, 100 elements)",
                   "all_gather #2 (f32, 200 elements)"});
}

TEST_CASE("a disagreement is an error on both sides") {
  for (int64_t count : {10, 100000}) {  // with the header, and apart from it
    std::vector<std::string> errors(2);
    run_threads(2, [&](const Communicator& world) {
      try {
        world.all_reduce(zeros(count + world.rank()));
      } catch (const Error& error) {
        errors[world.rank()] = error.what();
        std::this_thread::sleep_for(milliseconds(50));
      }
    });
    for (const std::string& error : errors) {
      CAPTURE(error);
      REQUIRE(error.find(fmt::format("{} elements", count)) != std::string::npos);
      REQUIRE(error.find(fmt::format("{} elements", count + 1)) != std::string::npos);
    }
  }
}

TEST_CASE("shape, dtype, root and reduction must agree") {
  check_run_fails(
      3,
      [](const Communicator& world) {
        world.all_reduce(Tensor::zeros({8}, world.rank() == 2 ? DType::f64 : DType::f32));
      },
      {"f64, 8 elements", "f32, 8 elements"});
  check_run_fails(2,
                  [](const Communicator& world) {
                    world.broadcast(zeros(8),
                                    world.rank());  // two roots: both send, neither listens
                    world.barrier();
                  },
                  {"is in broadcast #1, root", "in barrier #2"});
  check_run_fails(3,
                  [](const Communicator& world) {
                    world.broadcast(zeros(8), world.rank() == 2 ? 1 : 0);
                    world.barrier();
                  },
                  {"rank 1 is in barrier #2", "rank 2 in broadcast #1, root 1"});
  check_run_fails(2,
                  [](const Communicator& world) {
                    world.all_reduce(zeros(8), world.rank() == 0 ? ReduceOp::sum : ReduceOp::max);
                  },
                  {"f32, 8 elements)", "f32, 8 elements, max)"});
  check_run_fails(2,
                  [](const Communicator& world) {
                    if (world.rank() == 0) world.send(zeros(8), 1);
                    if (world.rank() == 1) world.recv(zeros(9), 0);
                  },
                  {"send #1 (f32, 8 elements)", "recv #1 of 9 elements of f32"});
}

TEST_CASE("a rank that throws ends the run with its own message") {
  check_run_fails(4,
                  [](const Communicator& world) {
                    world.barrier();
                    if (world.rank() == 2) fail("the dog ate the gradients");
                    world.all_reduce(zeros(1000));
                  },
                  {"the dog ate the gradients"});
}

TEST_CASE("a failure is announced even by a rank that is gone at once") {
  // Rank 2 alone sees the disagreement, and its engine ends right after; lost announcements, which
  // leave the others in their barrier, come about once in a hundred runs.
  for (int run = 0; run < 500; ++run) {
    check_run_fails(
        3,
        [](const Communicator& world) {
          world.broadcast(zeros(8), world.rank() == 2 ? 1 : 0);
          world.barrier();
        },
        {"ranks of world disagree"}, /*timeout=*/5);
  }
}

TEST_CASE("a rank that leaves early is missed, by name") {
  check_run_fails(3,
                  [](const Communicator& world) {
                    if (world.rank() != 1) world.all_reduce(zeros(10));
                  },
                  {"rank 1 has left the run", "all_reduce #1 of world"});
}

TEST_CASE("a deadlock is reported rank by rank") {
  std::atomic<bool> over{false};
  check_run_fails(
      3,
      [&](const Communicator& world) {
        const Communicator pair = world.split("pair", [](int rank) { return rank == 2; });
        if (world.rank() == 0) pair.recv(zeros(5), 1);
        if (world.rank() == 1) world.all_reduce(zeros(7));
        // Rank 2 computes, and looks up when the others have given up.
        const Clock::time_point begin = Clock::now();
        while (!over && Clock::now() - begin < milliseconds(2500)) {
          std::this_thread::sleep_for(milliseconds(5));
        }
        world.barrier();
      },
      {"is not finished after 0.5 s",
       "rank 0 waits in recv #1 of pair from rank 1 (f32, 5 elements)",
       "rank 1 waits in all_reduce #2 of world (f32, 7 elements)",
       "rank 2 is outside communication"},
      0.5);
}

TEST_CASE("after a failure every further operation fails at once") {
  std::vector<int> failures(2);
  run_threads(2, [&](const Communicator& world) {
    for (int i = 0; i < 3; ++i) {
      try {
        world.all_reduce(zeros(world.rank() + 1));
      } catch (const Error&) {
        ++failures[world.rank()];
      }
    }
  });
  REQUIRE(failures == std::vector<int>({3, 3}));
}

TEST_CASE("wrong arguments are refused before anything is sent") {
  run_threads(2, [](const Communicator& world) {
    const auto refused = [](const std::function<void()>& call, const std::string& part) {
      try {
        call();
      } catch (const Error& error) {
        USP_CHECK(std::string(error.what()).find(part) != std::string::npos, "{}", error.what());
        return;
      }
      fail("nothing was thrown: {}", part);
    };
    refused([&] { world.reduce_scatter(zeros(3), zeros(7)); }, "7 elements of f32 into 3");
    refused([&] { world.all_gather(zeros(7), zeros(3)); }, "3 elements of f32 into 7");
    refused([&] { world.broadcast(zeros(3), 2); }, "root 2 of 2 ranks");
    refused([&] { world.send(zeros(3), -1); }, "peer -1 of 2 ranks");
    refused([&] { world.send(zeros(3), world.rank()); }, "itself");
    refused(
        [&] {
          world.all_reduce(Tensor::zeros({4, 4}, DType::f32).narrow(1, 0, 2));
        },
        "contiguous");
    refused([&] { world.all_to_all(zeros(3), zeros(3)); }, "3 elements into 3");
    const std::vector<int64_t> two = {1, 2}, three = {1, 1, 1};
    refused([&] { world.all_to_all_v_async(zeros(3), zeros(3), three, two).wait(); },
            "3 and 2 counts");
    refused([&] { world.all_to_all_v_async(zeros(3), zeros(4), two, two).wait(); },
            "3 and 3 elements");
    world.barrier();
  });
}

TEST_CASE("two communicators enqueued in crossing order do not deadlock") {
  run_threads(
      2,
      [](const Communicator& world) {
        const Communicator a = world.split("a", [](int) { return 0; });
        const Communicator b = world.split("b", [](int) { return 0; });
        for (int i = 0; i < 20; ++i) {
          const Tensor x = zeros(200000), y = zeros(200000);
          Handle first = (world.rank() == 0 ? a : b).all_reduce_async(world.rank() == 0 ? x : y);
          Handle second = (world.rank() == 0 ? b : a).all_reduce_async(world.rank() == 0 ? y : x);
          first.wait();
          second.wait();
        }
      },
      5);
}

/// Activations go down a pipeline and gradients up it, in the order of the 1F1B schedule: in its
/// steady state neighbors send to each other at the same time.
void one_forward_one_backward(const Communicator& world, int64_t micro_batches, int64_t count) {
  const int stage = world.rank(), stages = world.size();
  const bool first = stage == 0, last = stage == stages - 1;
  const int64_t warmup = std::min<int64_t>(stages - 1 - stage, micro_batches);
  const auto forward = [&](int64_t micro) {
    const Tensor x = zeros(count);
    if (!first) world.recv(x, stage - 1);
    if (!first) USP_CHECK(x.data<float>()[count - 1] == float(micro + stage - 1), "activation");
    ops::fill(x, double(micro + stage));
    return x;
  };
  const auto backward = [&](int64_t micro) {
    const Tensor dy = zeros(count);
    if (!last) world.recv(dy, stage + 1);
    if (!last) USP_CHECK(dy.data<float>()[0] == float(micro - stage - 1), "gradient");
    ops::fill(dy, double(micro - stage));
    return dy;
  };
  std::vector<Handle> sent;
  int64_t next_forward = 0, next_backward = 0;
  const auto run_forward = [&] {
    const Tensor y = forward(next_forward++);
    if (!last) sent.push_back(world.send_async(y, stage + 1));
  };
  const auto run_backward = [&] {
    const Tensor dx = backward(next_backward++);
    if (!first) sent.push_back(world.send_async(dx, stage - 1));
  };
  for (int64_t i = 0; i < warmup; ++i) run_forward();
  while (next_forward < micro_batches) {
    run_forward();
    run_backward();
  }
  while (next_backward < micro_batches) run_backward();
  for (Handle& handle : sent) handle.wait();
}

TEST_CASE("1F1B's sends and receives on one communicator, 4 MB each, do not deadlock") {
  for (int stages : {2, 3, 4}) {
    CAPTURE(stages);
    run_threads(
        stages,
        [](const Communicator& world) { one_forward_one_backward(world, 6, int64_t{1} << 20); },
        20);
  }
}

TEST_CASE("a batch of sends and receives in any order") {
  run_threads(4, [](const Communicator& world) {
    const int next = (world.rank() + 1) % 4, previous = (world.rank() + 3) % 4;
    const Tensor out = zeros(50000), in = zeros(50000);
    ops::fill(out, world.rank());
    // Half of the ranks name the receive first.
    std::vector<SendRecv> batch = {{SendRecv::send, out, next}, {SendRecv::recv, in, previous}};
    if (world.rank() % 2 == 0) std::swap(batch[0], batch[1]);
    world.send_recv_async(batch).wait();
    USP_CHECK(in.data<float>()[49999] == float(previous), "from {}", previous);
  });
}

TEST_CASE("waiting ranks sleep") {
  run_threads(4, [](const Communicator& world) {
    timespec before{}, after{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    if (world.rank() == 0) std::this_thread::sleep_for(milliseconds(500));
    world.barrier();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const double used =
        double(after.tv_sec - before.tv_sec) + 1e-9 * double(after.tv_nsec - before.tv_nsec);
    // Spinning, the three ranks that wait would use 1.5 s on idle cores.
    USP_CHECK(used < 0.25, "{} s of CPU time in half a second of waiting", used);
  });
}

TEST_CASE("where some ranks are refused all are, in the words of the first of them") {
  for (const auto& [first, expected] : {std::pair(1, "rank 1: no GPU"), std::pair(0, "no GPU")}) {
    std::vector<std::string> said(3);
    run_threads(3, [&, first = first](const Communicator& world) {
      refuse_together(world, [] {});
      try {
        refuse_together(world, [&] {
          if (world.rank() >= first) usage_error("no GPU");
        });
      } catch (const RefusedTogether& error) {
        said[world.rank()] = error.what();
      }
    });
    REQUIRE(said == std::vector<std::string>(3, expected));
  }
}

}  // namespace
}  // namespace usp::test
