#include <functional>

#include "examples/ideas_extension.cu"
#include "lab/ideas_case.h"
#include "testing.h"

/// The extension for PyTorch, with a tensor of the test's own: it hands our kernel what it needs.
namespace usp::lab {
namespace {

/// Runs what the extension offers on a tensor, and compares with the ladder of this name.
void check_offered(const std::string& ladder,
                   const std::function<torch::Tensor(const torch::Tensor&)>& offered) {
  const IdeasCase given({37, 70});
  const std::vector<double> expected = given.expected(ladder, "");
  const torch::Tensor x(37, 70);
  const size_t bytes = expected.size() * sizeof(float);
  REQUIRE(cudaMemcpy(x.data_ptr<float>(), given.data.x, bytes, cudaMemcpyDefault) == cudaSuccess);
  const torch::Tensor y = offered(x);
  std::vector<float> found(expected.size());
  REQUIRE(cudaMemcpy(found.data(), y.data_ptr<float>(), bytes, cudaMemcpyDefault) == cudaSuccess);
  const emulator::Report report = emulator::take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  test::check_close(std::vector<double>(found.begin(), found.end()), expected, 1e-5);
}

TEST_CASE("PyTorch's extension runs both rungs of LayerNorm, and ELU in one kernel") {
  for (int64_t rung = 0; rung < 2; ++rung) {
    check_offered("layer_norm", [rung](const torch::Tensor& x) { return layer_norm(x, rung); });
  }
  check_offered("fusion", elu);
  CHECK_THROWS_AS(layer_norm(torch::Tensor(2, 2, torch::kFloat64), 0), std::invalid_argument);
}

}  // namespace
}  // namespace usp::lab
