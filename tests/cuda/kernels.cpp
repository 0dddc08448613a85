#include "cuda/every_op.h"
#include "emulator/emulator.h"

/// The kernels for GPUs against those for CPUs, each access checked, for three orders of threads.
namespace usp::test {
namespace {

/// `run()` here and there, compared; the emulator found no race, nothing out of bounds, nothing
/// read that nobody had written.
void check_against_cpu(const std::function<Results()>& run, double tolerance) {
  std::map<std::string, Values> expected;
  {
    const OnDevice cpu(Device::cpu);
    for (const auto& [name, tensor] : run()) expected[name] = tensor.items();
  }
  const OnDevice gpu(Device::cuda);
  Results results;
  try {
    results = run();
    Runtime::current().wait();
  } catch (const Error&) {  // a wait says that something is wrong; the report says what
  }
  const emulator::Report report = emulator::take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  REQUIRE(results.size() == expected.size());
  for (const auto& [name, tensor] : results) {
    check_close(tensor, expected.at(name), tolerance, name);
  }
}

/// body(dtype) for every dtype, each kernel in every order of threads.
void for_each_order(const std::function<void(DType)>& body) {
  emulator::Options options;
  options.every_order = true;
  const emulator::Use use(options);
  for (DType dtype : kFloatDTypes) {
    INFO(name(dtype));
    body(dtype);
  }
}

TEST_CASE("elementwise kernels agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    for (int64_t H : {8, 33, 600}) {
      INFO("H = " << H);
      check_against_cpu([=] { return run_elementwise(dtype, 5, H); }, tolerance_of(dtype));
    }
  });
}

TEST_CASE("kernels of rows agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    for (int64_t H : {8, 34, 296}) {
      INFO("H = " << H);
      check_against_cpu([=] { return run_rows(dtype, 67, H); }, tolerance_of(dtype));
    }
  });
}

TEST_CASE("the loss's kernels agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    for (int64_t V : {5, 304, 2301}) {
      INFO("V = " << V);
      check_against_cpu([=] { return run_loss(dtype, 9, V); }, tolerance_of(dtype));
    }
  });
}

TEST_CASE("the optimizer's kernels agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    for (int64_t numel : {3, 1000, 17001}) {
      INFO("elements: " << numel);
      check_against_cpu([=] { return run_optimizer(dtype, numel); }, tolerance_of(dtype));
    }
  });
}

TEST_CASE("the router's kernels agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    if (dtype == DType::bf16) return;  // a router computes in f32 or f64
    check_against_cpu([=] { return run_router(dtype, 1, 5, 5, 1, 1); }, tolerance_of(dtype));
    check_against_cpu([=] { return run_router(dtype, 3, 72, 6, 8, 3); }, tolerance_of(dtype));
  });
}

TEST_CASE("the kernels of experts' rows agree with the CPU's and touch only what is theirs") {
  for_each_order([](DType dtype) {
    for (int64_t H : {8, 33, 296}) {
      INFO("H = " << H);
      const double tolerance = (dtype == DType::f64 ? 1 : 3) * tolerance_of(dtype);
      check_against_cpu([=] { return run_experts(dtype, H); }, tolerance);
    }
  });
}

TEST_CASE("attention's kernels agree with the CPU's and touch only what is theirs") {
  const AttentionCase cases[] = {
      {2, 6, 3, 20, {0, 20, 50, 17}, {0, 20, 50, 17}},
      {1, 2, 1, 70, {0, 9}, {3, 9}},
      {1, 2, 2, 130, {30, 18}, {0, 40}},
      {1, 2, 1, 4, {0, 6}, {0, 0}},  // no keys
      with_documents({2, 2, 1, 20, {0, 20, 90, 30}, {0, 20, 90, 30}}, {{5, 95}, {50, 118}}),
  };
  for_each_order([&](DType dtype) {
    for (const AttentionCase& c : cases) {
      for (bool naive : {true, false}) {
        INFO("D = " << c.D << (naive ? ", naive" : ", blockwise"));
        check_against_cpu([&] { return run_attention(dtype, naive, c); }, 3 * tolerance_of(dtype));
        check_against_cpu([&] { return run_parts(dtype, naive, c); }, 3 * tolerance_of(dtype));
      }
    }
  });
}

TEST_CASE("attention's kernels agree with the CPU's in every shape of attention's tests") {
  for_each_order([](DType dtype) {
    for_each_attention([&](const AttentionCase& c, bool naive) {
      check_against_cpu([&] { return run_attention(dtype, naive, c); }, 3 * tolerance_of(dtype));
    });
  });
}

TEST_CASE("cuBLASLt multiplies what lies in memory in any order, and is asked for nothing else") {
  for_each_order([](DType dtype) {
    for (int64_t size : {1, 7, 24}) {
      INFO("size = " << size);
      check_against_cpu([=] { return run_matmuls(dtype, size, 2 * size + 1, size + 8); },
                        tolerance_of(dtype));
    }
  });
}

TEST_CASE("products without cuBLASLt agree with the CPU's and touch only what is theirs") {
  emulator::Options options = emulator::options;
  options.every_order = true;
  options.cublas_lacks = [](const emulator::MatmulAsked&) { return true; };
  const emulator::Use use(options);
  for (DType dtype : kFloatDTypes) {
    for (int64_t size : {1, 7, 24}) {
      CAPTURE(name(dtype), size);
      check_against_cpu([=] { return run_matmuls(dtype, size, 2 * size + 1, size + 8); },
                        tolerance_of(dtype));
    }
  }
}

}  // namespace
}  // namespace usp::test
