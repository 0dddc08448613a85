/// The functions of NCCL that ranks need, in the place of the library itself: like cuBLASLt it is
/// opened when the first of them is called, so that a machine without it can start the program.
#if __has_include(<nccl.h>)

#include <dlfcn.h>
#include <nccl.h>

#include "base/check.h"

namespace usp::cuda {

namespace {

void* nccl_library() {
  static void* const opened = [] {
    constexpr const char* kName = "libnccl.so.2";
    void* const handle = dlopen(kName, RTLD_NOW);
    if (handle == nullptr) {
      usage_error(
          "comm=nccl needs {}, which the loader does not find; try "
          "LD_LIBRARY_PATH=/folder/with/it, or --comm mpi",
          kName);
    }
    return handle;
  }();
  return opened;
}

template <class Function>
Function* loaded_from_nccl(const char* name) {
  void* const found = dlsym(nccl_library(), name);
  USP_CHECK(found != nullptr, "{} is no function of the NCCL that is here", name);
  return reinterpret_cast<Function*>(found);
}

}  // namespace

}  // namespace usp::cuda

/// Defines the library's function `NAME`: calls what the opened library has under this name.
#define USP_FORWARD_NCCL(RESULT, NAME, PARAMETERS, ARGUMENTS)                                   \
  extern "C" RESULT NAME PARAMETERS {                                                           \
    static decltype(NAME)* const function = usp::cuda::loaded_from_nccl<decltype(NAME)>(#NAME); \
    return function ARGUMENTS;                                                                  \
  }

USP_FORWARD_NCCL(const char*, ncclGetErrorString, (ncclResult_t result), (result))
USP_FORWARD_NCCL(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), (id))
USP_FORWARD_NCCL(ncclResult_t, ncclCommInitRank,
                 (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank), (comm, ranks, id, rank))
USP_FORWARD_NCCL(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm))
USP_FORWARD_NCCL(ncclResult_t, ncclCommAbort, (ncclComm_t comm), (comm))
USP_FORWARD_NCCL(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* error),
                 (comm, error))
USP_FORWARD_NCCL(ncclResult_t, ncclAllReduce,
                 (const void* send, void* receive, size_t count, ncclDataType_t type,
                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
                 (send, receive, count, type, op, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclReduceScatter,
                 (const void* send, void* receive, size_t count, ncclDataType_t type,
                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
                 (send, receive, count, type, op, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclAllGather,
                 (const void* send, void* receive, size_t count, ncclDataType_t type,
                  ncclComm_t comm, cudaStream_t stream),
                 (send, receive, count, type, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclBroadcast,
                 (const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                  ncclComm_t comm, cudaStream_t stream),
                 (send, receive, count, type, root, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclSend,
                 (const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream),
                 (send, count, type, peer, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclRecv,
                 (void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream),
                 (receive, count, type, peer, comm, stream))
USP_FORWARD_NCCL(ncclResult_t, ncclGroupStart, (), ())
USP_FORWARD_NCCL(ncclResult_t, ncclGroupEnd, (), ())

#endif
