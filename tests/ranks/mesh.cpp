#include "comm/mesh.h"

#include <fmt/ranges.h>

#include "comm/launch.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

/// The world ranks that a communicator connects, in its order.
Values members(const Communicator& comm, int world_rank) {
  const Tensor own = Tensor::from_host(Values{double(world_rank)}, {1}, DType::f64);
  const Tensor all = Tensor::zeros({comm.size()}, DType::f64);
  comm.all_gather(all, own);
  return all.items();
}

TEST_CASE("a mesh of 2 x 2 x 2 x 2: tp fastest, then cp, dp, pp") {
  run_threads(16, [](const Communicator& world) {
    const Mesh mesh(world, {.dp = 2, .pp = 2, .cp = 2, .tp = 2, .ep = 2});
    const int me = world.rank();  // 8 pp + 4 dp + 2 cp + tp
    const auto pair = [&](int bit) { return Values{double(me & ~bit), double(me | bit)}; };
    USP_CHECK(members(mesh.tp(), me) == pair(1), "tp");
    USP_CHECK(members(mesh.cp(), me) == pair(2), "cp");
    USP_CHECK(members(mesh.dp(), me) == pair(4), "dp");
    USP_CHECK(members(mesh.pp(), me) == pair(8), "pp");
    const double base = me & ~6;
    USP_CHECK(members(mesh.dp_cp(), me) == Values({base, base + 2, base + 4, base + 6}), "dp_cp");
    // Experts are sharded among neighbors of the dp x cp plane; the others hold copies.
    USP_CHECK(members(mesh.ep(), me) == pair(2), "ep");
    USP_CHECK(members(mesh.edp(), me) == pair(4), "edp");
  });
}

TEST_CASE("groups by name, one's own among them") {
  run_threads(4, [](const Communicator& world) {
    Mesh mesh(world, {.dp = 2, .tp = 2});
    const int me = world.rank();  // 2 dp + tp
    USP_CHECK(members(mesh.group("tp"), me) == members(mesh.tp(), me), "tp");
    USP_CHECK(members(mesh.group("world"), me).size() == 4, "world");
    // Without context parallelism dp_cp is dp, for the ledger too.
    USP_CHECK(mesh.group("dp_cp").name() == "dp", "{}", mesh.group("dp_cp").name());
    mesh.add_group("corners", world.split("corners", [](int rank) { return rank % 3; }));
    const Values corners = me % 3 == 0 ? Values{0, 3} : Values{double(me)};
    USP_CHECK(members(mesh.group("corners"), me) == corners, "corners");
  });
  DryEngine engine(0, 4);
  const Communicator world = Communicator::world(engine);
  Mesh mesh(world, {.dp = 4});
  check_throws<Error>([&] { mesh.group("corners"); }, {"corners"});
  check_throws<Error>([&] { mesh.add_group("tp", world); }, {"tp"});
}

TEST_CASE("a dry run's groups are those that ranks with the same colour form") {
  for (const char* order : {"pp,dp,cp,tp", "tp,cp,pp,dp", "dp,tp,pp,cp"}) {
    for (bool ep_over_tp : {false, true}) {
      const MeshSizes sizes{.dp = 3,
                            .pp = 4,
                            .cp = 2,
                            .tp = 4,
                            .ep = 3,
                            .ep_over_tp = ep_over_tp,
                            .tp_kv = 2,
                            .order = MeshOrder(order)};
      for (int rank = 0; rank < sizes.ranks(); ++rank) {
        const DryMesh dry(sizes, EngineKind::host, rank);
        for (const char* name : {"dp", "pp", "cp", "tp", "tp_kv", "dp_cp", "stage", "ep", "edp",
                                 "embedding", "mirror", "world"}) {
          std::vector<int> alike;
          for (int other = 0; other < sizes.ranks(); ++other) {
            if (sizes.colour(name, other) == sizes.colour(name, rank)) alike.push_back(other);
          }
          CAPTURE(order, ep_over_tp, rank, name);
          CHECK(sizes.members(name, rank) == alike);
          const Communicator& group = dry.mesh.group(name);
          CHECK(group.size() == std::ssize(alike));
          CHECK(alike[group.rank()] == rank);
        }
      }
    }
  }
}

TEST_CASE("uneven sizes, and an order of one's own") {
  run_threads(12, [](const Communicator& world) {
    const int me = world.rank();
    const Mesh mesh(world, {.dp = 3, .pp = 1, .cp = 2, .tp = 2, .ep = 3});
    USP_CHECK(members(mesh.dp(), me) == Values({me % 4 + 0., me % 4 + 4., me % 4 + 8.}), "dp");
    USP_CHECK(mesh.pp().size() == 1 && mesh.dp_cp().size() == 6, "sizes");
    USP_CHECK(mesh.ep().size() == 3 && mesh.edp().size() == 2, "experts");

    const Mesh other(world, {.dp = 3, .pp = 2, .tp = 2, .order = MeshOrder("tp,pp,dp,cp")});
    const double first = me / 3 * 3;  // dp is the fastest axis that is longer than 1
    USP_CHECK(members(other.dp(), me) == Values({first, first + 1, first + 2}), "dp fastest");
    USP_CHECK(members(other.tp(), me) == Values({double(me % 6), me % 6 + 6.}), "tp slowest");
  });
}

