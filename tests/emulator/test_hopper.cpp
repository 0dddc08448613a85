#include <cuda.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/hopper/kernels.h"
#include "emulator/kernels.h"

/// What Hopper has beside its threads: right kernels are right and not suspected, and each barrier,
/// wait or fence that they lack is found.
namespace usp::emulator {
namespace {

using test::Array;
using Bf16s = std::vector<__nv_bfloat16>;

/// An order of threads and a completion of what is asynchronous. Races do not depend on them.
void each_pair(const std::function<void()>& run) {
  const std::pair<Order, Completion> pairs[] = {{Order::forward, Completion::at_once},
                                                {Order::reverse, Completion::late},
                                                {Order::shuffled, Completion::seeded}};
  for (const auto& [threads, completion] : pairs) {
    Options now = options;
    now.threads = threads;
    now.completion = completion;
    const Use use(now);
    INFO("threads " << static_cast<int>(threads) << ", completion "
                    << static_cast<int>(completion));
    run();
  }
}

Bf16s random_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Bf16s values(count);
  for (__nv_bfloat16& value : values) value = uniform(random);
  return values;
}

/// A product of two matrices, and what it has to be.
class Case {
 public:
  Case(int m, int n, int k)
      : pitch_(k + 7 & ~7),
        c_pitch_(n + 3 & ~3),
        a_(random_values(size_t(m) * pitch_, 1)),
        b_(random_values(size_t(n) * pitch_, 2)),
        c_(std::vector<float>(size_t(m) * c_pitch_, NAN)),
        product{m, n, k, a_, b_, c_, pitch_, c_pitch_} {
    const Bf16s a = a_.host(), b = b_.host();
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int x = 0; x < k; ++x) sum += double(a[i * pitch_ + x]) * b[j * pitch_ + x];
        expected_.push_back(sum);
      }
    }
  }

  /// The largest error, or NaN where nothing was written.
  double error() const {
    const std::vector<float> c = c_.host();
    double most = 0;
    for (size_t i = 0; i < expected_.size(); ++i) {
      const size_t row = i / product.n, column = i % product.n;
      const double error = std::abs(c[row * c_pitch_ + column] - expected_[i]);
      if (!(error <= most)) most = error;
    }
    return most;
  }

 private:
  int pitch_, c_pitch_;
  Array<__nv_bfloat16> a_, b_;
  Array<float> c_;
  std::vector<double> expected_;

 public:
  hopper::Product product;
};

void require_right(const Case& x) {
  const Report report = take_report();
  INFO(x.product.m << " x " << x.product.n << " x " << x.product.k << "\n" << report.text());
  REQUIRE(report.problems.empty());
  REQUIRE(x.error() < 1e-5 * x.product.k);
}

TEST_CASE("products by mma and copies of boxes, swizzled or not, are right") {
  for (const auto& [m, n, k] :
       {std::tuple{128, 128, 64}, {200, 136, 72}, {1, 3, 8}, {130, 257, 24}}) {
    each_pair([&] {
      for (const bool swizzled : {false, true}) {
        const Case x(m, n, k);
        hopper::tma_product(x.product, swizzled);
        require_right(x);
      }
    });
  }
}

TEST_CASE("wgmma reads each layout that its descriptors name") {
  const Bf16s a = random_values(64 * 64, 3), b = random_values(64 * 64, 4);
  const Array<__nv_bfloat16> left(a), right(b);
  std::vector<double> expected(64 * 64);
  for (int i = 0; i < 64 * 64; ++i) {
    for (int k = 0; k < 64; ++k) expected[i] += double(a[i / 64 * 64 + k]) * b[i % 64 * 64 + k];
  }
  each_pair([&] {
    for (int i = 0; i < 16; ++i) {
      const int swizzle = i / 4 == 0 ? 0 : 16 << i / 4;
      const Array<float> c(64 * 64);
      hopper::layout_product(swizzle, i & 1, i & 2, left, right, c);
      const Report report = take_report();
      INFO("swizzle " << swizzle << ", majors " << (i & 3) << "\n" << report.text());
      REQUIRE(report.problems.empty());
      const std::vector<float> found = c.host();
      for (int at = 0; at < 64 * 64; ++at) REQUIRE(std::abs(found[at] - expected[at]) < 1e-4);
    }
  });
}

TEST_CASE("wgmma takes a from registers, and b of 64, 128 and 256 columns from a plane") {
  for (const int n : {64, 128, 256}) {
    const Bf16s a = random_values(64 * 64, 8), b = random_values(4 * n * 64, 9);
    const Array<__nv_bfloat16> left(a), right(b);
    each_pair([&] {
      const Array<float> c(64 * n);
      hopper::registers_product(n, 2, left, right, c);
      const Report report = take_report();
      INFO(n << " columns\n" << report.text());
      REQUIRE(report.problems.empty());
      const std::vector<float> found = c.host();
      for (int at = 0; at < 64 * n; ++at) {
        double sum = 0;
        for (int k = 0; k < 64; ++k) {
          sum += double(a[at / n * 64 + k]) * b[(2 * n + at % n) * 64 + k];
        }
        REQUIRE(std::abs(found[at] - sum) < 1e-4);
      }
    });
  }
}

