#include <vector>

#include "base/check.h"
#include "catch.h"
#include "cuda/device_limits.h"
#include "cuda/launch.h"
#include "cuda/tensor_maps.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"
#include "testing.h"

/// What launches ask for beyond blocks in a row, and what kernels that copy boxes need.
namespace usp::test {
namespace {

using emulator::test::Array;

__global__ void number_blocks(const __grid_constant__ CUtensorMap map, int64_t* seen) {
  const int64_t block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x == blockDim.x - 1) seen[block] = reinterpret_cast<intptr_t>(&map) % 64;
}

cudaLaunchAttribute clusters(unsigned x) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {x, 1, 1};
  return attribute;
}

TEST_CASE("a launch has a grid of three directions and attributes, and keeps maps aligned") {
  const Array<int64_t> seen(std::vector<int64_t>(24, -1));
  const CUtensorMap map{};
  const auto start = [&](cuda::Grid grid, std::vector<cudaLaunchAttribute> attributes) {
    cuda::launch(number_blocks, {.grid = grid, .threads = 64, .attributes = std::move(attributes)},
                 nullptr, map, seen);
  };
  start({2, 3, 0}, {});
  REQUIRE(seen.host() == std::vector<int64_t>(24, -1));
  start({2, 3, 4}, {clusters(1)});
  REQUIRE(seen.host() == std::vector<int64_t>(24, 0));
  check_throws<Error>([&] { start({2}, {clusters(2)}); },
                      {"2 blocks of 64 threads", "launching.cpp:", "not supported"});
  for (const cuda::Grid grid : {cuda::Grid{1, 65536, 1}, cuda::Grid{1, 1, 65536}}) {
    check_throws<Error>([&] { start(grid, {}); }, {"number_blocks", "at most 65535 blocks"});
  }
  check_throws<Error>(
      [&] {
        start({int64_t{1} << 31, 2, 1}, {});
      },
      {"2147483648 x 2 x 1 blocks", "at most 2147483647 blocks"});
}

TEST_CASE("the limits of a GPU are those that it names") {
  emulator::Options options;
  options.shared_bytes = 99 << 10;
  options.compute_capability = 86;
  const emulator::Use use(options);
  const cuda::DeviceLimits limits = cuda::limits_of_this_device();
  REQUIRE(limits.shared_bytes == 99 << 10);
  REQUIRE(limits.capability == 86);
}

TEST_CASE("a tensor map is made once for all that it says") {
  const Array<__nv_bfloat16> x(256 * 256);
  cuda::TensorMaps maps;
  const cuda::Boxed first{
      .data = x, .rows = 100, .columns = 60, .pitch = 64, .box_rows = 64, .box_columns = 64};
  const CUtensorMap* const map = &maps.of(first);
  std::vector<cuda::Boxed> others(8, first);
  others[0].data = x + 64;
  others[1].rows = 99;
  others[2].columns = 59;
  others[3].pitch = 72;
  others[4].box_rows = 32;
  others[5].box_columns = 32;
  others[6].swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  others[7].planes = 2, others[7].plane_pitch = 6400;
  for (const cuda::Boxed& other : others) REQUIRE(&maps.of(other) != map);
  cuda::Boxed floats = first;
  floats.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, floats.box_columns = 32;
  REQUIRE(&maps.of(floats) != map);
  REQUIRE(&maps.of(first) == map);
  REQUIRE(maps.made() == 10);
}

TEST_CASE(
    "a matrix that copies of boxes cannot take is refused: the rule, the value, one that works") {
  const Array<__nv_bfloat16> x(256 * 256);
  const cuda::Boxed right{
      .data = x, .rows = 100, .columns = 60, .pitch = 64, .box_rows = 64, .box_columns = 64};
  struct Case {
    cuda::Boxed asked;
    std::vector<std::string> says;
  };
  std::vector<Case> cases(10, {right, {}});
  cases[0].asked.data = x + 3, cases[0].says = {"multiple of 16", "6 beyond", "5 elements later"};
  cases[1].asked.pitch = 60, cases[1].says = {"pitch=60", "multiple of 16", "try 64"};
  cases[2].asked.pitch = 56, cases[2].says = {"pitch=56", "at least 60", "try 64"};
  cases[3].asked.planes = 2, cases[3].asked.plane_pitch = 6399;
  cases[3].says = {"plane_pitch=6399", "at least 6400", "try 6400"};
  cases[4].asked.rows = 0, cases[4].says = {"1 matrices of 0 x 60", "try 1 of 1 x 1"};
  cases[5].asked.box_rows = 257, cases[5].says = {"box_rows=257", "1 to 256", "try 256"};
  cases[6].asked.box_columns = 128, cases[6].says = {"box_columns=128", "at most 64", "try 64"};
  cases[7].asked.box_columns = 12, cases[7].says = {"box_columns=12", "multiple of 16", "try 64"};
  cases[8].asked.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  cases[8].says = {"box_columns=64 of elements of 4 bytes", "at most 32", "try 32"};
  cases[9].asked.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE, cases[9].asked.box_columns = 264;
  cases[9].says = {"box_columns=264", "at most 256", "try 256"};
  cuda::TensorMaps maps;
  for (const Case& refused : cases) {
    check_throws<UsageError>([&] { maps.of(refused.asked); }, refused.says);
  }
  REQUIRE(maps.made() == 0);
  maps.of(right);
  // What a value that was to be tried says is taken.
  cuda::Boxed tried = cases[8].asked;
  tried.box_columns = 32;
  maps.of(tried);
  tried = cases[0].asked, tried.data = x + 8;
  maps.of(tried);
  // Not one of these rules: what the driver alone can see.
  cuda::Boxed beyond = right;
  beyond.rows = 1025;
  check_throws<Error>([&] { maps.of(beyond); }, {"1025 x 60, pitch 64", "error 1"});
  emulator::Options options;
  options.makes_tensor_maps = false;
  const emulator::Use use(options);
  beyond.rows = 99;
  check_throws<UsageError>([&] { maps.of(beyond); }, {"driver for CUDA 12.0", "a newer driver"});
}

}  // namespace
}  // namespace usp::test
