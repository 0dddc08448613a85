/// The functions of NCCL that ranks need, in the place of the library itself: like cuBLASLt it is
/// opened when the first of them is called, so that a machine without it can start the program.
#if __has_include(<nccl.h>)

#include <nccl.h>

#include "cuda/loaded/forward.h"

namespace usp::cuda {

namespace {

void* nccl() {
  static void* const opened = open_library("libnccl.so.2", "comm=nccl", "--comm mpi");
  return opened;
}

}  // namespace

}  // namespace usp::cuda

#define USP_FORWARD_NCCL(RESULT, NAME, PARAMETERS, ARGUMENTS) \
  USP_FORWARD(usp::cuda::nccl, RESULT, NAME, PARAMETERS, ARGUMENTS)

USP_FORWARD_NCCL(const char*, ncclGetErrorString, (ncclResult_t result), (result))
USP_FORWARD_NCCL(const char*, ncclGetLastError, (ncclComm_t comm), (comm))
USP_FORWARD_NCCL(ncclResult_t, ncclGetVersion, (int* version), (version))
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
