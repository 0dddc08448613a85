#include <numeric>

#include "comm/algorithms.h"
#include "comm/launch.h"
#include "comm/links.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "testing.h"

namespace usp::test {
namespace {

/// Results of every rank, for the main thread to look at.
template <class T>
std::vector<T> on_ranks(int ranks, const std::function<T(const Communicator&)>& body) {
  std::vector<T> results(ranks);
  run_threads(
      ranks, [&](const Communicator& world) { results[world.rank()] = body(world); }, 10);
  return results;
}

/// What rank `rank` contributes in these tests.
Values contribution(int rank, int64_t count) { return Random(1000 + rank).normals(count); }

/// The sum in the order of the ranks, element by element, in the dtype's accumulator.
Values rank_order_sum(int ranks, int64_t begin, int64_t count, int64_t total, DType dtype) {
  Values sum(count);
  for (int rank = 0; rank < ranks; ++rank) {
    const OnDevice cpu;
    const Values part = Tensor::from_host(contribution(rank, total), {total}, dtype).items();
    for (int64_t i = 0; i < count; ++i) {
      const double next = rank == 0 ? part[begin + i] : sum[i] + part[begin + i];
      sum[i] = dtype == DType::f64 ? next : static_cast<float>(next);
    }
  }
  const OnDevice cpu;
  return Tensor::from_host(sum, {count}, dtype).items();
}

const std::vector<int> kWorlds = kSanitized ? std::vector{1, 2, 5} : std::vector{1, 2, 3, 4, 5, 8};
/// None, fewer than ranks, uneven, in one piece with the header, and beyond that.
const int64_t kCounts[] = {0, 1, 7, 1000, 4096, 50021};

TEST_CASE("all_reduce adds in the order of the ranks, to the bit, for every size and dtype") {
  for (int ranks : kWorlds) {
    for (int64_t count : kCounts) {
      for (DType dtype : kFloatDTypes) {
        CAPTURE(ranks, count, name(dtype));
        const auto results = on_ranks<Values>(ranks, [&](const Communicator& world) {
          Tensor x = Tensor::from_host(contribution(world.rank(), count), {count}, dtype);
          world.all_reduce(x);
          return x.items();
        });
        const Values expected = rank_order_sum(ranks, 0, count, count, dtype);
        for (const Values& result : results) REQUIRE(result == expected);
      }
    }
  }
}

TEST_CASE("all_reduce of a piece gives the bits of that piece of the whole") {
  constexpr int64_t kCount = 10007;
  for (int ranks : {2, 3, 4, 8}) {
    run_threads(ranks, [&](const Communicator& world) {
      const Values values = contribution(world.rank(), kCount);
      const Tensor whole = Tensor::from_host(values, {kCount}, DType::f32);
      const Tensor pieces = Tensor::from_host(values, {kCount}, DType::f32);
      world.all_reduce(whole);
      for (int64_t begin = 0; begin < kCount; begin += 1237) {
        world.all_reduce(pieces.narrow(0, begin, std::min<int64_t>(1237, kCount - begin)));
      }
      USP_CHECK(same_bits(whole, pieces), "rank {} of {}", world.rank(), ranks);
    });
  }
}

TEST_CASE("reduce_scatter gives each rank its slice of what all_reduce gives") {
  for (int ranks : kWorlds) {
    for (DType dtype : kFloatDTypes) {
      CAPTURE(ranks, name(dtype));
      constexpr int64_t kOwn = 3001;
      const auto results = on_ranks<Values>(ranks, [&](const Communicator& world) {
        const int64_t total = kOwn * world.size();
        const Tensor in = Tensor::from_host(contribution(world.rank(), total), {total}, dtype);
        const Tensor out = Tensor::empty({kOwn}, dtype);
        world.reduce_scatter(out, in);
        return out.items();
      });
      for (int rank = 0; rank < ranks; ++rank) {
        REQUIRE(results[rank] == rank_order_sum(ranks, rank * kOwn, kOwn, ranks * kOwn, dtype));
      }
    }
  }
}

/// A reduction of `count` elements on every rank, with scratch of at most `limit` bytes.
void check_in_pieces(const Communicator& world, int64_t count, DType dtype, int64_t limit) {
  const int n = world.size(), me = world.rank();
  const Ledger& ledger = Runtime::current().ledger();
  Allocator& allocator = Runtime::current().allocator();
  const Tensor x = Tensor::from_host(contribution(me, count * n), {count * n}, dtype);
  const Tensor scattered = clone(x);
  const auto sent = [&](CommKind kind) { return ledger.get("world", kind); };
  const auto run = [&](CommKind kind) {
    return kind == CommKind::all_reduce
               ? world.all_reduce_async(x)
               : world.reduce_scatter_async(scattered.narrow(0, me * count, count), scattered);
  };
  world.engine().limit_scratch(limit);
  const Values expected = rank_order_sum(n, 0, count * n, count * n, dtype);
  for (CommKind kind : {CommKind::all_reduce, CommKind::reduce_scatter}) {
    const Ledger::Entry before = sent(kind);
    Handle handle = run(kind);
    const int64_t scratch = allocator.live_bytes(Category::communication);
    const int64_t least = 2 * (n - 1) * bytes_of(dtype);  // two pieces of an element
    USP_CHECK(scratch <= std::max(limit, least), "{} bytes of scratch", scratch);
    handle.wait();
    const Ledger::Entry entry = sent(kind) - before;
    const int64_t stages = kind == CommKind::all_reduce ? 2 : 1;
    USP_CHECK(entry.calls == 1, "{} calls", entry.calls);
    USP_CHECK(entry.wire_bytes == stages * (n - 1) * count * bytes_of(dtype), "{} bytes",
              entry.wire_bytes);
  }
  USP_CHECK(x.items() == expected, "{} ranks, {} of {}, {}: all_reduce", n, count, name(dtype),
            limit);
  const Values own(expected.begin() + me * count, expected.begin() + (me + 1) * count);
  USP_CHECK(scattered.narrow(0, me * count, count).items() == own,
            "{} ranks, {} of {}, {}: reduce_scatter", n, count, name(dtype), limit);
}

TEST_CASE("a reduction in pieces has the bits, the bytes and the one call of one in one piece") {
  for (int ranks : kSanitized ? std::vector{3} : std::vector{2, 3, 5}) {
    run_threads(ranks, [&](const Communicator& world) {
      for (DType dtype : kFloatDTypes) {
        for (int64_t count : {0, 1, 2, 117}) check_in_pieces(world, count, dtype, /*limit=*/1);
        check_in_pieces(world, 9001, dtype, 1000);
        check_in_pieces(world, 9001, dtype, 60000);
        check_in_pieces(world, 9001, dtype, Engine::kScratchLimit);
      }
    });
  }
}

/// Bytes [first, second) that a message reads or writes.
using Place = std::pair<const char*, const char*>;
Place place_of(const Message& message) {
  const char* begin = static_cast<const char*>(message.data);
  return {begin, begin + message.bytes};
}
Place place_of(const Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.address());
  return {begin, begin + tensor.bytes()};
}
bool lies_in(const Place& part, const Place& whole) {
  return whole.first <= part.first && part.second <= whole.second;
}

TEST_CASE("pieces that are under way together arrive in places that no message of theirs reads") {
  const OnDevice cpu;
  constexpr int64_t kLimit = 1000;
  for (int ranks : {2, 3, 5}) {
    for (int rank = 0; rank < ranks; ++rank) {
      Group group;
      group.rank = rank;
      group.members.resize(ranks);
      const Tensor x = Tensor::zeros({1003}, DType::f64);
      const int64_t bytes = algorithms::reduction_scratch(ranks, rank, 1003, DType::f64, kLimit);
      const Tensor scratch = Tensor::empty({bytes / 8}, DType::f64);
      const auto stages = algorithms::all_reduce(group, x, scratch, ReduceOp::sum, kLimit);
      REQUIRE(stages.size() > 3);
      for (size_t stage = 0; stage + 1 < stages.size(); ++stage) {
        if (!stages[stage + 1].early) continue;
        std::vector<Place> places, read;
        for (const Stage& together : {stages[stage], stages[stage + 1]}) {
          for (const Message& message : together.receives) places.push_back(place_of(message));
          for (const Message& message : together.sends) read.push_back(place_of(message));
        }
        for (const Place& place : places) {
          REQUIRE((lies_in(place, place_of(scratch)) || lies_in(place, place_of(x))));
        }
        for (const Place& from : read) {
          for (const Place& to : places) {
            REQUIRE((to.second <= from.first || from.second <= to.first));
          }
        }
        std::ranges::sort(places);
        for (size_t i = 1; i < places.size(); ++i) REQUIRE(places[i - 1].second <= places[i].first);
      }
    }
  }
}

TEST_CASE("pieces of slices that differ by an element") {
  for (int64_t count : {7, 8, 9, 1001}) {
    run_threads(4, [&](const Communicator& world) {
      world.engine().limit_scratch(3 * 2 * 2 * 8);  // two elements of every other rank, twice
      const Tensor x = Tensor::from_host(contribution(world.rank(), count), {count}, DType::f64);
      world.all_reduce(x);
      USP_CHECK(x.items() == rank_order_sum(4, 0, count, count, DType::f64), "{}", count);
    });
  }
}

/// How many of the parts have each element of a tensor.
std::vector<int> times_named(const std::vector<Elements>& parts, const Tensor& tensor) {
  std::vector<int> times(tensor.numel());
  for (const Elements& part : parts) {
    const int64_t begin = static_cast<double*>(part.data) - tensor.data<double>();
    for (int64_t i = begin; i < begin + part.numel; ++i) ++times.at(i);
  }
  return times;
}

TEST_CASE("the stages of an operation take every element of its input once, and leave each once") {
  const OnDevice cpu;
  constexpr int64_t kCount = 60;
  for (int rank = 0; rank < 3; ++rank) {
    for (CommKind kind :
         {CommKind::all_reduce, CommKind::reduce_scatter, CommKind::all_gather, CommKind::broadcast,
          CommKind::all_to_all, CommKind::send, CommKind::recv}) {
      CAPTURE(rank, name(kind));
      Operation operation;
      operation.kind = kind;
      operation.group = std::make_shared<Group>();
      operation.group->rank = rank;
      operation.group->members = {0, 1, 2};
      operation.root = 0;
      operation.input_counts = {10, 20, 30};
      operation.output_counts = {10, 20, 30};
      const Tensor input = Tensor::zeros({kCount}, DType::f64);
      int64_t results = kCount;
      if (kind == CommKind::all_gather) results = 3 * kCount;
      if (kind == CommKind::reduce_scatter) results = kCount / 3;
      const Tensor output = Tensor::zeros({results}, DType::f64);
      const Tensor scratch = Tensor::zeros({kCount}, DType::f64);
      const bool in_place = kind == CommKind::all_reduce;
      operation.memory.input = input;
      operation.memory.output = in_place ? input : output;
      const auto stages = algorithms::stages(operation, input, in_place ? input : output, scratch,
                                             /*limit=*/2 * 2 * 5 * 8);  // pieces of 5 elements
      std::vector<Elements> taken, left;
      for (const Stage& stage : stages) {
        taken.insert(taken.end(), stage.input.begin(), stage.input.end());
        left.insert(left.end(), stage.output.begin(), stage.output.end());
      }
      const bool root = kind == CommKind::broadcast && rank == 0;
      const bool takes = root || (kind != CommKind::broadcast && kind != CommKind::recv);
      const bool leaves = !root && kind != CommKind::send;
      const Tensor& result = in_place ? input : output;
      REQUIRE(times_named(taken, input) == std::vector<int>(kCount, takes));
      REQUIRE(times_named(left, result) == std::vector<int>(result.numel(), leaves));
    }
  }
}

/// The first ranks of the world, or every second one: rank `rank` of them.
Group group_of(int ranks, int rank, int apart) {
  Group group;
  group.rank = rank;
  for (int r = 0; r < ranks; ++r) group.members.push_back(r * apart + apart / 2);
  return group;
}

TEST_CASE("what a rank sends, in closed form, is what its stages send") {
  const int64_t limit = 4096;  // long reductions go in pieces
  int64_t uneven = 0, between_nodes = 0;
  for (int n = 1; n <= 17; ++n) {
    for (int rank = 0; rank < n; ++rank) {
      const int apart = 1 + rank % 2;
      Operation operation;
      operation.group = std::make_shared<Group>(group_of(n, rank, apart));
      for (int64_t r = 0; r < n; ++r) operation.input_counts.push_back(r * r % 5);
      operation.output_counts = operation.input_counts;
      for (CommKind kind : {CommKind::all_reduce, CommKind::reduce_scatter, CommKind::all_gather,
                            CommKind::broadcast, CommKind::all_to_all, CommKind::send,
                            CommKind::recv, CommKind::barrier}) {
        operation.kind = kind;
        for (int64_t numel : {0, 1, 16, 35, 1000, 5003}) {
          if (kind == CommKind::all_to_all) {
            const auto& counts = operation.input_counts;
            numel = std::accumulate(counts.begin(), counts.end(), int64_t{0});
          }
          operation.dtype = numel % 2 == 0 ? DType::bf16 : DType::f64;
          operation.peer = (rank + static_cast<int>(numel) + 1) % n;
          operation.root = numel % 2 == 0 ? rank : 0;
          const bool gathers = kind == CommKind::all_gather,
                     scatters = kind == CommKind::reduce_scatter;
          const Elements input(nullptr, numel, operation.dtype);
          const Elements output(nullptr,
                                gathers    ? n * numel
                                : scatters ? numel / n
                                           : numel,
                                operation.dtype);
          const auto stages = algorithms::stages(operation, input, output, {}, limit);
          for (int64_t node_size : {0, 1, 2, 3, 4, 8, 40}) {
            CAPTURE(n, rank, apart, name(kind), numel, node_size);
            const Sends planned = algorithms::sends_of(stages, *operation.group, node_size);
            const Sends counted = algorithms::sends_of(operation, numel, limit, node_size);
            REQUIRE(counted.messages == planned.messages);
            REQUIRE(counted.wire_bytes == planned.wire_bytes);
            REQUIRE(counted.net_bytes == planned.net_bytes);
            uneven += kind == CommKind::all_reduce && numel % n != 0;
            between_nodes += planned.net_bytes > 0 && planned.net_bytes < planned.wire_bytes;
          }
        }
      }
    }
  }
  REQUIRE((uneven > 1000 && between_nodes > 1000));
}

TEST_CASE("all_gather, broadcast and all_to_all move every element to its place") {
  for (int ranks : kWorlds) {
    for (int64_t count : {0, 1, 5, 20011}) {
      CAPTURE(ranks, count);
      run_threads(ranks, [&](const Communicator& world) {
        const int n = world.size(), me = world.rank();
        const Tensor own = Tensor::from_host(contribution(me, count), {count}, DType::f64);
        const Tensor gathered = Tensor::empty({count * n}, DType::f64);
        world.all_gather(gathered, own);
        // In place: the input is the rank's own part of the output.
        const Tensor in_place = Tensor::zeros({count * n}, DType::f64);
        ops::copy(in_place.narrow(0, me * count, count), own);
        world.all_gather(in_place, in_place.narrow(0, me * count, count));
        Values expected;
        for (int r = 0; r < n; ++r) {
          const Values part = contribution(r, count);
          expected.insert(expected.end(), part.begin(), part.end());
        }
        USP_CHECK(gathered.items() == expected, "all_gather");
        USP_CHECK(in_place.items() == expected, "all_gather in place");

        const int root = n / 2;
        const Tensor sent = Tensor::from_host(contribution(me, count), {count}, DType::f64);
        world.broadcast(sent, root);
        USP_CHECK(sent.items() == contribution(root, count), "broadcast");

        const Tensor in = Tensor::from_host(contribution(me, count * n), {count * n}, DType::f64);
        const Tensor out = Tensor::empty({count * n}, DType::f64);
        world.all_to_all(out, in);
        Values parts;
        for (int r = 0; r < n; ++r) {
          const Values all = contribution(r, count * n);
          parts.insert(parts.end(), all.begin() + me * count, all.begin() + (me + 1) * count);
        }
        USP_CHECK(out.items() == parts, "all_to_all");
      });
    }
  }
}

TEST_CASE("all_to_all takes parts of any size, none included") {
  for (int ranks : {1, 2, 3, 4}) {
    // Rank a sends rank b (a + 2 b) % 4 * 1500 elements, each a * 100 + b.
    const auto part = [](int a, int b) { return int64_t{1500} * ((a + 2 * b) % 4); };
    run_threads(ranks, [&](const Communicator& world) {
      const int n = world.size(), me = world.rank();
      std::vector<int64_t> in_counts, out_counts;
      Values in, expected;
      for (int r = 0; r < n; ++r) {
        in_counts.push_back(part(me, r));
        out_counts.push_back(part(r, me));
        in.insert(in.end(), part(me, r), me * 100 + r);
        expected.insert(expected.end(), part(r, me), r * 100 + me);
      }
      const Tensor input = Tensor::from_host(in, {std::ssize(in)}, DType::f32);
      const Tensor output = Tensor::empty({std::ssize(expected)}, DType::f32);
      world.all_to_all_v_async(output, input, out_counts, in_counts).wait();
      USP_CHECK(output.items() == expected, "rank {}", me);
    });
  }
}

TEST_CASE("maximum, integers, any() and barrier") {
  run_threads(3, [](const Communicator& world) {
    const int me = world.rank();
    const Tensor x = Tensor::from_host(std::vector<int32_t>{me, -me, 7}, {3});
    world.all_reduce(x, ReduceOp::max);
    USP_CHECK(x.items() == Values({2, 0, 7}), "max");
    world.all_reduce(x);
    USP_CHECK(x.items() == Values({6, 0, 21}), "sum");
    USP_CHECK(world.any(me == 1), "any");
    USP_CHECK(!world.any(false), "none");
    world.barrier();
  });
}

TEST_CASE("a barrier holds every rank until the last has come") {
  std::atomic<int> arrived{0};
  run_threads(4, [&](const Communicator& world) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * world.rank()));
    ++arrived;
    world.barrier();
    USP_CHECK(arrived == 4, "{} of 4 had arrived", arrived.load());
  });
}

