#pragma once

#include <functional>

#include "comm/communicator.h"

namespace usp {

/// Runs body() as the whole of main on every rank of an MPI job, or as a world of one without
/// mpiexec. An exception becomes the exit code of every rank and, as in run_main(), one line
/// `error: ...`. The rank that threw first prints it; rank 0 prints a UsageError. No rank outlives
/// a run that has failed.
int run_ranks_main(int (*body)(const Communicator& world, int argc, char** argv), int argc,
                   char** argv);

/// Runs body() as the whole of main in a world of one rank: no MPI, no other process. Exceptions
/// end it as those of run_main().
int run_alone_main(int (*body)(const Communicator& world, int argc, char** argv), int argc,
                   char** argv);

/// Runs body() on each of `ranks` threads, every one with a Runtime of its own on the device, and
/// returns when all have ended. Throws what the first rank to fail has thrown; its peers end with
/// PeerFailed. For tests and exercises: no MPI, one process.
void run_threads(int ranks, const std::function<void(const Communicator& world)>& body,
                 double timeout_seconds = 60, Device device = Device::cpu);

}  // namespace usp
