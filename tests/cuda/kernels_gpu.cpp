#include "cuda/every_op.h"

/// The kernels on a GPU against those for CPUs, at sizes that fill more than one block.
namespace usp::test {
namespace {

/// What `run()` gives on either device, compared.
void check_against_cpu(const std::function<Results()>& run, double tolerance) {
  std::map<std::string, Values> expected;
  {
    const OnDevice cpu(Device::cpu);
    for (const auto& [name, tensor] : run()) expected[name] = tensor.items();
  }
  const OnDevice gpu(Device::cuda);
  const Results results = run();
  REQUIRE(results.size() == expected.size());
  for (const auto& [name, tensor] : results) {
    check_close(tensor, expected.at(name), tolerance, name);
  }
}

TEST_CASE("a GPU's elementwise kernels agree with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (int64_t H : {33, 4096}) {
      check_against_cpu([=] { return run_elementwise(dtype, 67, H); }, tolerance_of(dtype));
    }
  }
}

TEST_CASE("a GPU's kernels of rows agree with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (int64_t H : {34, 2048}) {
      check_against_cpu([=] { return run_rows(dtype, 300, H); }, 3 * tolerance_of(dtype));
    }
  }
}

TEST_CASE("a GPU's kernels of the loss agree with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (int64_t V : {304, 32000}) {
      check_against_cpu([=] { return run_loss(dtype, 9, V); }, 3 * tolerance_of(dtype));
    }
  }
}

TEST_CASE("a GPU's kernels of the optimizer agree with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (int64_t numel : {1000, 300001}) {
      check_against_cpu([=] { return run_optimizer(dtype, numel); }, tolerance_of(dtype));
    }
  }
}

TEST_CASE("a GPU's kernels of routers and of experts' rows agree with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    if (dtype != DType::bf16) {
      check_against_cpu([=] { return run_router(dtype, 100, 256, 8, 8, 4); },
                        3 * tolerance_of(dtype));
    }
    for (int64_t H : {34, 2048}) {
      check_against_cpu([=] { return run_experts(dtype, H); }, 5 * tolerance_of(dtype));
    }
  }
}

TEST_CASE("a GPU's attention agrees with the CPU's") {
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (const AttentionCase& c :
         {AttentionCase{2, 6, 3, 20, {0, 20, 50, 17}, {0, 20, 50, 17}},
          AttentionCase{1, 4, 2, 128, {0, 300}, {0, 300}},
          with_documents({1, 4, 2, 128, {0, 300}, {0, 300}}, {{33, 34, 200}})}) {
      check_against_cpu([&] { return run_attention(dtype, false, c); }, 5 * tolerance_of(dtype));
      check_against_cpu([&] { return run_parts(dtype, false, c); }, 5 * tolerance_of(dtype));
    }
  }
}

TEST_CASE("cuBLASLt and attention by way of it agree with the CPU's products") {
  const AttentionCase attention{1, 4, 2, 64, {0, 130}, {0, 130}};
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    for (int64_t size : {1, 7, 256}) {
      check_against_cpu([=] { return run_matmuls(dtype, size, 2 * size + 1, size + 8); },
                        5 * tolerance_of(dtype));
    }
    check_against_cpu([&] { return run_attention(dtype, true, attention); },
                      5 * tolerance_of(dtype));
    check_against_cpu([&] { return run_parts(dtype, true, attention); }, 5 * tolerance_of(dtype));
  }
}

}  // namespace
}  // namespace usp::test
