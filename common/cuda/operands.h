#pragma once

#include "cuda/kernels.h"
#include "tensor/runtime.h"
#include "tensor/tensor.h"

/// Tensors as kernels.h wants them.
namespace usp::cuda {

/// Calls body(T{}) with the GPU's type of a floating-point dtype; throws Error for i32.
template <class Body>
void with_type(DType dtype, const Body& body) {
  usp::dispatch(dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, usp::bf16>) {
      body(bf16{});
    } else {
      body(T{});
    }
  });
}

/// Calls body(T{}, G{}) with the types of activations and of sums over them, gradients of weights
/// for one, which are in the same dtype or in that of sums.
template <class Body>
void with_type(DType dtype, DType sums, const Body& body) {
  with_type(dtype, [&]<class T>(T) {
    if (sums == dtype) {
      body(T{}, T{});
    } else {
      body(T{}, accumulate_t<T>{});
    }
  });
}

/// The elements of x, nullptr if it is undefined. ops.h has checked their type.
template <class T>
T* data(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.address()) : nullptr;
}

/// x [B, S, N, D] with channels side by side.
template <class T>
Heads<T> heads(const Tensor& x) {
  return {data<T>(x), x.stride(0), x.stride(1), x.stride(2)};
}

/// A temporary tensor, counted as workspace. The next one may have its memory at once, because the
/// stream runs one kernel after the other.
inline Tensor workspace(const Shape& shape, DType dtype) {
  const CategoryScope scope(Category::workspace);
  return Tensor::empty(shape, dtype);
}

}  // namespace usp::cuda
