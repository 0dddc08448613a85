#include "comm/links.h"

#include "comm/launch.h"
#include "run/comm_config.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// 100 us and 1 GB/s inside of a node, 500 us and 0.1 GB/s between nodes of two.
Links two_kinds() { return {2, {100, 1}, {500, 0.1}, {}}; }

TEST_CASE("a message costs its latency and its bytes, and waits for those before it") {
  EmulatedLinks links(0, two_kinds());
  const Clock::time_point begin = Clock::now();
  const auto first = links.transmit(/*to=*/1, 10'000'000, begin);
  const auto second = links.transmit(1, 1'000'000, begin);
  REQUIRE(first.arrives - first.sent == microseconds(100));
  REQUIRE(first.sent - begin == milliseconds(10));
  REQUIRE(second.sent - first.sent == milliseconds(1));
  // The network card is another port than the one to the node's other rank.
  const auto beyond = links.transmit(2, 1000, begin), further = links.transmit(3, 1'000'000, begin);
  REQUIRE(beyond.sent < first.sent);
  REQUIRE(beyond.arrives - beyond.sent == microseconds(500));
  REQUIRE(further.sent - beyond.sent == milliseconds(10));
}

TEST_CASE("a link that has been idle starts at once") {
  EmulatedLinks links(0, {0, {100, 1}, {}, {}});
  const Clock::time_point begin = Clock::now();
  const auto first = links.transmit(1, 1000, begin);
  const auto second = links.transmit(1, 1000, begin + milliseconds(5));
  REQUIRE(first.sent == begin + microseconds(1));
  REQUIRE(second.sent == begin + milliseconds(5) + microseconds(1));
}

TEST_CASE("what threads take to wake up is part of a latency, never more than all of it") {
  Links two = two_kinds();
  two.wake_up = microseconds(150);
  EmulatedLinks links(0, two);
  const Clock::time_point begin = Clock::now();
  const auto near = links.transmit(1, 1000, begin), far = links.transmit(2, 1000, begin);
  REQUIRE(near.arrives == near.sent);
  REQUIRE(far.arrives - far.sent == microseconds(350));
}

TEST_CASE("a kind of link that is not emulated takes no time") {
  EmulatedLinks links(0, {1, {}, {500, 0.1}, {}});
  Links same_node = {0, {}, {500, 0.1}, {}};
  REQUIRE(EmulatedLinks(0, same_node).transmit(1, 1000, Clock::now()).sent == Clock::time_point());
  REQUIRE(links.transmit(1, 1000, Clock::now()).sent != Clock::time_point());
}

