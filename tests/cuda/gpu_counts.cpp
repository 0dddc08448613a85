#include "cuda/gpu_counts.h"

#include "tensor/ops.h"
#include "testing.h"

/// Four kernels whose accesses differ: whole vectors, two streams and a third, strides, pairs. The
/// same program counts them in the emulator, and under a profiler on a GPU.
namespace usp::test {
namespace {

int run(int, char**) {
  const OnDevice gpu(Device::cuda);
  const int64_t T = 16, H = 2048;
  const DType dtype = DType::f32;
  const Tensor a = Tensor::zeros({T, H}, dtype), b = Tensor::zeros({T, H}, dtype);
  const Tensor gate_up = Tensor::zeros({T, 2 * H}, dtype);
  const Tensor turned = Tensor::zeros({H, T}, dtype), table = Tensor::zeros({T, 32}, dtype);
  Runtime::current().wait();
  run_counted("add_kernel", [&] { ops::add(b, a, b); });
  run_counted("swiglu_forward_kernel", [&] { ops::swiglu_forward(b, gate_up); });
  run_counted("strided_kernel", [&] { ops::copy(turned, a.transposed()); });
  run_counted("rope_kernel", [&] {
    ops::rope(a.view({1, T, H / 64, 64}), table, table, {0, T}, false);
  });
  return 0;
}

}  // namespace
}  // namespace usp::test

int main(int argc, char** argv) { return usp::run_main(usp::test::run, argc, argv); }
