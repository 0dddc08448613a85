#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

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

  std::mutex mutex;  ///< guards what follows: the communication thread looks, too
  std::shared_ptr<DeviceGroup> collectives;
  std::map<int, std::shared_ptr<DeviceGroup>> sends, recvs;  ///< by peer
};

/// Operations that a device carries out by its own library, such as NCCL, from its own memory.
///
/// Such a library does not compare what ranks ask for. So their communication threads send each
/// other the header of the operation's first messages, without the messages; no device waits for
/// it, and the ledger does not count it.
///
/// The library waits on the host for the other ranks where they join a communicator and where they
/// leave it. Ranks that do so in different orders wait for ever. So communicators are made with the
/// mesh, pairs in one order for the whole group, and all are left in reverse. Whatever may wait
/// stands in the flight record before it begins. What was not made ahead is made by a group's first
/// collective, or its first message: every rank of it has to come to that. Ids travel by the host.
class DeviceExchange {
 public:
  explicit DeviceExchange(Engine& engine) : engine_(engine) {}
  ~DeviceExchange();
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  // For the main thread.
  /// Makes the communicator for collectives, unless there is one.
  void connect(const std::shared_ptr<Group>& group);
  /// Makes those for messages from one rank of the group to another, unless it has some.
  void connect_pairs(const std::shared_ptr<Group>& group, const Pairs& pairs);
  /// Queues operations behind all that the device was given so far; several of them together.
  void start(std::span<const std::shared_ptr<Operation>> operations);
  /// What the device is given from here on finds the output in its place. The host does not wait.
  void end(const Operation& operation);
  /// Leaves every communicator, the last one first.
  void leave();

  // For the communication thread.
  /// Throws Error if the library has noticed a failure.
  static void check(const Operation& operation);
  /// Gives up all communicators, so that nobody waits for the others for ever. Does not wait.
  void abort();

 private:
  struct Joined {
    std::string name;
    std::shared_ptr<DeviceGroup> group;
  };
  DeviceLibrary* library();
  std::shared_ptr<DeviceGroup> keep(const std::string& name,
                                    const std::function<std::unique_ptr<DeviceGroup>()>& join);
  void give_up(const std::shared_ptr<DeviceGroup>& group);
  DeviceGroups& groups_of(Group& group);
  DeviceGroup* group_for(const Operation& operation);

  Engine& engine_;
  std::shared_ptr<Accelerator> device_;  ///< which they need

  std::mutex mutex_;            ///< guards what follows
  std::vector<Joined> joined_;  ///< in order
  std::vector<std::thread> aborting_;
  bool aborted_ = false;
};

}  // namespace usp
