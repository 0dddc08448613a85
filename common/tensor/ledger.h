#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace usp {

/// The operations that a Communicator offers.
enum class CommKind : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  send,
  recv,
  barrier,
};

/// As the records have it, such as "all_reduce".
std::string_view name(CommKind kind);

/// What a rank has communicated, by communicator ("dp", "tp", ...) and kind of operation. An
/// operation enters with its bytes when it is started, and with its time when it has been waited
/// for: what a stretch of the program sends is the difference between its ends.
class Ledger {
 public:
  /// The sums over the operations of one kind on one communicator.
  struct Entry {
    int64_t calls = 0;
    /// What the caller handed over: the tensor of an all-reduce, the larger of the two tensors of a
    /// reduce-scatter or all-gather.
    int64_t payload_bytes = 0;
    int64_t wire_bytes = 0;    ///< what this rank sends of tensors, message by message
    int64_t net_bytes = 0;     ///< of those, what goes to other nodes
    int64_t header_bytes = 0;  ///< what it sent beside them
    double seconds = 0;        ///< from the operation's start to its end
    double wait_seconds = 0;   ///< of those, the main thread's waiting

    Entry& operator+=(const Entry& other);
    Entry operator-(const Entry& earlier) const;
  };
  /// By communicator and kind.
  using Entries = std::map<std::pair<std::string, CommKind>, Entry>;

  /// Adds to one entry.
  void add(const std::string& communicator, CommKind kind, const Entry& entry);

  const Entries& entries() const { return entries_; }
  /// One entry; all zero where nothing was communicated.
  Entry get(const std::string& communicator, CommKind kind) const;
  /// The sum of all entries.
  Entry total() const;

  /// The payload of each entry since `earlier`, as a JSON object {"dp.all_reduce": bytes, ...}.
  std::string payload_json(const Ledger& earlier) const;
  /// Everything, for ledger.json.
  std::string to_json() const;

 private:
  Entries entries_;
};

}  // namespace usp
