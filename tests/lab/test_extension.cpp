#include "examples/layer_norm_extension.cu"
#include "lab/ideas_case.h"
#include "testing.h"

/// The extension for PyTorch, with a tensor of the test's own: it hands our kernel what it needs.
namespace usp::lab {
namespace {

TEST_CASE("PyTorch's extension runs both rungs of LayerNorm") {
  const IdeasCase given({37, 70});
  const std::vector<double> expected = given.expected("layer_norm", "");
  for (int64_t rung = 0; rung < 2; ++rung) {
    const torch::Tensor x(37, 70);
    const size_t bytes = expected.size() * sizeof(float);
    REQUIRE(cudaMemcpy(x.data_ptr<float>(), given.data.x, bytes, cudaMemcpyDefault) == cudaSuccess);
    const torch::Tensor y = layer_norm(x, rung);
    std::vector<float> found(expected.size());
    REQUIRE(cudaMemcpy(found.data(), y.data_ptr<float>(), bytes, cudaMemcpyDefault) == cudaSuccess);
    const emulator::Report report = emulator::take_report();
    INFO(report.text());
    REQUIRE(report.problems.empty());
    test::check_close(std::vector<double>(found.begin(), found.end()), expected, 1e-5);
  }
  CHECK_THROWS_AS(layer_norm(torch::Tensor(2, 2, torch::kFloat64), 0), std::invalid_argument);
}

}  // namespace
}  // namespace usp::lab
