/// Devices, versions, errors, and launching.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>

#include "cuda.h"
#include "streams.h"
#include "threads.h"

namespace usp::emulator {
namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

constexpr size_t kSharedBytes = size_t{48} << 10;  // without cudaFuncSetAttribute

std::map<const void*, size_t>& dynamic_limits() {
  static auto* limits = new std::map<const void*, size_t>;
  return *limits;
}

bool is_device_number(int number) { return number >= 0 && number < options.device_count; }

/// Blocks run one after another, so only clusters of one.
bool is_carried_out(const cudaLaunchAttribute& attribute) {
  const auto& [x, y, z] = attribute.val.clusterDim;
  return attribute.id == cudaLaunchAttributeIgnore ||
         (attribute.id == cudaLaunchAttributeClusterDimension && x == 1 && y == 1 && z == 1);
}

size_t dynamic_limit(const void* kernel) {
  const auto limit = dynamic_limits().find(kernel);
  return limit == dynamic_limits().end() ? kSharedBytes : limit->second;
}

}  // namespace

int current_device() { return device; }

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t ready() {
  if (in_host_function) return cudaErrorNotPermitted;
  if (options.device_busy) return cudaErrorDevicesUnavailable;
  if (options.driver_version < CUDART_VERSION) return cudaErrorInsufficientDriver;
  return options.device_count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void (*call)(const void*),
                   const void* parameters, size_t bytes, bool instrumented) {
  const Locked locked(lock());
  if (const cudaError_t error = ready(); error != cudaSuccess) return remember(error);
  if (!is_stream(config.stream) || !of_this_device(config.stream, "a launch")) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (options.ptx_too_new) return remember(cudaErrorUnsupportedPtxVersion);
  if (kernel_has_failed()) return remember(outcome());  // nothing goes on in this process
  if (options.compute_capability < options.kernels_need_capability) {
    return remember(cudaErrorNoKernelImageForDevice);
  }
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    return remember(cudaErrorInvalidConfiguration);
  }
  if (config.dynamicSmemBytes > dynamic_limit(kernel) || bytes > 4096) {
    return remember(cudaErrorInvalidValue);
  }
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (!is_carried_out(config.attrs[i])) return remember(cudaErrorNotSupported);
  }
  const char* given = static_cast<const char*>(parameters);
  const size_t work = size_t{grid.x} * grid.y * grid.z * threads;
  enqueue(config.stream, work,
          [launch = Launch{grid,
                           block,
                           config.dynamicSmemBytes,
                           call,
                           {given, given + bytes},
                           kernel,
                           instrumented}] { run(launch); });
  const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking != nullptr && *blocking == '1') return remember(wait_for(config.stream));
  return cudaSuccess;
}

}  // namespace usp::emulator

using namespace usp::emulator;

#define USP_CALL(condition, otherwise)                                                 \
  const Locked locked(lock());                                                         \
  if (const cudaError_t error = ready(); error != cudaSuccess) return remember(error); \
  if (!(condition)) return remember(otherwise)

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

namespace {

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
#define USP_ERROR(name, text) \
  { name, #name, text }
constexpr ErrorText kErrors[] = {
    USP_ERROR(cudaSuccess, "no error"),
    USP_ERROR(cudaErrorInvalidValue, "invalid argument"),
    USP_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    USP_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    USP_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    USP_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    USP_ERROR(cudaErrorInsufficientDriver,
              "CUDA driver version is insufficient for CUDA runtime version"),
    USP_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    USP_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    USP_ERROR(cudaErrorNoKernelImageForDevice,
              "no kernel image is available for execution on the device"),
    USP_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    USP_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    USP_ERROR(cudaErrorUnsupportedPtxVersion,
              "the provided PTX was compiled with an unsupported toolchain."),
    USP_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    USP_ERROR(cudaErrorNotReady, "device not ready"),
    USP_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    USP_ERROR(cudaErrorNotSupported, "operation not supported"),
    USP_ERROR(cudaErrorNotPermitted, "operation not permitted")};

const ErrorText* text_of(cudaError_t error) {
  const auto same = [&](const ErrorText& other) { return other.error == error; };
  const ErrorText* found = std::find_if(std::begin(kErrors), std::end(kErrors), same);
  return found == std::end(kErrors) ? nullptr : found;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = text_of(error);
  return found == nullptr ? "unrecognized error code" : found->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = text_of(error);
  return found == nullptr ? "unrecognized error code" : found->text;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = options.driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t error = ready(); error != cudaSuccess) return remember(error);
  *count = options.device_count;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  USP_CALL(is_device_number(number), cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* number) {
  USP_CALL(true, cudaSuccess);
  *number = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  USP_CALL(is_device_number(number), cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated device");
  properties->uuid.bytes[0] = static_cast<char>(number + 1);
  properties->totalGlobalMem = options.device_memory;
  properties->sharedMemPerBlock = kSharedBytes;
  properties->sharedMemPerBlockOptin = options.shared_bytes;
  properties->sharedMemPerMultiprocessor = options.shared_bytes + 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = warpSize;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  std::copy_n(std::begin({1024, 1024, 64}), 3, properties->maxThreadsDim);
  std::copy_n(std::begin({0x7fffffff, 65535, 65535}), 3, properties->maxGridSize);
  properties->major = options.compute_capability / 10;
  properties->minor = options.compute_capability % 10;
  properties->multiProcessorCount = 4;
  properties->pciBusID = number + 1;
  properties->asyncEngineCount = 2;
  properties->unifiedAddressing = 1;
  properties->memoryBusWidth = 1024;
  properties->l2CacheSize = 1 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, number);
      error != cudaSuccess) {
    return error;
  }
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedBytes;
      break;
    case cudaDevAttrWarpSize:
      *value = warpSize;
      break;
    case cudaDevAttrClockRate:
      *value = 1000000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 1000000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = properties.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = options.shared_bytes + 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = options.shared_bytes;
      break;
    default:
      return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int number) {
  USP_CALL(is_device_number(number), cudaErrorInvalidDevice);
  std::snprintf(id, length, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  USP_CALL(true, cudaSuccess);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  USP_CALL(true, cudaSuccess);
  *total = options.device_memory;
  *free = options.device_memory - std::min(options.device_memory, allocated_bytes(device));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  USP_CALL(symbol != nullptr && function != nullptr, cudaErrorInvalidValue);
  const bool known =
      options.makes_tensor_maps && std::string_view(symbol) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result != nullptr) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  USP_CALL(function != nullptr, cudaErrorInvalidValue);
  *attributes = {};  // no registers and no spills here
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = options.compute_capability;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(dynamic_limit(function));
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  USP_CALL(function != nullptr, cudaErrorInvalidValue);
  *name = keep_name(function);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const bool dynamic = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
  USP_CALL(value >= 0 && (!dynamic || value <= options.shared_bytes), cudaErrorInvalidValue);
  if (dynamic) dynamic_limits()[function] = value;
  return cudaSuccess;
}
