#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/staging.h"
#include "tensor/ledger.h"
#include "tensor/tensor.h"

namespace usp {

struct DeviceGroups;

/// How a reduction combines the values of the ranks.
enum class ReduceOp : uint8_t { sum, max };

/// What the ranks of a communicator know of it.
struct Group {
  std::string name;          ///< "world", "dp", ...: appears in the ledger and in errors
  int64_t id = 0;            ///< tells its messages from those of other communicators
  int rank = 0;              ///< of this rank within the group
  std::vector<int> members;  ///< world rank of each rank of the group

  /// The device's own communicators, where its library carries out operations; see DeviceExchange.
  std::shared_ptr<DeviceGroups> on_device;

  int64_t collectives = 0;            ///< started so far
  std::vector<int64_t> sends, recvs;  ///< to and from each rank, started so far
  /// Where contributions to this rank's slice arrive. Reductions of a group are carried out one
  /// after the other, so all that are under way share it; it goes with the last of them.
  std::weak_ptr<Tensor> scratch;

  int size() const { return static_cast<int>(members.size()); }
  /// The node of a rank of the group, where this many ranks of the world make one; 0: all of them.
  int64_t node_of(int rank, int64_t node_size) const {
    return node_size == 0 ? 0 : members[rank] / node_size;
  }
};

/// Ranks of a group between which messages go, from the first to the second.
using Pairs = std::vector<std::pair<int, int>>;

/// What a rank sends for an operation.
struct Sends {
  int64_t messages = 0;
  int64_t wire_bytes = 0;  ///< in all of them
  int64_t net_bytes = 0;   ///< in messages to ranks of other nodes

  bool operator==(const Sends&) const = default;
};

/// Bytes that go to, or come from, another rank of the group.
struct Message {
  int peer;  ///< rank within the group
  void* data;
  int64_t bytes;
};

/// Messages that may all be under way at once, and what this rank does when they have arrived.
struct Stage {
  std::vector<Message> sends, receives;
  std::function<void()> finish;
  bool early = false;  ///< its messages may be under way together with the stage before's
  /// Parts of the operation's input that no stage before has sent or read.
  std::vector<Elements> input;
  /// Parts of the operation's output that are there once this stage is finished, but not before.
  std::vector<Elements> output;
  /// Behind the way of the one from a device, and of the other to it; nullptr where there is none.
  std::shared_ptr<SideCopies::Event> staged, uploaded;
};

/// One call of a Communicator, from the moment it is queued until wait() has returned.
///
/// The main thread fills it, the engine plans it, the communication thread carries it out, and
/// `done` hands it back. The tensors belong to the main thread alone: it releases them in wait(),
/// at a fixed point of the program, so that memory peaks do not depend on the speed of messages.
struct Operation {
  CommKind kind;
  std::shared_ptr<Group> group;
  int64_t number = 0;  ///< of this collective in the group; of this send or recv with the peer
  int peer = -1;       ///< send, recv: rank within the group
  int root = -1;       ///< broadcast
  ReduceOp reduce = ReduceOp::sum;
  DType dtype = DType::f32;
  int64_t count = 0;  ///< elements, the same on every rank; 0 where ranks may differ
  std::vector<int64_t> input_counts, output_counts;  ///< all_to_all: elements, by rank
  int64_t payload_bytes = 0;

  /// All that its messages touch: kept alive until wait().
  struct Memory {
    /// What is read and what is overwritten. Both are the same for an all_reduce; one is undefined
    /// where a rank only sends, or only receives.
    Tensor input, output;
    std::shared_ptr<Tensor> scratch;  ///< the group's
    std::shared_ptr<Staged> staged;   ///< of tensors that lie on a device; nullptr elsewhere
    /// Behind the operation, where the device's own library carries it out; nullptr elsewhere.
    std::shared_ptr<SideCopies::Event> over;
  };
  Memory memory;
  std::vector<Stage> stages;  ///< by the engine
  bool by_device = false;     ///< carried out by the device's own library: DeviceExchange
  int64_t piece_bytes = 0;    ///< the engine's piece_limit()

  int64_t flight_entry = -1;
  int64_t recorded_as = -1;  ///< by the runtime's Recorder; -1: it was told nothing
  std::chrono::steady_clock::time_point queued;  ///< by the main thread
  int64_t queued_ns = -1;                        ///< clock_ns() then, where a trace is recorded
  int64_t queued_cpu_ns = -1;                    ///< its CPU clock then, likewise
  int64_t wire_bytes = 0, header_bytes = 0;      ///< sent by this rank
  int64_t begin_ns = 0, end_ns = 0;              ///< steady clock; carried out from, to
  std::string error;                             ///< why it failed; empty if it did not
  bool peer_failed = false;                      ///< because another rank failed first
  std::atomic<int> done{0};

  /// "all_reduce #12 of dp (f32, 1000 elements)"
  std::string to_string() const;
};

}  // namespace usp