TEST_CASE("the ledger counts payload and wire bytes: a ring's") {
  for (int ranks : {2, 3, 4, 8}) {
    constexpr int64_t kCount = 10007;
    std::vector<Ledger> ledgers(ranks);
    run_threads(ranks, [&](const Communicator& world) {
      const Tensor x = Tensor::zeros({kCount}, DType::f32);
      world.all_reduce(x);
      const Tensor parts = Tensor::zeros({kCount * world.size()}, DType::f32);
      world.reduce_scatter(x, parts);
      world.all_gather(parts, x);
      ledgers[world.rank()] = Runtime::current().ledger();
    });
    int64_t wire = 0;
    for (const Ledger& ledger : ledgers) {
      const Ledger::Entry entry = ledger.get("world", CommKind::all_reduce);
      REQUIRE(entry.calls == 1);
      REQUIRE(entry.payload_bytes == 4 * kCount);
      REQUIRE(entry.header_bytes == 2 * (ranks - 1) * Engine::kHeaderBytes);
      wire += entry.wire_bytes;
      for (CommKind kind : {CommKind::reduce_scatter, CommKind::all_gather}) {
        REQUIRE(ledger.get("world", kind).payload_bytes == 4 * kCount * ranks);
        REQUIRE(ledger.get("world", kind).wire_bytes == 4 * kCount * (ranks - 1));
      }
    }
    REQUIRE(wire == 2 * kCount * (ranks - 1) * 4);
  }
}

