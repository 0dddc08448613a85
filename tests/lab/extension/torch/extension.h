#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

/// As much of PyTorch as an extension's one function needs: matrices of f32 in the device's memory.
namespace torch {

enum ScalarType : uint8_t { kFloat32, kFloat64 };

class Tensor {
 public:
  Tensor(int64_t rows, int64_t columns, ScalarType type = kFloat32)
      : sizes_{rows, columns}, type_(type) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, static_cast<size_t>(rows * columns) * sizeof(float)) != cudaSuccess) {
      throw std::bad_alloc();
    }
    data_ = {static_cast<float*>(memory), [](float* given) { cudaFree(given); }};
  }

  bool is_cuda() const { return true; }
  bool is_contiguous() const { return true; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(size_t axis) const { return sizes_[axis]; }
  ScalarType scalar_type() const { return type_; }
  template <class T>
  T* data_ptr() const {
    return data_.get();
  }

 private:
  std::vector<int64_t> sizes_;
  ScalarType type_;
  std::shared_ptr<float> data_;
};

inline Tensor empty_like(const Tensor& x) { return {x.size(0), x.size(1), x.scalar_type()}; }

}  // namespace torch

#define TORCH_CHECK(holds, ...) \
  if (!(holds)) throw std::invalid_argument(__VA_ARGS__)
/// Python is not there: what is offered to it has a name and the right type.
#define PYBIND11_MODULE(name, module) \
  template <class Module>             \
  void offer(Module& module)
