#include "base/check.h"
#include "cuda/cuda_device.h"
#include "cuda/errors.h"
#include "tensor/runtime.h"

#if __has_include(<nccl.h>) && !defined(USP_WITHOUT_NCCL)

#include <nccl.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <string_view>
#include <utility>

namespace usp::cuda {

namespace {

void check_nccl(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  const Runtime* runtime = Runtime::find();
  const std::string more = ncclGetLastError(nullptr);
  fail("{} failed{}: {}{}{}", call,
       runtime == nullptr ? "" : fmt::format(" on rank {}", runtime->rank()),
       ncclGetErrorString(result), more.empty() ? "" : ": ", more);
}

/// A call of NCCL that must succeed.
#define USP_NCCL(call) check_nccl((call), #call)

/// NCCL writes 22809 for 2.28.9, and wrote 2804 for 2.8.4.
std::string nccl_version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;
  return fmt::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      break;
  }
  return ncclInt32;
}

/// Settings that the library reads in its first call.
void settle() {
  // Kernels of several communicators start in the order in which the host has queued them.
  [[maybe_unused]] static const int in_order =
      setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  // Ranks are connected for collectives when they join, not in the first one of each size: there
  // the host would wait for the others, in whatever order they come.
  [[maybe_unused]] static const int connected =
      setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
}

}  // namespace

/// A communicator and its stream.
class CudaDevice::NcclGroup : public DeviceGroup {
 public:
  /// While it lives, the communicator is given work, and is not aborted: NCCL takes none after.
  class Use {
   public:
    /// Throws Error for a communicator that was given up.
    Use(NcclGroup& group, CommKind kind) : group_(group) {
      const std::lock_guard lock(group_.mutex_);
      USP_CHECK(!group_.ended_, "{} on a communicator that was given up", name(kind));
      ++group_.uses_;
    }
    ~Use() {
      const std::lock_guard lock(group_.mutex_);
      --group_.uses_;
      group_.used_.notify_all();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    NcclGroup& group_;
  };

  NcclGroup(CudaDevice& device, const std::string& id, int ranks, int rank)
      : device_(device), ranks_(ranks), rank_(rank) {
    ncclUniqueId unique;
    USP_CHECK(id.size() == sizeof(unique), "an id of NCCL has {} bytes, not {}", sizeof(unique),
              id.size());
    std::memcpy(&unique, id.data(), sizeof(unique));
    settle();
    USP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    USP_NCCL(ncclCommInitRank(&comm_, ranks, unique, rank));
  }
  ~NcclGroup() override { static_cast<void>(cudaStreamDestroy(stream_)); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  void leave() override {
    if (end()) USP_NCCL(ncclCommDestroy(comm_));
  }
  std::string error() override {
    const std::lock_guard lock(mutex_);
    ncclResult_t result = ncclSuccess;
    if (!ended_) USP_NCCL(ncclCommGetAsyncError(comm_, &result));
    return result == ncclSuccess || result == ncclInProgress ? "" : ncclGetErrorString(result);
  }
  void abort() override {
    static_cast<void>(cudaSetDevice(device_.index_));
    if (end()) static_cast<void>(ncclCommAbort(comm_));
  }

  /// What follows begins when the device has done all that it was given so far. Returns a mark.
  int64_t begin() {
    device_.let_follow_work(stream_);
    return device_.marks_->make(stream_);
  }
  std::shared_ptr<SideCopies::Event> mark_end(const Call& call, int64_t begin_mark) {
    const int64_t elements = std::max(call.input_count, call.output_count);
    return device_.record(stream_, begin_mark, elements * bytes_of(call.dtype));
  }

  /// One element goes the way that all messages of this pair will go, so that both ends are
  /// connected when it has come.
  void connect() {
    Call call;
    call.kind = rank_ == 0 ? CommKind::send : CommKind::recv;
    (rank_ == 0 ? call.input_count : call.output_count) = 1;
    call.input = call.output = device_.connecting_;
    call.peer = 1 - rank_;
    carry_out(call);
    USP_CUDA(cudaStreamSynchronize(stream_));
  }

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

 private:
  /// Whether nobody had ended it yet. Nothing begins to use it any more, and what does is over,
  /// unless it waits for another rank: then to end it sets it free.
  bool end() {
    constexpr std::chrono::seconds kMostOfAUse(1);
    std::unique_lock lock(mutex_);
    if (std::exchange(ended_, true)) return false;
    used_.wait_for(lock, kMostOfAUse, [this] { return uses_ == 0; });
    return true;
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
  std::mutex mutex_;  ///< guards the calls that do not wait, and what follows
  std::condition_variable used_;
  int uses_ = 0;
  bool ended_ = false;
};

void CudaDevice::require() {
  settle();
  int version = 0;
  USP_NCCL(ncclGetVersion(&version));
  if (version >= NCCL_VERSION_CODE) return;
  usage_error(
      "comm=nccl: the NCCL here is {}, and this program was built with {}; try LD_LIBRARY_PATH="
      "/folder/with/that or a later one, or --comm mpi",
      nccl_version_text(version), nccl_version_text(NCCL_VERSION_CODE));
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
                     nccl_version_text(version));
}

std::string CudaDevice::new_group_id() {
  ncclUniqueId id;
  USP_NCCL(ncclGetUniqueId(&id));
  return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

std::unique_ptr<DeviceGroup> CudaDevice::join(const std::string& id, int ranks, int rank) {
  return std::make_unique<NcclGroup>(*this, id, ranks, rank);
}

std::unique_ptr<DeviceGroup> CudaDevice::join_pair(const std::string& id, bool sends) {
  if (connecting_ == nullptr) {
    USP_CUDA(cudaMalloc(&connecting_, sizeof(float)));
    USP_CUDA(cudaMemsetAsync(connecting_, 0, sizeof(float), stream_));
    USP_CUDA(cudaStreamSynchronize(stream_));
  }
  auto pair = std::make_unique<NcclGroup>(*this, id, 2, sends ? 0 : 1);
  pair->connect();
  return pair;
}

std::vector<std::shared_ptr<SideCopies::Event>> CudaDevice::start(std::span<const Start> calls) {
  std::list<NcclGroup::Use> uses;
  std::vector<int64_t> marks;
  for (const auto& [group, call] : calls) {
    NcclGroup& used = dynamic_cast<NcclGroup&>(*group);
    uses.emplace_back(used, call.kind);
    marks.push_back(used.begin());
  }
  if (calls.size() > 1) USP_NCCL(ncclGroupStart());
  for (const auto& [group, call] : calls) dynamic_cast<NcclGroup&>(*group).carry_out(call);
  if (calls.size() > 1) USP_NCCL(ncclGroupEnd());
  std::vector<std::shared_ptr<Event>> over;
  for (size_t i = 0; i < calls.size(); ++i) {
    over.push_back(dynamic_cast<NcclGroup&>(*calls[i].group).mark_end(calls[i].call, marks[i]));
  }
  return over;
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

std::unique_ptr<DeviceGroup> CudaDevice::join_pair(const std::string&, bool) {
  fail("this program was built without NCCL");
}

std::vector<std::shared_ptr<SideCopies::Event>> CudaDevice::start(std::span<const Start>) {
  fail("this program was built without NCCL");
}

}  // namespace usp::cuda

#endif
