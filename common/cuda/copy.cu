#include "cuda/kernels.h"
#include "cuda/launch.h"

/// y = x for tensors of any strides, converted on the way.
namespace usp::cuda {

namespace {

template <class To, class From>
__device__ void convert(To& y, From x) {
  if constexpr (std::is_same_v<To, From>) {
    y = x;
  } else {
    store(y, load(x));
  }
}

/// A thread an element, in the order of memory: sizeof(To) + sizeof(From) bytes an element.
template <class To, class From>
__global__ void contiguous_kernel(To* y, const From* x, int64_t count) {
  const int64_t i = thread_of_grid();
  if (i < count) convert(y[i], x[i]);
}

/// A block for what the last axis spans, a thread an element at a time. As many bytes where the
/// last axis is contiguous; else each thread of a warp takes a sector of 32 bytes of its own.
template <class To, class From>
__global__ void strided_kernel(To* y, const From* x, CopyShape shape) {
  int64_t row = blockIdx.x, to = 0, from = 0;
  for (int axis = 3; axis >= 0; --axis) {
    const int64_t index = row % shape.sizes[axis];
    row /= shape.sizes[axis];
    to += index * shape.to[axis];
    from += index * shape.from[axis];
  }
  for (int64_t i = threadIdx.x; i < shape.sizes[4]; i += blockDim.x) {
    convert(y[to + i * shape.to[4]], x[from + i * shape.from[4]]);
  }
}

}  // namespace

template <class To, class From>
void Copy<To, From>::run(cudaStream_t stream, To* y, const From* x, const CopyShape& shape) {
  int64_t rows = 1;
  for (int axis = 0; axis < 4; ++axis) rows *= shape.sizes[axis];
  const int64_t length = shape.sizes[4], count = rows * length;
  if (shape.contiguous) {
    launch(contiguous_kernel<To, From>, ceil_div(count, kThreads), kThreads, 0, stream, y, x,
           count);
  } else {
    launch(strided_kernel<To, From>, count == 0 ? 0 : rows,
           length < kThreads ? static_cast<int>(ceil_div(length, kWarp)) * kWarp : kThreads, 0,
           stream, y, x, shape);
  }
}

template struct Copy<int32_t, int32_t>;
template struct Copy<float, float>;
template struct Copy<float, double>;
template struct Copy<float, bf16>;
template struct Copy<double, float>;
template struct Copy<double, double>;
template struct Copy<double, bf16>;
template struct Copy<bf16, float>;
template struct Copy<bf16, double>;
template struct Copy<bf16, bf16>;

}  // namespace usp::cuda