TEST_CASE("the dry engine has the mesh of any rank of any world") {
  const OnDevice meta(Device::meta);
  DryEngine engine(1337, 4096);
  const Mesh mesh(Communicator::world(engine), {.dp = 16, .pp = 8, .cp = 4, .tp = 8});
  REQUIRE(mesh.tp().rank() == 1337 % 8);
  REQUIRE(mesh.cp().rank() == 1337 / 8 % 4);
  REQUIRE(mesh.dp().rank() == 1337 / 32 % 16);
  REQUIRE(mesh.pp().rank() == 1337 / 512);
}

TEST_CASE("sizes that do not fill the world are refused, with sizes that do") {
  const OnDevice meta(Device::meta);
  DryEngine engine(0, 8);
  const Communicator world = Communicator::world(engine);
  const auto refused = [&](const MeshSizes& sizes, const std::vector<std::string>& parts) {
    check_throws<UsageError>([&] { const Mesh mesh(world, sizes); }, parts);
  };
  // Of flags, only those that take part.
  refused({.dp = 3}, {"dp_size=3 must equal the 8 ranks", "start 3 ranks", "--dp_size 8"});
  refused({.dp = 3, .tp = 2},
          {"dp_size*tp_size = 3*2 = 6 must equal the 8 ranks", "start 6 ranks", "--dp_size 4"});
  refused({.dp = 2, .tp = 3}, {"= 6", "8 ranks", "start 6 ranks"});
  refused({.dp = 8, .tp = 0}, {"at least 1"});
  refused({.dp = 8, .ep = 3}, {"ep_size=3", "dp_size*cp_size=8", "1, 2, 4 or 8"});
}

TEST_CASE("an order names each axis once") {
  REQUIRE(MeshOrder().text() == "pp,dp,cp,tp");
  REQUIRE(MeshOrder("cp,tp,pp,dp").text() == "cp,tp,pp,dp");
  for (const char* bad : {"", "dp", "pp,dp,cp", "pp,dp,cp,cp", "pp,dp,cp,tp,tp", "pp,dp,cp,xx",
                          "pp,dp,cp,tp,", "pp, dp, cp, tp"}) {
    check_throws<UsageError>([&] { MeshOrder{bad}; }, {"once each", "pp,dp,cp,tp"});
  }
}

TEST_CASE("groups on paper are those of the communicators, in any order of the axes") {
  MeshSizes sizes{.dp = 2, .pp = 3, .cp = 2, .tp = 2};
  std::vector<std::string_view> names = {"cp", "dp", "pp", "tp"};
  do {
    sizes.order = MeshOrder(fmt::format("{}", fmt::join(names, ",")));
    for (const bool over_tp : {false, true}) {
      sizes.ep_over_tp = over_tp;
      sizes.ep = over_tp ? 4 : 2;
      sizes.tp_kv = over_tp ? 2 : 1;
      for (int rank = 0; rank < sizes.ranks(); ++rank) {
        REQUIRE(sizes.rank_at(sizes.coordinates(rank)) == rank);
        DryEngine engine(rank, int(sizes.ranks()));
        const Mesh mesh(Communicator::world(engine), sizes);
        for (const char* name : {"dp", "pp", "cp", "tp", "tp_kv", "dp_cp", "stage", "ep", "edp",
                                 "embedding", "mirror", "world"}) {
          const std::vector<int> on_paper = sizes.members(name, rank);
          INFO(name << " of rank " << rank << ", " << sizes.order.text());
          REQUIRE(on_paper.size() == size_t(mesh.group(name).size()));
          REQUIRE(on_paper[mesh.group(name).rank()] == rank);
        }
        REQUIRE(sizes.first_of_stage(mesh.pp().rank()) == sizes.members("stage", rank).front());
      }
    }
  } while (std::ranges::next_permutation(names).found);
}

TEST_CASE("what a dry run would send takes no time, and is in no trace") {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  runtime.tracer().record(true);
  const DryMesh dry({.dp = 16384});
  dry.mesh.dp().all_reduce(Tensor::zeros({16384}, DType::f32));
  const Ledger::Entry sent = runtime.ledger().get("dp", CommKind::all_reduce);
  REQUIRE(sent.calls == 1);
  REQUIRE(sent.wire_bytes == 2 * 16383 * 4);
  REQUIRE(sent.wait_seconds == 0);
  REQUIRE(runtime.tracer().exchanges().empty());
}

TEST_CASE("Llama 3's order: tp, cp, pp, dp from the fastest") {
  const MeshSizes sizes{.dp = 2, .pp = 2, .cp = 2, .tp = 2, .order = MeshOrder("dp,pp,cp,tp")};
  REQUIRE(sizes.members("tp", 0) == std::vector{0, 1});
  REQUIRE(sizes.members("cp", 0) == std::vector{0, 2});
  REQUIRE(sizes.members("pp", 0) == std::vector{0, 4});
  REQUIRE(sizes.members("dp", 0) == std::vector{0, 8});
  REQUIRE(sizes.first_of_stage(1) == 4);
}

}  // namespace
}  // namespace usp::test
