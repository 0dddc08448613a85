#include "base/check.h"
#include "cuda/cuda_device.h"
#include "cuda/errors.h"

#if __has_include(<nccl.h>) && !defined(USP_WITHOUT_NCCL)

#include <nccl.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string_view>

namespace usp::cuda {

namespace {

void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) fail("{} failed: {}", call, ncclGetErrorString(result));
}

/// A call of NCCL that must succeed.
#define USP_NCCL(call) check_nccl((call), #call)

/// NCCL writes 22809 for 2.28.9, and wrote 2804 for 2.8.4.
std::string version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;
  return fmt::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

ncclDataType_t type_of(DType dtype) {
  static_assert(DType::f32 < DType::bf16 && DType::bf16 < DType::f64 && DType::f64 < DType::i32);
  constexpr std::array kTypes = {ncclFloat32, ncclBfloat16, ncclFloat64, ncclInt32};
  return kTypes[static_cast<size_t>(dtype)];
}

}  // namespace

/// A communicator and its stream.
class CudaDevice::NcclGroup : public DeviceGroup {
 public:
  NcclGroup(CudaDevice& device, const std::string& id, int ranks, int rank)
      : device_(device), ranks_(ranks), rank_(rank) {
    ncclUniqueId unique;
    USP_CHECK(id.size() == sizeof(unique), "an id of NCCL has {} bytes, not {}", sizeof(unique),
              id.size());
    std::memcpy(&unique, id.data(), sizeof(unique));
    USP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    // Kernels of several communicators start in the order in which the host has queued them.
    [[maybe_unused]] static const int in_order =
        setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
    USP_NCCL(ncclCommInitRank(&comm_, ranks, unique, rank));
  }
  ~NcclGroup() override {
    if (comm_ != nullptr && !aborted_.exchange(true)) static_cast<void>(ncclCommDestroy(comm_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  std::shared_ptr<SideCopies::Event> start(const Call& call) override {
    USP_CHECK(!aborted_, "{} on a communicator that was given up", name(call.kind));
    device_.let_follow_work(stream_);
    const int64_t mark = device_.marks_->make(stream_);
    carry_out(call);
    const int64_t elements = std::max(call.input_count, call.output_count);
    return device_.record(stream_, mark, elements * bytes_of(call.dtype));
  }

  std::string error() override {
    ncclResult_t result = ncclSuccess;
    if (!aborted_) USP_NCCL(ncclCommGetAsyncError(comm_, &result));
    return result == ncclSuccess || result == ncclInProgress ? "" : ncclGetErrorString(result);
  }
  void abort() override {
    if (!aborted_.exchange(true)) static_cast<void>(ncclCommAbort(comm_));
  }

 private:
  void carry_out(const Call& call) {
    if (call.input_count == 0 && call.output_count == 0) return;  // which may have no address
    const ncclDataType_t type = type_of(call.dtype);
    const ncclRedOp_t op = call.maximum ? ncclMax : ncclSum;
    switch (call.kind) {
      case CommKind::all_reduce:
        USP_NCCL(
            ncclAllReduce(call.input, call.output, call.output_count, type, op, comm_, stream_));
        return;
      case CommKind::reduce_scatter:
        USP_NCCL(ncclReduceScatter(call.input, call.output, call.output_count, type, op, comm_,
                                   stream_));
        return;
      case CommKind::all_gather:
        USP_NCCL(ncclAllGather(call.input, call.output, call.input_count, type, comm_, stream_));
        return;
      case CommKind::broadcast: {
        void* there = call.output != nullptr ? call.output : const_cast<void*>(call.input);
        USP_NCCL(ncclBroadcast(there, there, std::max(call.input_count, call.output_count), type,
                               call.peer, comm_, stream_));
        return;
      }
      case CommKind::all_to_all:
        return all_to_all(call, type);
      case CommKind::send:
        USP_NCCL(ncclSend(call.input, call.input_count, type, call.peer, comm_, stream_));
        return;
      case CommKind::recv:
        USP_NCCL(ncclRecv(call.output, call.output_count, type, call.peer, comm_, stream_));
        return;
      case CommKind::barrier:
        break;  // has no tensors: the host's
    }
  }

  /// Grouped, so that no rank waits for another one's order.
  void all_to_all(const Call& call, ncclDataType_t type) {
    const char* from = static_cast<const char*>(call.input);
    char* to = static_cast<char*>(call.output);
    const int64_t width = bytes_of(call.dtype);
    USP_NCCL(ncclGroupStart());
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t sent = call.input_counts[rank], got = call.output_counts[rank];
      if (rank == rank_ && sent > 0) {
        USP_CUDA(cudaMemcpyAsync(to, from, sent * width, cudaMemcpyDeviceToDevice, stream_));
      } else if (rank != rank_) {
        if (sent > 0) USP_NCCL(ncclSend(from, sent, type, rank, comm_, stream_));
        if (got > 0) USP_NCCL(ncclRecv(to, got, type, rank, comm_, stream_));
      }
      from += sent * width;
      to += got * width;
    }
    USP_NCCL(ncclGroupEnd());
  }

  CudaDevice& device_;
  int ranks_, rank_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> aborted_ = false;
};

void CudaDevice::require() {
  int version = 0;
  USP_NCCL(ncclGetVersion(&version));
  if (version >= NCCL_VERSION_CODE) return;
  usage_error(
      "comm=nccl: the NCCL here is {}, and this program was built with {}; try LD_LIBRARY_PATH="
      "/folder/with/that or a later one, or --comm mpi",
      version_text(version), version_text(NCCL_VERSION_CODE));
}

std::string CudaDevice::why_not_shared() {
  constexpr int kSharingVersion = 23000;
  const char* allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (allowed == nullptr || std::string_view(allowed) != "1") {
    return "and NCCL wants one for each rank";
  }
  int version = 0;
  USP_NCCL(ncclGetVersion(&version));
  if (version >= kSharingVersion) return "";
  return fmt::format("which NCCL allows from 2.30 on, and the NCCL here is {}",
                     version_text(version));
}

std::string CudaDevice::new_group_id() {
  ncclUniqueId id;
  USP_NCCL(ncclGetUniqueId(&id));
  return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

std::unique_ptr<DeviceGroup> CudaDevice::join(const std::string& id, int ranks, int rank) {
  return std::make_unique<NcclGroup>(*this, id, ranks, rank);
}

}  // namespace usp::cuda

#else

namespace usp::cuda {

void CudaDevice::require() {
  usage_error(
      "comm=nccl: this program was built without NCCL, whose nccl.h was not found; try "
      "--comm mpi");
}

std::string CudaDevice::why_not_shared() { return "and there is no NCCL"; }

std::string CudaDevice::new_group_id() { fail("this program was built without NCCL"); }

std::unique_ptr<DeviceGroup> CudaDevice::join(const std::string&, int, int) {
  fail("this program was built without NCCL");
}

}  // namespace usp::cuda

#endif
