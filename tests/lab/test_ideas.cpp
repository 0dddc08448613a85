#include <map>

#include "kernels/ideas/occupancy.h"
#include "lab/ideas_case.h"
#include "lab/pairs.h"

/// Every rung of the small ladders computes what the CPU does, asks for what its formula says, and
/// has no barrier that it could do without.
namespace usp::lab {
namespace {

using emulator::Counters;
using emulator::Options;
using emulator::Report;
using emulator::Use;
using ideas::Counts;
using ideas::Ideas;
using ideas::Rung;
using ideas::Shape;

/// use(file, rung) for every one.
template <class F>
void each_idea(F use) {
  for (const Ideas* file : ideas::all()) {
    for (const Rung& rung : file->rungs) {
      INFO(file->name << ": " << rung.name);
      use(*file, rung);
    }
  }
}

TEST_CASE("every rung of an idea computes what the CPU computes, on odd sizes and tails") {
  for (const Shape shape : {Shape{64, 128}, {1, 1}, {33, 70}, {37, 5}, {3, 1001}}) {
    each_idea([&](const Ideas& file, const Rung& rung) {
      const std::vector<double> expected = IdeasCase(shape).expected(file.name, rung.name);
      each_pair([&] {
        const IdeasCase x(shape);
        rung.run(nullptr, x.data);
        const Report report = emulator::take_report();
        INFO(shape.rows << " x " << shape.columns << "\n" << report.text());
        REQUIRE(report.problems.empty());
        const bool is_one_sum = std::string(rung.name) == "atomics";  // of all numbers, in f32
        test::check_close(x.y(expected.size()), expected, is_one_sum ? 1e-4 : 1e-5);
      });
    });
  }
}

TEST_CASE("an idea's formula has at least the bytes of what is read") {
  each_idea([&](const Ideas&, const Rung& rung) {
    REQUIRE(rung.predict({33, 70}).bytes >= 33 * 70 * int64_t{sizeof(float)});
  });
}

TEST_CASE("an idea's rung asks for what its formulas say, and at tails for no more bytes") {
  Options now;
  now.counters = true;
  const Use use(now);
  each_idea([](const Ideas& file, const Rung& rung) {
    for (const Shape shape : {Shape{64, 128}, {32, 1056}, {33, 70}, {3, 1001}}) {
      const IdeasCase x(shape);
      const auto& [report, launches] = count(rung, x.data);
      const Counts predicted = rung.predict(shape);
      const Counters& counted = report.total;
      INFO(shape.rows << " x " << shape.columns);
      CHECK(launches == predicted.launches);
      CHECK(counted.barriers == predicted.barriers);
      if (shape.columns % 32 == 0) {
        CHECK(counted.sector_bytes() == predicted.bytes);
        CHECK(counted.bank_conflicts == predicted.bank_conflicts);
        if (&file == &ideas::kDivergence) {  // elsewhere nobody predicts them
          CHECK(counted.divergent_branches == predicted.divergent_branches);
        }
      } else {
        CHECK(counted.sector_bytes() <= predicted.bytes);
        CHECK(counted.bank_conflicts <= predicted.bank_conflicts);
      }
    }
  });
}

TEST_CASE("each rung of an idea does what it is there for") {
  Options now;
  now.counters = true;
  const Use use(now);
  std::map<std::string, Counters> by;
  each_idea([&](const Ideas&, const Rung& rung) {
    const IdeasCase x({64, 128});
    by[rung.name] = count(rung, x.data).report.total;
  });
  const auto bytes = [&](const char* name) { return by[name].sector_bytes(); };
  REQUIRE(by["vector_add"].sectors_per_load() == 4);
  REQUIRE(by["copy"].sectors_per_load() == 16);
  REQUIRE(bytes("three_passes") == 2 * bytes("row_in_shared"));
  REQUIRE(by["row_a_thread"].sectors_per_load() == 32);
  REQUIRE(by["column_a_thread"].sectors_per_load() == 4);
  REQUIRE(by["shifted"].sectors_per_load() == 5);
  REQUIRE(by["float4s"].load_requests * 4 == by["column_a_thread"].load_requests);
  REQUIRE(by["direct"].sectors_per_store() == 32);
  REQUIRE(by["in_shared"].sectors_per_store() == 4);
  REQUIRE(by["in_shared"].bank_conflicts == 31 * 64 * 128 / 32);
  REQUIRE(by["by_lane"].load_requests == 2 * by["by_warp"].load_requests);
  REQUIRE(by["by_lane"].divergent_branches == 64 * 128 / 32);
  REQUIRE(bytes("op_by_op") * 4 == bytes("fused") * 21);
  REQUIRE(by["atomics"].atomic_steps == 64 * 128);
  REQUIRE(by["interleaved"].bank_conflicts > 0);
  REQUIRE(by["shuffles"].shared_requests * 3 == by["halves"].shared_requests);
}

TEST_CASE("of three orders one is tried at a time, in turns") {
  std::map<emulator::Order, int> tried;
  const PairsInTurn in_turn;
  for (int i = 0; i < 3; ++i) each_pair([&] { ++tried[emulator::options.threads]; });
  REQUIRE(tried.size() == 3);
  REQUIRE(tried[emulator::Order::reverse] == (test::is_full() ? 3 : 1));
}

TEST_CASE("blocks are held by what runs out first") {
  using ideas::blocks_held;
  REQUIRE(blocks_held({256, 32, 0}) == 8);          // threads
  REQUIRE(blocks_held({256, 33, 0}) == 6);          // registers, 40 of which each thread gets
  REQUIRE(blocks_held({32, 16, 0}) == 32);          // blocks
  REQUIRE(blocks_held({33, 16, 0}) == 32);          // whole warps
  REQUIRE(blocks_held({96, 16, 0}) == 21);          // 63 warps
  REQUIRE(blocks_held({256, 32, 227 << 10}) == 1);  // shared memory, with what the system takes
  REQUIRE(blocks_held({256, 32, 113 << 10}) == 2);
  REQUIRE(blocks_held({256, 32, 114 << 10}) == 1);
  REQUIRE(blocks_held({384, 168, 0}) == 1);  // the last rung of the product
  std::map<std::string, Counts> by;
  for (const Rung& rung : ideas::kOccupancy.rungs) by[rung.name] = rung.predict({64, 128});
  REQUIRE(by["one_each"].warps_held == 64);
  REQUIRE(by["much_shared"].blocks_held == 2);
  REQUIRE(by["large_block"].warps_held == 48);
  REQUIRE(by["many_each"].warps_held == 16);
  REQUIRE(by["many_each"].bytes_in_flight == 16 * by["one_each"].bytes_in_flight);
}

std::map<const void*, std::string> barriers_of_ideas;
const void* barrier_left_out = nullptr;
bool leaves_barrier_out(const char* call, const void* place) {
  barriers_of_ideas[place] = call;
  return place == barrier_left_out;
}

TEST_CASE("a barrier that an idea's rung lacks is found, with a line of the kernel") {
  Options now;
  now.leaves_out = leaves_barrier_out;
  const Use use(now);
  size_t places = 0;
  each_idea([&](const Ideas&, const Rung& rung) {
    const IdeasCase x({33, 300});
    barriers_of_ideas.clear();
    rung.run(nullptr, x.data);
    REQUIRE(emulator::take_report().problems.empty());
    for (const auto& [place, call] : std::map(barriers_of_ideas)) {
      ++places;
      barrier_left_out = place;
      rung.run(nullptr, x.data);
      const Report report = emulator::take_report();
      barrier_left_out = nullptr;
      INFO(call << " at " << emulator::line_of(place) << " left out: " << report.text());
      CHECK(!report.problems.empty());
    }
  });
  REQUIRE(places >= 10);
}

}  // namespace
}  // namespace usp::lab
