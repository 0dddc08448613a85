#include "run/traffic.h"

#include "comm/launch.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("rows of traffic tell what the ledger has of steps, divided by their number") {
  run_threads(3, [](const Communicator& world) {
    const Tensor x = Tensor::zeros({30}, DType::f64);  // 240 bytes
    Operations both(world, CommKind::all_reduce);
    both.add(world, CommKind::broadcast).add(world, CommKind::all_reduce);
    const bool sends = world.rank() == 0;
    TrafficCounter counter;
    const std::vector<Traffic> techniques = {
        {"sums", Operations(world, CommKind::all_reduce), 320},
        {"sums, copies", both, 8, ", at most", " and more"},
        {"copies that are not sent", Operations(world, CommKind::all_gather)},
        {"copies that should be", Operations(world, CommKind::all_gather), 16}};
    world.all_reduce(x);
    int64_t of_sums = 0, of_copies = 0;
    for (int step = 0; step < 4; ++step) {
      const Ledger before = Runtime::current().ledger();
      counter.begin_step();
      for (int i = 0; i <= step; ++i) world.all_reduce(x);
      if (step == 2) world.broadcast(x, 0);
      counter.end_step();
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
        {"before", "these"},
        {"sums", "800 bytes a step by rank 0, by formula 320"},
        {"sums, copies", fmt::format("{:.0f} bytes a step by rank 0, at most 8 and more",
                                     double(of_sums + of_copies) / 4)},
        {"copies that should be", "0 bytes a step by rank 0, by formula 16"}};
    ReportRows rows = {{"before", "these"}};
    counter.add_rows(rows, techniques);
    USP_CHECK(rows == expected, "{}, {}", rows[1].second, rows[2].second);
  });
}

}  // namespace
}  // namespace usp::test