TEST_CASE("nothing arrives sooner than its link allows, inside of the node and beyond") {
  Clock::time_point begin;  // of rank 0's message
  run_threads(4, [&](const Communicator& world) {
    world.engine().emulate({2, {1000, 0.5}, {5000, 0.1}, {}});
    const auto since_begin = [&] {
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    for (int64_t count : {1000, 250'000}) {  // with its header, and apart from it
      const double near = 1e-3 + 4 * double(count) / 0.5e9, gone = 4 * double(count) / 0.1e9;
      const Tensor x = Tensor::zeros({count}, DType::f32);
      for (int to : {1, 2}) {
        world.barrier();
        if (world.rank() == 0) {
          begin = Clock::now();
          world.send(x, to);
          USP_CHECK(to == 1 || since_begin() >= gone, "sent after {} s", since_begin());
        }
        if (world.rank() == to) {
          world.recv(x, 0);
          const double limit = to == 1 ? near : 5e-3 + gone;
          USP_CHECK(since_begin() >= limit, "rank {}: {} s", to, since_begin());
        }
      }
    }
  });
}

TEST_CASE("links change no value and no entry of the ledger but the times") {
  std::vector<Values> results(2);
  std::vector<Ledger::Entry> entries(2);
  for (int emulated : {0, 1}) {
    run_threads(3, [&](const Communicator& world) {
      if (emulated == 1) world.engine().emulate({0, {700, 0.5}, {}, {}});
      const Tensor x = Tensor::from_host(Random(world.rank()).normals(10007), {10007}, DType::f64);
      world.all_reduce(x);
      Handle pending = world.all_reduce_async(x);
      world.barrier();
      pending.wait();
      if (world.rank() == 1) {
        results[emulated] = x.items();
        entries[emulated] = Runtime::current().ledger().get("world", CommKind::all_reduce);
      }
    });
  }
  REQUIRE(results[0] == results[1]);
  REQUIRE(entries[0].calls == entries[1].calls);
  REQUIRE(entries[0].payload_bytes == entries[1].payload_bytes);
  REQUIRE(entries[0].wire_bytes == entries[1].wire_bytes);
  REQUIRE(entries[0].header_bytes == entries[1].header_bytes);
}

/// The usage error of connect() on `ranks` ranks; empty if there is none.
std::string refused(int ranks, const CommConfig& config) {
  std::string message;
  run_threads(ranks, [&](const Communicator& world) {
    try {
      connect(world, config, /*measure=*/false);
      world.barrier();
    } catch (const UsageError& error) {
      if (world.rank() == 0) message = error.what();
    }
  });
  return message;
}

TEST_CASE("links that this machine cannot imitate are refused, with what it can do") {
  CommConfig config;
  config.link = {"node=0.001,0.001"};
  const std::string refusal = refused(2, config);
  REQUIRE(refusal.find("would be faster than this machine") != std::string::npos);
  double latency = 0, speed = 0, advised = 0, share = 0;
  REQUIRE(std::sscanf(refusal.c_str() + refusal.find("messages in"),
                      "messages in %lf us and at %lf GB/s; try node=%lf,%lf", &latency, &speed,
                      &advised, &share) == 4);
  REQUIRE(advised >= 2 * latency - 1);  // which was rounded to be told
  REQUIRE(std::fmod(advised, 100) == 0);
  config.link = {"node=1e6,1e6"};
  REQUIRE(refused(2, config).find("would be faster than this machine") != std::string::npos);
  config.link = {"node=1e6,0.001"};
  REQUIRE(refused(2, config).empty());
  config.node_size = 2;
  REQUIRE(refused(4, config).empty());
}

TEST_CASE("the ledger tells what goes to other nodes from what stays in one") {
  CommConfig config;
  config.node_size = 2;
  std::vector<Ledger> ledgers(4);
  run_threads(4, [&](const Communicator& world) {
    connect(world, config, /*measure=*/false);
    const Communicator pairs = world.split("pairs", [](int r) { return r % 2; });
    USP_CHECK(world.node_of(3) == 1 && pairs.node_of(0) == 0 && pairs.node_of(1) == 1, "nodes");
    const Tensor from = Tensor::zeros({20}, DType::f32), to = Tensor::zeros({20}, DType::f32);
    world.all_to_all(to, from);  // 5 elements to each rank, 2 of which lie in the other node
    pairs.all_to_all(to, from);  // 10 to the other node
    world
        .send_recv_async(std::vector<SendRecv>{{SendRecv::send, from, world.rank() ^ 1},
                                               {SendRecv::recv, to, world.rank() ^ 1}})
        .wait();
    ledgers[world.rank()] = Runtime::current().ledger();
  });
  for (const Ledger& ledger : ledgers) {
    REQUIRE(ledger.get("world", CommKind::all_to_all).wire_bytes == 3 * 5 * 4);
    REQUIRE(ledger.get("world", CommKind::all_to_all).net_bytes == 2 * 5 * 4);
    REQUIRE(ledger.get("pairs", CommKind::all_to_all).net_bytes == 10 * 4);
    REQUIRE(ledger.get("world", CommKind::send).net_bytes == 0);
    Ledger::Entry both = ledger.get("world", CommKind::all_to_all);
    both += ledger.get("pairs", CommKind::all_to_all);
    REQUIRE(both.net_bytes == (2 * 5 + 10) * 4);
    REQUIRE((both - ledger.get("pairs", CommKind::all_to_all)).net_bytes == 2 * 5 * 4);
    REQUIRE(ledger.to_json().find("\"net_bytes\": 40") != std::string::npos);
  }
}

TEST_CASE("malformed links are refused") {
  Links links;
  for (const char* bad : {"", "node", "node=1", "wire=1,2", "node=,", "node=1,2,3", "node=x,1",
                          "node=1,-2", "node=0,1", "node=nan,1", "node,1=2"}) {
    CAPTURE(bad);
    check_throws<UsageError>([&] { parse_link(bad, links); }, {"node=100,2"});
  }
  parse_link("net=12.5,0.25", links);
  REQUIRE(links.net.latency_us == 12.5);
  REQUIRE(links.net.gb_per_s == 0.25);
  CommConfig config;
  config.link = {"net=500,1"};
  Args args("A test.");
  config.bind(args);
  check_throws<UsageError>([&] { config.validate(args); }, {"--node_size"});
}

TEST_CASE("what it takes to find out about this machine's links is not in the ledger") {
  run_threads(4, [](const Communicator& world) {
    const Connection connection = connect(world, {}, /*measure=*/true);
    USP_CHECK(connection.host.latency_us > 0 && connection.host.gb_per_s > 0, "measured");
    USP_CHECK(!connection.links, "none is emulated");
    USP_CHECK(Runtime::current().ledger().entries().empty(), "entries in the ledger");
  });
}

}  // namespace
}  // namespace usp::test
