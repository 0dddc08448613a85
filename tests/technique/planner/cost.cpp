#include "planner/cost.h"

#include "technique/planner/layouts.h"

/// Seconds, calculated by hand.
namespace usp::test {
namespace {

ProgramGroup group_of(std::vector<int> members, int rank = 0) {
  return {"group", 0, rank, std::make_shared<const std::vector<int>>(std::move(members))};
}

Exchange exchange_of(CommKind kind, int64_t bytes, int peer = -1) {
  return {.group = 0, .kind = kind, .peer = peer, .payload_bytes = bytes};
}

TEST_CASE("a product costs its operations or its bytes, and more where it is narrow or shallow") {
  Cluster cluster = round_cluster(4);
  Cost cost(cluster);
  Kernel kernel{.op = "linear_forward",
                .kind = KernelKind::matmul,
                .dtype = DType::f32,
                .groups = 1,
                .m = 300,
                .n = 100,
                .k = 25,
                .flops = 1500000,
                .bytes = 1000};
  CHECK(cost.of(kernel) == Approx(1500000e-9));
  kernel.bytes = 2000000;
  CHECK(cost.of(kernel) == Approx(2000000e-9));
  kernel.bytes = 1000;
  cluster.half_width.value = 100;  // the narrower of m and n is 100: half
  CHECK(cost.of(kernel) == Approx(2 * 1500000e-9));
  cluster.half_depth.value = 75;  // k is 25: a quarter
  CHECK(cost.of(kernel) == Approx(8 * 1500000e-9));
  cluster.matmul.value = 0.5;
  CHECK(cost.of(kernel) == Approx(16 * 1500000e-9));
  kernel.kind = KernelKind::attention;
  cluster.attention.value = 0.25;
  CHECK(cost.of(kernel) == Approx(4 * 1500000e-9));
  kernel.flops = 0;
  cluster.memory.value = 0.8;
  CHECK(cost.of(kernel) == Approx(1250e-9));
}

TEST_CASE("a ring's messages have a latency each, and every byte its share of the way") {
  const Cluster cluster = round_cluster(4);
  Cost cost(cluster);
  const ProgramGroup near = group_of({0, 1, 2, 3});
  const auto seconds = [&](CommKind kind, const ProgramGroup& group) {
    return cost.of(exchange_of(kind, 4000), group).arrives;
  };
  // Three hops of 1 us, 4000 bytes at 1 GB/s.
  CHECK(seconds(CommKind::all_gather, near) == Approx(3e-6 + 0.75 * 4e-6));
  CHECK(seconds(CommKind::reduce_scatter, near) == Approx(3e-6 + 0.75 * 4e-6));
  CHECK(seconds(CommKind::all_reduce, near) == Approx(6e-6 + 1.5 * 4e-6));
  CHECK(seconds(CommKind::broadcast, near) == Approx(3e-6 + 4e-6));
  CHECK(seconds(CommKind::barrier, near) == Approx(6e-6));
  CHECK(seconds(CommKind::all_to_all, near) == Approx(1e-6 + 0.75 * 4e-6));
}

TEST_CASE("a rank has its share of the NICs, once, and a ring as many as it has ranks in a node") {
  Cluster cluster = round_cluster(4);
  const auto seconds = [&](CommKind kind, std::vector<int> members) {
    Cost cost(cluster);
    return cost.of(exchange_of(kind, 4000), group_of(std::move(members))).arrives;
  };
  // One of four ranks: a quarter of 0.5 GB/s. 10 us a hop.
  CHECK(seconds(CommKind::all_gather, {0, 4}) == Approx(10e-6 + 0.5 * 32e-6));
  cluster.nics_per_node.value = 4;
  CHECK(seconds(CommKind::all_gather, {0, 4}) == Approx(10e-6 + 0.5 * 8e-6));
  cluster.nics_per_node.value = 1;
  // All four ranks of each node: together the whole NIC.
  CHECK(seconds(CommKind::all_gather, {0, 1, 2, 3, 4, 5, 6, 7}) == Approx(70e-6 + 7.0 / 8 * 8e-6));
  // Half of an all-to-all's peers in the other node; the two ways side by side.
  CHECK(seconds(CommKind::all_to_all, {0, 1, 4, 5}) == Approx(10e-6 + 0.5 * 32e-6));
}

TEST_CASE("a group costs what its ranks make it, whatever group was asked about before") {
  const Cluster cluster = round_cluster(4);
  Cost cost(cluster);
  for (int n : {2, 4, 3, 2, 4, 3}) {
    std::vector<int> members;
    for (int rank = 0; rank < n; ++rank) members.push_back(rank);
    CHECK(cost.of(exchange_of(CommKind::barrier, 0), group_of(members)).busy ==
          Approx(2e-6 * (n - 1)));
  }
}

TEST_CASE("ranks equally far apart lie on nodes as a list of them does") {
  for (int64_t ranks = 1; ranks <= 12; ++ranks) {
    for (int64_t distance = 1; distance <= 12; ++distance) {
      for (int64_t ranks_per_node = 1; ranks_per_node <= 9; ++ranks_per_node) {
        std::vector<int> members;
        for (int64_t i = 0; i < ranks; ++i) members.push_back(static_cast<int>(i * distance));
        CAPTURE(ranks, distance, ranks_per_node);
        CHECK(layout_of(ranks, distance, ranks_per_node) == layout_of(members, ranks_per_node));
      }
    }
  }
}

TEST_CASE("a message is there a latency after it has left, over the link to its peer") {
  const Cluster cluster = round_cluster(4);
  Cost cost(cluster);
  const ProgramGroup group = group_of({0, 2, 4}, /*rank=*/1);
  const ExchangeSeconds inside = cost.of(exchange_of(CommKind::send, 4000, 0), group);
  CHECK(inside.busy == Approx(4e-6));
  CHECK(inside.arrives == Approx(5e-6));
  const ExchangeSeconds beyond = cost.of(exchange_of(CommKind::send, 4000, 2), group);
  CHECK(beyond.busy == Approx(32e-6));
  CHECK(beyond.arrives == Approx(42e-6));
}

TEST_CASE("an answer knows on whose numbers it rests") {
  Cluster cluster = round_cluster(4);
  cluster.memory_gbs.origin = Origin::data_sheet;
  Cost cost(cluster);
  cost.of(Kernel{.op = "copy", .flops = 0, .bytes = 100});
  CHECK(cost.origins() == std::map<Origin, int>{{Origin::data_sheet, 1}, {Origin::assumed, 1}});
  cost.of(Kernel{.op = "copy", .flops = 0, .bytes = 200});
  CHECK(cost.origins() == std::map<Origin, int>{{Origin::data_sheet, 1}, {Origin::assumed, 1}});
  cluster.peak_tflops.erase(DType::f32);
  check_throws<UsageError>(
      [&] { cost.of(Kernel{.op = "matmul", .kind = KernelKind::matmul, .flops = 1}); },
      {"round", "f32"});
}

}  // namespace
}  // namespace usp::test
