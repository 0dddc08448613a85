#pragma once

#include <memory>
#include <span>
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

  /// Calls nothing of the library, which would wait for the other ranks: see leave().
  virtual ~DeviceGroup() = default;
  /// Returns when all ranks of the group have called it, or abort(), and the device has ended what
  /// was under way. All leave their groups in the same order. Nothing can be started any more.
  virtual void leave() = 0;

  // For any thread.
  /// What the library has noticed of a failure, of this rank or of another; empty if nothing.
  virtual std::string error() = 0;
  /// Ends what is under way, whose outputs are then undefined. Nothing can be started any more. As
  /// leave(), it returns when all ranks have come to it: where they do not, call it in a thread of
  /// its own.
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
  /// A group of two for messages from its rank 0 to its rank 1, which are connected when it
  /// returns: the library would do that in the first message, whose sender and receiver wait for
  /// each other.
  virtual std::unique_ptr<DeviceGroup> join_pair(const std::string& id, bool sends) = 0;

  /// An operation of a group that join() or join_pair() has made.
  struct Start {
    DeviceGroup* group;
    DeviceGroup::Call call;
  };
  /// Queues operations, which begin when the device has done all that it was given so far, together
  /// if they are several: none of them waits for another one's order. The events are behind them.
  /// All ranks of a group start the same, in the same order; the host waits for none.
  virtual std::vector<std::shared_ptr<SideCopies::Event>> start(std::span<const Start> calls) = 0;
};

}  // namespace usp
