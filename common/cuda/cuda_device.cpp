#include "cuda/cuda_device.h"

#include <cublasLt.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/check.h"
#include "cuda/cuda_backend.h"
#include "cuda/errors.h"
#include "cuda/kernels.h"
#include "tensor/backend.h"

namespace usp {

namespace cuda {

namespace {

/// Lengths of rows that this thread's kernels moved element by element, the shortest first.
thread_local std::set<int64_t> narrow_rows;
constexpr size_t kNamedRows = 8;        ///< at most: what depends on the data has many
constexpr int64_t kLeastNarrow = 1000;  ///< elements of a row that is worth a word

/// How many GPUs there are; throws UsageError where there is none, or none for this program.
int count_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  int driver = 0, runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  if (status == cudaErrorInsufficientDriver && driver > 0) {
    usage_error(
        "device=cuda: the driver knows CUDA up to {}, and this program was built with {}; try a "
        "newer "
        "driver, or --device cpu",
        version_text(driver), version_text(runtime));
  }
  if (status == cudaErrorInsufficientDriver) {
    usage_error("device=cuda: there is no NVIDIA driver here; try --device cpu");
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    usage_error(
        "device=cuda: the driver shows no GPU; is CUDA_VISIBLE_DEVICES empty? Try --device cpu");
  }
  if (status == cudaErrorDevicesUnavailable) USP_CUDA(status);
  usage_error("device=cuda: CUDA does not start: {}; try --device cpu", cudaGetErrorString(status));
}

}  // namespace

UploadRing::~UploadRing() {
  for (const Buffer& buffer : buffers_) {
    static_cast<void>(cudaEventDestroy(buffer.copied));
    static_cast<void>(cudaFreeHost(buffer.memory));
  }
}

bool UploadRing::upload(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  const bool waited = make_room();
  const Buffer buffer = buffers_.front();
  std::memcpy(buffer.memory, from, bytes);
  USP_CUDA(cudaMemcpyAsync(to, buffer.memory, bytes, cudaMemcpyHostToDevice, stream));
  USP_CUDA(cudaEventRecord(buffer.copied, stream));
  buffers_.pop_front();
  buffers_.push_back(buffer);
  return waited;
}

/// Sees to it that the first buffer is free. Returns whether the host had to wait.
bool UploadRing::make_room() {
  if (!buffers_.empty()) {
    const cudaError_t status = cudaEventQuery(buffers_.front().copied);
    if (status == cudaSuccess) return false;
    if (status != cudaErrorNotReady) check(status, "cudaEventQuery", __FILE__, __LINE__);
    if (buffers_.size() == kMaxBuffers) {
      USP_CUDA(cudaEventSynchronize(buffers_.front().copied));
      return true;
    }
  }
  Buffer buffer{};
  USP_CUDA(cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming));
  USP_CUDA(cudaMallocHost(&buffer.memory, kBufferBytes));
  buffers_.push_front(buffer);
  return false;
}

void note_narrow_rows(int64_t length) {
  if (length >= kLeastNarrow && narrow_rows.size() < kNamedRows) narrow_rows.insert(length);
}

CudaDevice::CudaDevice(int index) : index_(index) {
  narrow_rows.clear();
  use();
  USP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  marks_.emplace(stream_);
}

CudaDevice::~CudaDevice() {
  static_cast<void>(cudaSetDevice(index_));  // whoever lets go of it last
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaFree(connecting_));
  for (cudaStream_t stream : {down_, up_, stream_}) {
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
}

std::string CudaDevice::description() const {
  cudaDeviceProp properties{};
  USP_CUDA(cudaGetDeviceProperties(&properties, index_));
  int driver = 0;
  USP_CUDA(cudaDriverGetVersion(&driver));
  return fmt::format("{}, compute capability {}.{}, driver for CUDA {}", properties.name,
                     properties.major, properties.minor, version_text(driver));
}

