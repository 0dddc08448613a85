#include "run/traffic.h"

#include "comm/launch.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("a table of traffic tells what the ledger has of steps, divided by their number") {
  run_threads(3, [](const Communicator& world) {
    const Tensor x = Tensor::zeros({30}, DType::f64);  // 240 bytes
    Operations both(world, CommKind::all_reduce);
    both.add(world, CommKind::broadcast).add(world, CommKind::all_reduce);
    const bool sends = world.rank() == 0;
    TrafficTable table;
    table.add({"sums", Operations(world, CommKind::all_reduce), 320});
    table.add({"sums, copies", both, 8, ", at most", " and more"});
    table.add({"copies that are not sent", Operations(world, CommKind::all_gather)});
    table.add({"copies that should be", Operations(world, CommKind::all_gather), 16});
    world.all_reduce(x);
    int64_t of_sums = 0, of_copies = 0;
    for (int step = 0; step < 4; ++step) {
      const Ledger before = Runtime::current().ledger();
      table.begin_step();
      for (int i = 0; i <= step; ++i) world.all_reduce(x);
      if (step == 2) world.broadcast(x, 0);
      table.end_step();
      const Ledger& after = Runtime::current().ledger();
      const auto sent = [&](CommKind kind) {
        return (after.get("world", kind) - before.get("world", kind)).wire_bytes;
      };
      of_sums += sent(CommKind::all_reduce);
      of_copies += sent(CommKind::broadcast);
      world.all_reduce(x);
      world.broadcast(x, 0);
    }
    USP_CHECK(of_sums == 10 * 320, "{} bytes of sums", of_sums);
    USP_CHECK((of_copies > 0) == sends || world.rank() == 1, "{} bytes of copies", of_copies);
    const ReportRows expected = {
        {"sums", "800 bytes a step by rank 0, by formula 320"},
        {"sums, copies", fmt::format("{:.0f} bytes a step by rank 0, at most 8 and more",
                                     double(of_sums + of_copies) / 4)},
        {"copies that should be", "0 bytes a step by rank 0, by formula 16"}};
    USP_CHECK(table.report() == expected, "{}, {}", table.report()[0].second,
              table.report()[1].second);
  });
}

}  // namespace
}  // namespace usp::test
