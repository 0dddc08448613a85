#include <map>

#include "lab/case.h"
#include "lab/pairs.h"
#include "lab/requests.h"
#include "tensor/ops.h"

/// Every rung of the ladder computes what the CPU does, asks for what its formula says, and has no
/// barrier, wait or fence that it could do without.
namespace usp::lab {
namespace {

using emulator::Counters;
using emulator::Options;
using emulator::Report;
using emulator::take_report;
using emulator::Use;
using ladder::bf16;
using ladder::Rung;
using test::check_throws;

/// use(rung) for every one, of either type.
template <class F>
void each_rung(F use) {
  for (const Rung<float>* rung : ladder::f32_rungs()) use(*rung);
  for (const Rung<bf16>* rung : ladder::bf16_rungs()) use(*rung);
}

/// By the CPU's op.
template <class T>
std::vector<double> expected_of(const Case<T>& x) {
  const auto& [m, n, k] = std::tuple(x.product.m, x.product.n, x.product.k);
  const test::OnDevice cpu(Device::cpu);
  constexpr DType dtype = Case<T>::kTransposed ? DType::bf16 : DType::f32;
  const Tensor a = Tensor::from_host(x.a(), {m, k}, dtype);
  const Tensor b = Case<T>::kTransposed ? Tensor::from_host(x.b(), {n, k}, dtype).transposed()
                                        : Tensor::from_host(x.b(), {k, n}, dtype);
  Tensor c = Tensor::empty({m, n}, DType::f32);
  ops::matmul(c, a, b);
  return c.items();
}

template <class T>
constexpr double kTolerance = sizeof(T) == sizeof(float) ? 1e-5 : 5e-3;

TEST_CASE("every rung computes what the CPU computes, on odd sizes and tails") {
  for (const auto& [m, n, k] :
       {std::tuple{128, 256, 64}, {1, 1, 1}, {130, 70, 37}, {33, 257, 72}, {61, 7, 330}}) {
    each_rung([&, m = m, n = n, k = k]<class T>(const Rung<T>& rung) {
      const std::vector<double> expected = expected_of(Case<T>(m, n, k));
      each_pair([&] {
        Case<T> x(m, n, k);
        x.product.blocks = 2;
        rung.run(nullptr, x.product);
        const Report report = take_report();
        INFO(rung.name << ", " << m << " x " << n << " x " << k << "\n" << report.text());
        REQUIRE(report.problems.empty());
        test::check_close(x.c(), expected, kTolerance<T>);
        REQUIRE(x.is_tidy());
      });
    });
  }
}

TEST_CASE("a rung's formula has at least the bytes of the product") {
  each_rung([]<class T>(const Rung<T>& rung) {
    REQUIRE(predict(rung, Case<T>(130, 70, 37).product).bytes >= int64_t{sizeof(T)} * 130 * 70);
  });
}

TEST_CASE("a persistent block takes tile after tile, and one a multiprocessor is the default") {
  for (const int blocks : {1, 3, 0}) {
    Case<bf16> x(300, 520, 200);
    x.product.blocks = blocks;
    ladder::kPersistent.run(nullptr, x.product);
    const Report report = take_report();
    INFO(blocks << " blocks\n" << report.text());
    REQUIRE(report.problems.empty());
    test::check_close(x.c(), expected_of(x), kTolerance<bf16>);
  }
}

TEST_CASE("a rung asks for as many bytes as its formula says, and at tails for no more") {
  Options now;
  now.counters = true;
  const Use use(now);
  each_rung([]<class T>(const Rung<T>& rung) {
    INFO(rung.name);
    const auto counted = [&](const Case<T>& x) {
      rung.run(nullptr, x.product);
      const Counters counters = take_report().total;
      return ladder::Cost{counters.sector_bytes() + counters.box_bytes, counters.product_flops};
    };
    const Case<T> whole(128, 256, 64), tails(130, 70, 37);
    REQUIRE(counted(whole).bytes == predict(rung, whole.product).bytes);
    REQUIRE(counted(tails).bytes <= predict(rung, tails.product).bytes);
    if (Case<T>::kTransposed) {  // by instructions that can be counted
      REQUIRE(counted(whole).flops == predict(rung, whole.product).flops);
      REQUIRE(counted(tails).flops == predict(rung, tails.product).flops);
    }
    REQUIRE(predict(rung, whole.product).flops == int64_t{2} * 128 * 256 * 64);
  });
}

TEST_CASE("the first rung's formula gives the sectors that the book's profiler counted") {
  const ladder::Product<float> of_the_book{4096, 4096, 4096, {}, 0, {}, 0, {}, 0};
  REQUIRE(predict(ladder::kNaive, of_the_book).bytes == int64_t{70'883'737'600} * 32);
}

TEST_CASE("each rung does what it is there for") {
  Options now;
  now.counters = true;
  const Use use(now);
  std::map<std::string, Counters> by;
  each_rung([&]<class T>(const Rung<T>& rung) {
    const Case<T> x(128, 256, 64);
    rung.run(nullptr, x.product);
    by[rung.name] = take_report().total;
  });
  const auto bytes = [&](const char* name) { return by[name].sector_bytes() + by[name].box_bytes; };
  REQUIRE(by["naive"].sectors_per_load() == 16.5);
  REQUIRE(by["coalesced"].sectors_per_load() == 2.5);
  REQUIRE(bytes("tiled") * 9 < bytes("coalesced"));
  REQUIRE(by["coarsened_1d"].shared_requests * 3 < by["tiled"].shared_requests * 2);
  REQUIRE(by["coarsened_2d"].shared_requests * 2 < by["coarsened_1d"].shared_requests);
  REQUIRE(by["vectorised"].sectors_per_load() == 16);
  REQUIRE(by["vectorised"].shared_requests * 2 < by["coarsened_2d"].shared_requests);
  REQUIRE(by["cp_async"].load_requests == by["vectorised"].load_requests);
  REQUIRE(bytes("persistent") < bytes("ring"));
  // Tiles times steps times barriers of a step; those at the beginning, phases of mbarriers.
  REQUIRE(by["coalesced"].barriers == 0);
  REQUIRE(by["tiled"].barriers == 32 * 2 * 2);
  REQUIRE(by["cp_async"].barriers == 2 * 4 * 2);
  REQUIRE(by["mma"].barriers == 2 * 1);
  REQUIRE(by["tma_wgmma"].barriers == 2 * (1 + 1 + 1));
  REQUIRE(by["ring"].barriers == 2 * (1 + 1));              // nobody gives the last stages back
  REQUIRE(by["persistent"].barriers == 1 + 2 + 2 * 4 * 2);  // two groups, four boxes, twice
  for (const auto& [name, counters] : by) {
    INFO(name);
    REQUIRE(counters.bank_conflicts == 0);
  }
}

TEST_CASE("a rung in f32 multiplies as often for a request to memory as its source says") {
  Options now;
  now.counters = true;
  const Use use(now);
  const int m = 128, n = 256, k = 64;
  std::map<std::string, Requests> by;
  for (const Rung<float>* rung : ladder::f32_rungs()) {
    const Case<float> x(m, n, k);
    rung->run(nullptr, x.product);
    by[rung->name] = requests_of(take_report().total, m, n, k);
  }
  const int64_t fmas = m * n * k / 32, of_c = m * n / 32;
  const auto shared = [&](const char* name) { return by[name].shared; };
  REQUIRE(by["naive"].fmas == fmas);
  REQUIRE(by["naive"].global == 2 * fmas + of_c);
  REQUIRE(by["naive"].shared == 0);
  REQUIRE(by["tiled"].global == 2 * fmas / 32 + of_c);
  // Reads for a warp's FMAs of some steps; and what it writes of the tiles meanwhile.
  REQUIRE(shared("tiled") == fmas * (2 * 32 + 2) / 32);
  REQUIRE(shared("coarsened_1d") == fmas * ((8 + 1) * 8 + 2) / 64);
  REQUIRE(shared("coarsened_2d") == fmas * ((8 + 8) * 8 + 8) / 512);
  REQUIRE(shared("vectorised") == fmas * ((2 + 2 * 2) * 8 + 5) / 512);
  REQUIRE(shared("cp_async") == fmas * ((2 + 2) * 16 + 4) / 1024);
  REQUIRE(by["tiled"].most_percent() < 100.0 / 8);
  REQUIRE(by["vectorised"].most_percent() == 100);
}

TEST_CASE("a barrier, wait or fence that a rung lacks is found, with a line of the kernel") {
  const PairsInTurn in_turn;
  size_t places = 0;
  each_rung([&]<class T>(const Rung<T>& rung) {
    // Two tiles for a block that takes several, a ring that goes round, no more than that.
    const Case<T> x(33, sizeof(T) == 4 ? 40 : 260, sizeof(T) == 4 ? 50 : 330);
    ladder::Product<T> product = x.product;
    product.blocks = 1;
    const auto run = [&] {
      rung.run(nullptr, product);
      return take_report();
    };
    places += leave_out_each(rung.name, run, [](const std::string& file) {
      return file.ends_with(".cu") || file.ends_with("swizzled.h");
    });
  });
  REQUIRE(places >= 55);
}

TEST_CASE("a rung refuses a pitch or an address that it cannot read in one access") {
  const Case<float> x(8, 8, 8);
  ladder::check(ladder::kVectorised, x.product);
  ladder::Product<float> asked = x.product;
  asked.b_pitch = 10;
  ladder::check(ladder::kTiled, asked);
  check_throws<UsageError>([&] { ladder::check(ladder::kVectorised, asked); },
                           {"vectorised", "b_pitch=10", "multiple of 4", "try 12"});
  asked.b_pitch = 6;
  check_throws<UsageError>([&] { ladder::check(ladder::kNaive, asked); },
                           {"naive", "b_pitch=6 must be at least 8", "try 8"});
  asked = x.product;
  asked.a += 3;
  check_throws<UsageError>([&] { ladder::check(ladder::kCpAsync, asked); },
                           {"cp_async", "the address of a", "12 beyond", "1 elements later"});
}

}  // namespace
}  // namespace usp::lab