void CudaDevice::require(DType dtype) const {
  constexpr int kFirstOfBf16 = 8;  // Ampere
  cudaDeviceProp properties{};
  USP_CUDA(cudaGetDeviceProperties(&properties, index_));
  if (dtype != DType::bf16 || properties.major >= kFirstOfBf16) return;
  usage_error(
      "dtype=bf16: this GPU, {} of compute capability {}.{}, multiplies no bf16, which takes "
      "{}.0 or later; try --dtype f32, or --device cpu",
      properties.name, properties.major, properties.minor, kFirstOfBf16);
}

std::string CudaDevice::matmul_library() const {
  const size_t version = cublasLtGetVersion();  // 130100 for 13.1.0
  return fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<Backend> CudaDevice::make_backend() { return make_cuda_backend(stream_, counts_); }

std::vector<std::string> CudaDevice::remarks() const {
  std::vector<std::string> remarks;
  const MatmulDetours& detours = counts_.detours;
  const AttentionCalls& calls = counts_.attention;
  if (detours.by_copies + detours.by_own_kernel > 0) {
    remarks.push_back(
        fmt::format("cuBLASLt had no kernel for some products: {} by aligned copies, {} by a "
                    "kernel of our own.",
                    detours.by_copies, detours.by_own_kernel));
  }
  if (calls.forward + calls.decoding + calls.backward > 0) {
    remarks.push_back(fmt::format(
        "Attention ran on tensor cores: calls forward {} ({}), decoding {} ({}), backward {} ({}), "
        "and {} on the blockwise kernels.",
        calls.forward, calls.forward_by, calls.decoding, calls.decoding_by, calls.backward,
        calls.backward_by, calls.blockwise));
  } else if (calls.blockwise > 0) {
    remarks.push_back(
        "Attention ran on the blockwise kernels: tensor cores need bf16, compute capability 8.0 "
        "and heads of 64 or 128 channels; with 128 KiB of shared memory for a block, also heads "
        "of 192 channels with values of 128.");
  }
  if (!narrow_rows.empty()) {
    remarks.push_back(fmt::format(
        "Rows of {} elements{} are not aligned to 16 bytes: they were moved element by element, "
        "at half the bandwidth or less.",
        fmt::join(narrow_rows, ", "),
        narrow_rows.size() < kNamedRows ? "" : ", and perhaps others,"));
  }
  return remarks;
}

void* CudaDevice::take(Device where, int64_t bytes) {
  void* pointer = nullptr;
  const cudaError_t status =
      where == Device::cpu ? cudaMallocHost(&pointer, bytes) : cudaMalloc(&pointer, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // or the next call would report it
    return nullptr;
  }
  USP_CUDA(status);
  return pointer;
}

void CudaDevice::give_back(Device where, void* pointer) {
  // Destructors come here, also after an error, which every call repeats.
  static_cast<void>(where == Device::cpu ? cudaFreeHost(pointer) : cudaFree(pointer));
}

int64_t CudaDevice::available_memory() {
  size_t available = 0, all = 0;
  USP_CUDA(cudaMemGetInfo(&available, &all));
  return static_cast<int64_t>(available);
}

void CudaDevice::upload(void* to, const void* from, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += UploadRing::kBufferBytes) {
    const int64_t piece = std::min(UploadRing::kBufferBytes, bytes - done);
    if (ring_.upload(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, piece,
                     stream_)) {
      count_wait();
    }
  }
}

void CudaDevice::download(void* to, const void* from, int64_t bytes) {
  USP_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
  wait();
}

void CudaDevice::clear(void* to, int64_t bytes) {
  USP_CUDA(cudaMemsetAsync(to, 0, bytes, stream_));
}

void CudaDevice::wait() {
  count_wait();
  USP_CUDA(cudaStreamSynchronize(stream_));
}

// Calls that do nothing until a profiler such as Nsight Systems has loaded the program.
void CudaDevice::begin_range(const char* name) { nvtxRangePushA(name); }

void CudaDevice::end_range() { nvtxRangePop(); }

}  // namespace cuda

std::shared_ptr<Accelerator> make_cuda_device(int rank) {
  return std::make_shared<cuda::CudaDevice>(rank % cuda::count_devices());
}

}  // namespace usp
