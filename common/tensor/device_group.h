#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/ledger.h"
#include "tensor/side_copies.h"

namespace usp {

/// Ranks whose devices exchange tensors by a library of the vendor's, such as NCCL: a communicator
/// with a queue of its own, which carries out one operation after the other.
class DeviceGroup {
 public:
  /// An operation as its rank sees it; addresses are of the device.
  struct Call {
    CommKind kind;
    const void* input = nullptr;
    void* output = nullptr;
    int64_t input_count = 0, output_count = 0;  ///< elements
    DType dtype = DType::f32;
    bool maximum = false;                              ///< of a reduction, which else is a sum
    int peer = -1;                                     ///< broadcast: the root; send, recv
    std::vector<int64_t> input_counts, output_counts;  ///< all_to_all: elements, by rank
  };

  virtual ~DeviceGroup() = default;
  /// Queues the operation, which begins when the device has done all that it was given so far. The
  /// event is behind it. All ranks call the same, in the same order; the host waits for none.
  virtual std::shared_ptr<SideCopies::Event> start(const Call& call) = 0;

  // For any thread.
  /// What the library has noticed of a failure, of this rank or of another; empty if nothing.
  virtual std::string error() = 0;
  /// Ends what is under way, whose outputs are then undefined. Nothing can be started any more.
  virtual void abort() = 0;
};

/// An accelerator whose vendor has such a library implements it, too. For a rank's main thread.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;
  /// Throws UsageError where the program cannot use the library: it was built without, there is
  /// none here, or one that is older than what the program was built with.
  virtual void require() = 0;
  /// Why two ranks cannot share a device here, as what follows "they share one"; empty where they
  /// can.
  virtual std::string why_not_shared() = 0;
  /// What the ranks of a new group hand to join(); one of them asks for it.
  virtual std::string new_group_id() = 0;
  /// Returns when all ranks of the group have called it.
  virtual std::unique_ptr<DeviceGroup> join(const std::string& id, int ranks, int rank) = 0;
};

}  // namespace usp
