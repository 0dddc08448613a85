#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "comm/operation.h"
#include "tensor/device_group.h"

namespace usp {

class Engine;

/// The communicators of a device's own library that belong to a Group. For collectives there is
/// one; messages to each rank, and from it, have one each: they may overtake each other, and what a
/// rank sends must not wait for what it receives.
struct DeviceGroups {
  /// The one for an operation, or nullptr while there is none.
  DeviceGroup* find(const Operation& operation);

  std::shared_ptr<Accelerator> device;  ///< which they need
  std::mutex mutex;  ///< guards what follows: the communication thread looks, too
  std::unique_ptr<DeviceGroup> collectives;
  std::map<int, std::unique_ptr<DeviceGroup>> sends, recvs;  ///< by peer
};

/// Operations that a device carries out by its own library, such as NCCL, from its own memory.
///
/// Such a library does not compare what ranks ask for. So their communication threads send each
/// other the header of the operation's first messages, without the messages; no device waits for
/// it, and the ledger does not count it.
///
/// A group's communicators are made when its first collective, or its first message, is: every rank
/// of it has to come to that, and the ids travel by the host.
class DeviceExchange {
 public:
  /// Queues the operation behind all that the device was given so far. For the main thread, as is
  /// end().
  static void start(Engine& engine, Operation& operation);
  /// What the device is given from here on finds the output in its place. The host does not wait.
  static void end(const Operation& operation);
  /// Throws Error if the library has noticed a failure. For the communication thread, as is
  /// abort().
  static void check(const Operation& operation);
  /// Gives up the operation, so that nobody waits for it for ever.
  static void abort(const Operation& operation);
};

}  // namespace usp