TEST_CASE("on one rank nothing is sent and nothing counted") {
  run_threads(1, [](const Communicator& world) {
    const Tensor x = Tensor::from_host(Values{1, 2}, {2}, DType::f64);
    const Tensor y = Tensor::zeros({2}, DType::f64);
    world.all_reduce(x);
    world.reduce_scatter(y, x);
    USP_CHECK(y.items() == x.items(), "reduce_scatter copies");
    world.broadcast(x, 0);
    world.barrier();
    USP_CHECK(Runtime::current().ledger().entries().empty(), "nothing counted");
  });
}

TEST_CASE("texts of any length reach every rank, and no ledger") {
  const std::vector<std::string> texts = {"", "a", std::string("nul\0, and more", 14), "four",
                                          std::string(100'003, 'x')};
  for (const int ranks : {1, 2, 5}) {
    const auto results = on_ranks<std::vector<std::string>>(ranks, [&](const Communicator& world) {
      const auto empty = world.all_gather_text("");
      USP_CHECK(empty == std::vector<std::string>(world.size()), "empty");
      auto gathered = world.all_gather_text(texts[world.rank()]);
      USP_CHECK(Runtime::current().ledger().entries().empty(), "counted");
      return gathered;
    });
    for (const auto& result : results) {
      REQUIRE(result == std::vector<std::string>(texts.begin(), texts.begin() + ranks));
    }
  }
}

TEST_CASE("split: groups of equal colour, in order, that do not hear each other") {
  run_threads(6, [](const Communicator& world) {
    const Communicator row = world.split("row", [](int rank) { return rank / 3; });
    const Communicator column = world.split("column", [](int rank) { return rank % 3; });
    USP_CHECK(row.size() == 3 && row.rank() == world.rank() % 3, "row");
    USP_CHECK(column.size() == 2 && column.rank() == world.rank() / 3, "column");
    const Tensor x = Tensor::from_host(Values{double(world.rank())}, {1}, DType::f64);
    const Tensor y = Tensor::from_host(Values{double(world.rank())}, {1}, DType::f64);
    Handle first = row.all_reduce_async(x);
    Handle second = column.all_reduce_async(y);
    second.wait();
    first.wait();
    USP_CHECK(x.items()[0] == (world.rank() < 3 ? 3 : 12), "row sum");
    USP_CHECK(y.items()[0] == 2 * (world.rank() % 3) + 3, "column sum");
    // A group of a group, made by half of the ranks only: histories differ from here on.
    if (world.rank() < 3) {
      const Communicator pair = row.split("pair", [](int rank) { return rank / 2; });
      pair.barrier();
    }
    const Communicator again = world.split("again", [](int) { return 0; });
    const Tensor z = Tensor::from_host(Values{1}, {1}, DType::f64);
    again.all_reduce(z);
    USP_CHECK(z.items()[0] == 6, "again");
  });
}

TEST_CASE("reductions of a communicator that are under way share their scratch") {
  run_threads(2, [](const Communicator& world) {
    Allocator& allocator = Runtime::current().allocator();
    const auto live = [&] { return allocator.live_bytes(Category::communication); };
    const Communicator other = world.split("other", [](int) { return 0; });
    std::vector<Tensor> tensors;
    for (int64_t count : {1000, 1000, 500, 4000, 1000}) {
      tensors.push_back(Tensor::zeros({count}, DType::f32));
    }
    std::vector<Handle> handles;
    std::vector<int64_t> after;  // bytes of scratch, with each that has begun
    for (const Tensor& tensor : tensors) {
      handles.push_back(world.all_reduce_async(tensor));
      after.push_back(live());
    }
    const std::vector<int64_t> expected = {2000, 2000, 2000, 2000 + 8000, 2000 + 8000};
    USP_CHECK(after == expected, "scratch {}", fmt::join(after, ", "));
    handles.push_back(other.all_reduce_async(Tensor::zeros({1000}, DType::f32)));
    USP_CHECK(live() == 12000, "another communicator's is its own");
    for (size_t i : {0, 1, 2}) handles[i].wait();
    USP_CHECK(live() == 10000, "the first is gone with the last that used it");
    for (size_t i : {3, 4, 5}) handles[i].wait();
    USP_CHECK(live() == 0, "released");
  });
}

TEST_CASE("the ledger has the bytes of an operation when it begins, its time when it is over") {
  run_threads(2, [](const Communicator& world) {
    const auto entry = [] {
      return Runtime::current().ledger().get("world", CommKind::all_gather);
    };
    const Tensor own = Tensor::zeros({1000}, DType::f32), all = Tensor::zeros({2000}, DType::f32);
    Handle handle = world.all_gather_async(all, own);
    const Ledger::Entry begun = entry();
    USP_CHECK(begun.calls == 1 && begun.wire_bytes == 4000 && begun.seconds == 0, "begun");
    handle.wait();
    const Ledger::Entry over = entry() - begun;
    USP_CHECK(over.calls == 0 && over.wire_bytes == 0 && over.seconds > 0, "over");
  });
}

TEST_CASE("the peak of a reduction is that of its tensors and its scratch") {
  run_threads(4, [](const Communicator& world) {
    Allocator& allocator = Runtime::current().allocator();
    USP_CHECK(allocator.live_bytes() == 0, "something else is live");
    allocator.reset_peaks();
    const Tensor x = Tensor::zeros({1000}, DType::f64);  // 8000 bytes
    world.all_reduce(x);                                 // and 250 numbers of 3 other ranks
    USP_CHECK(allocator.peak_bytes() == 8000 + 6000, "{} bytes at the peak",
              allocator.peak_bytes());
  });
}

TEST_CASE("the ledger's seconds are those of the operation, not of its place in the queue") {
  run_threads(2, [](const Communicator& world) {
    world.engine().emulate({0, {/*latency_us=*/3000, 10}, {}, {}});  // every message takes 3 ms
    world.barrier();
    const Tensor x = Tensor::zeros({1000}, DType::f32);
    const auto entry = [] {
      return Runtime::current().ledger().get("world", CommKind::all_reduce);
    };
    const Ledger::Entry before = entry();
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Handle> handles;
    for (int i = 0; i < 6; ++i) handles.push_back(world.all_reduce_async(x));
    for (Handle& handle : handles) handle.wait();
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    const double seconds = (entry() - before).seconds;
    USP_CHECK(seconds >= 6 * 0.003, "{} s in the ledger, six operations of 3 ms", seconds);
    USP_CHECK(seconds <= wall.count(), "{} s in the ledger, one after the other in {} s", seconds,
              wall.count());
  });
}

TEST_CASE("memory in flight is released by wait, and used again") {
  run_threads(2, [](const Communicator& world) {
    Allocator& allocator = Runtime::current().allocator();
    for (int step = 0; step < 3; ++step) {
      const Tensor x = Tensor::zeros({100000}, DType::f32);
      Handle handle = world.all_reduce_async(x);
      USP_CHECK(allocator.live_bytes(Category::communication) == 200000, "half of it as scratch");
      handle.wait();
      USP_CHECK(allocator.live_bytes(Category::communication) == 0, "released");
    }
    const Tensor x = Tensor::zeros({100000}, DType::f32);
    Handle handle = world.all_reduce_async(x);
    handle = Handle();  // waits for what it held
    USP_CHECK(allocator.live_bytes(Category::communication) == 0, "released by assignment");
    USP_CHECK(allocator.system_allocations() == 2, "tensor and scratch, once each");
  });
}

}  // namespace
}  // namespace usp::test
