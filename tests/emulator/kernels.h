#pragma once

#include <cuda_runtime.h>

#include <span>
#include <stdexcept>
#include <vector>

/// Kernels of the emulator's own tests, and what launches them.
namespace usp::emulator::test {

/// n elements on the device.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : size_(n) {
    if (cudaMalloc(&data_, n * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  operator T*() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  T* data_;
  size_t size_;
};

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, const A&... arguments) {
  const cudaLaunchConfig_t config{grid, block, 0, nullptr, nullptr, 0};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// y = x + value, n elements.
cudaError_t add(cudaStream_t stream, int n, const float* x, float value, float* y);

/// A kernel and what the emulator has to say of it.
struct Case {
  const char* name;  // lines of planted.cu that may be named end in "// bug: NAME"
  const char* kind;
  void (*run)();
};
std::span<const Case> planted_bugs();
std::span<const Case> correct_kernels();

/// From one matrix of 256 x 256 floats to another.
enum class Copy { by_column, by_row, float4s, changed_float4s, transpose_32, transpose_33 };
void copy(Copy how, const float* x, float* y);
/// 32 lanes count into 4 bins.
void histogram(int* bins);
/// Each of 64 threads leaves its number in the place of the one before.
void last_one(int* last);
/// One block of two warps takes a branch by lane, or by warp, and writes 64 floats.
void branch(bool by_lane, float* y);
/// C = A B, n x n, in tiles of 32.
void matmul(int n, const float* a, const float* b, float* c);

}  // namespace usp::emulator::test