TEST_CASE("matrices turn around by ldmatrix and stmatrix, rows by named barriers") {
  const Bf16s values = random_values(256, 5);
  const std::vector<float> floats(values.begin(), values.end());
  each_pair([&] {
    const Array<__nv_bfloat16> x(values), y(256);
    hopper::turn(x, y);
    const Array<float> rows(floats), turned(256);
    hopper::turn_rows(rows, turned, 8);
    const Report report = take_report();
    INFO(report.text());
    REQUIRE(report.problems.empty());
    const Bf16s found = y.host();
    const std::vector<float> found_rows = turned.host();
    for (int i = 0; i < 256; ++i) {
      REQUIRE(float(found[i]) == floats[i % 16 * 16 + i / 16]);
      REQUIRE(found_rows[i] == floats[i / 32 * 32 + 31 - i % 32]);
    }
  });
}

// What orders threads and copies, by call and place; which of them is left out.
std::map<std::pair<std::string, const void*>, bool> orders;
const void* left_out_place = nullptr;
bool leaves_out(const char* call, const void* place) {
  orders[{call, place}];
  return place == left_out_place;
}

TEST_CASE("a barrier, wait or fence that is left out is found, with a line of the kernel") {
  Options now;
  now.leaves_out = leaves_out;
  const Use use(now);
  const auto run_all = [](const std::string& file) {
    if (file == "tma.cu") {
      const Case x(64, 72, 200);
      hopper::tma_product(x.product, true);
    } else if (file == "named.cu") {
      const Array<float> x(std::vector<float>(128, 1)), y(128);
      hopper::turn_rows(x, y, 4);
    } else {
      const Array<__nv_bfloat16> x(random_values(64 * 64, 6)), y(256);
      const Array<float> c(64 * 64);
      hopper::layout_product(128, false, false, x, x, c);
      hopper::turn(x, y);
      const Array<__nv_bfloat16> planes(random_values(4 * 64 * 64, 10));
      hopper::registers_product(64, 1, x, planes, c);
    }
    return take_report();
  };
  size_t places = 0;
  for (const std::string file : {"tma.cu", "named.cu", "layouts.cu"}) {
    orders.clear();
    const Report right = run_all(file);
    INFO(right.text());
    REQUIRE(right.problems.empty());
    const auto found = orders;
    for (const auto& [order, unused] : found) {
      ++places;
      const std::string where = line_of(order.second);
      each_pair([&, order = order] {
        left_out_place = order.second;
        const Report report = run_all(file);
        left_out_place = nullptr;
        INFO(order.first << " at " << where << " left out: " << report.text());
        CHECK(!report.problems.empty());
        for (const Problem& problem : report.problems) CHECK(problem.file.ends_with(".cu"));
      });
    }
  }
  REQUIRE(places >= 30);
}

TEST_CASE("copies, their boxes and products are counted, and conflicts of ldmatrix") {
  Options now;
  now.counters = true;
  const Use use(now);
  const Case x(128, 128, 192);
  for (const bool swizzled : {false, true}) {
    hopper::tma_product(x.product, swizzled);
    const Counters counters = take_report().total;
    const int64_t ldmatrices = 4 * 4 * 12 * 5;  // blocks, warps, steps of 16, of one and of four
    REQUIRE(counters.shared_requests == ldmatrices);
    REQUIRE(counters.bank_conflicts == (swizzled ? 0 : 28 * ldmatrices));
    REQUIRE(counters.product_flops == int64_t{2} * 128 * 128 * 192);
    REQUIRE(counters.boxes == 4 * 2 * 3);  // of each block two a step
    REQUIRE(counters.box_bytes == 4 * 2 * 64 * 192 * 2);
  }
}

TEST_CASE("a tensor map that the driver refuses is refused") {
  const Array<__nv_bfloat16> x(random_values(256 * 256, 7));
  struct Asked {
    const char* name;
    bool taken = false;
    int offset = 0;
    cuuint64_t rows = 256, columns = 256, pitch = 256;
    cuuint32_t box_rows = 64, box_columns = 64;
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  };
  for (const Asked& asked : {
           Asked{.name = "right", .taken = true},
           Asked{.name = "a tail", .taken = true, .rows = 255, .columns = 250},
           Asked{.name = "an address of 8 bytes", .offset = 4, .rows = 128},
           Asked{.name = "a pitch of 8 bytes", .rows = 128, .columns = 200, .pitch = 252},
           Asked{.name = "a box of 257 rows", .box_rows = 257},
           Asked{.name = "a box of 24 bytes", .box_columns = 12},
           Asked{.name = "rows of 128 bytes over 64", .swizzle = CU_TENSOR_MAP_SWIZZLE_64B},
           Asked{.name = "rows that overlap", .rows = 64, .pitch = 128},
           Asked{.name = "beyond the block", .rows = 257},
           Asked{.name = "no rows", .rows = 0},
       }) {
    INFO(asked.name);
    CUtensorMap map;
    const cuuint64_t sizes[] = {asked.columns, asked.rows}, strides[] = {asked.pitch * 2};
    const cuuint32_t box[] = {asked.box_columns, asked.box_rows}, steps[] = {1, 1};
    const bool taken =
        cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x + asked.offset, sizes,
                               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, asked.swizzle,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    REQUIRE(taken == asked.taken);
  }
}

}  // namespace
}  // namespace usp::emulator
