#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/peers.h"
#include "comm/engine.h"
#include "comm/operation.h"

namespace usp {

/// Operations that have been started. They are over when wait() returns; until then the tensors
/// they were given must neither be written nor, where they are outputs, read.
class [[nodiscard]] Handle {
 public:
  Handle() = default;  ///< nothing to wait for
  Handle(Engine& engine, std::vector<std::shared_ptr<Operation>> operations);
  Handle(Handle&&) = default;
  Handle& operator=(Handle&& other);  ///< waits for what it held
  ~Handle();                          ///< waits, if nobody has

  /// Returns when all of them are done, lets go of their tensors and enters their time in the
  /// ledger, where their bytes are since they were started.
  /// Throws Error if one failed: ranks that disagree, a rank that is gone, a timeout.
  void wait();

 private:
  Engine* engine_ = nullptr;
  std::vector<std::shared_ptr<Operation>> operations_;
};

/// One message of a batch.
struct SendRecv {
  /// Seen from this rank.
  enum Direction { send, recv } direction;
  Tensor tensor;
  int peer;
};

/// A set of ranks that exchange tensors. Every rank of it must call the same collectives in the
/// same order; the ranks are numbered 0 to size() - 1.
///
/// Each operation comes in two forms: one that returns when it is done, and one that returns a
/// Handle at once. Tensors are contiguous. Sums are taken in the order of the ranks, so that their
/// bits do not depend on timing, engine, or the way a tensor is cut into pieces. On a communicator
/// of one rank nothing is sent and nothing counted.
class Communicator : public Peers {
 public:
  /// All ranks of the engine.
  static Communicator world(Engine& engine);
  /// The ranks of a group once more, for what they have to tell each other while one of its
  /// operations begins: the first collective (0), or the first message (1).
  static Communicator beside(Engine& engine, const Group& group, int which);

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size(); }
  const std::string& name() const { return group_->name; }
  Engine& engine() const { return *engine_; }
  /// The node in which a rank of these lies, by Engine::node_size(); nodes count from 0.
  int64_t node_of(int rank) const;

  /// tensor = the sum (max) of all ranks' tensors. A rank sends 2 (n-1)/n of its bytes.
  void all_reduce(Tensor tensor, ReduceOp op = ReduceOp::sum) const;
  Handle all_reduce_async(Tensor tensor, ReduceOp op = ReduceOp::sum) const;
  /// output = part rank() of the sum over ranks of `input`, which has size() times as many
  /// elements. Sends (n-1)/n of the input's bytes.
  void reduce_scatter(Tensor output, const Tensor& input, ReduceOp op = ReduceOp::sum) const;
  Handle reduce_scatter_async(Tensor output, const Tensor& input,
                              ReduceOp op = ReduceOp::sum) const;
  /// output = every rank's input, one after the other; output may contain input at its own place.
  /// Sends (n-1)/n of the output's bytes.
  void all_gather(Tensor output, const Tensor& input) const;
  Handle all_gather_async(Tensor output, const Tensor& input) const;
  /// tensor = that of rank `root`.
  void broadcast(Tensor tensor, int root) const;
  Handle broadcast_async(Tensor tensor, int root) const;
  /// Part r of output = part rank() of rank r's input; size() parts of equal size.
  void all_to_all(Tensor output, const Tensor& input) const;
  Handle all_to_all_async(Tensor output, const Tensor& input) const;
  /// The same with parts of any number of elements, zero included: input holds
  /// input_counts[r] for rank r, output gets output_counts[r] from it.
  Handle all_to_all_v_async(Tensor output, const Tensor& input,
                            std::span<const int64_t> output_counts,
                            std::span<const int64_t> input_counts) const;
  /// To one rank, which receives as many elements of the same dtype.
  void send(const Tensor& tensor, int peer) const;
  Handle send_async(const Tensor& tensor, int peer) const;
  /// From one rank, which sends as many elements of the same dtype.
  void recv(Tensor tensor, int peer) const;
  Handle recv_async(Tensor tensor, int peer) const;
  /// Any number of messages in any order: cannot deadlock as long as every send meets a recv.
  Handle send_recv_async(std::span<const SendRecv> batch) const;
  /// Where a device's own library, such as NCCL, carries out operations: makes what it needs for
  /// collectives; for messages between these ranks, of which there will be no others. Every rank
  /// calls it. Without, all is made in the first collective, or message, to which all have to come.
  void connect() const;
  /// The part for messages: the pairs of ranks between which they will travel.
  void connect_pairs(const Pairs& pairs) const;
  /// Returns when every rank has called it.
  void barrier() const;
  /// Whether it is true on any rank.
  bool any(bool value) const;
  /// The sum over ranks of a number on the host.
  double sum(double value) const;
  /// For the records of a run, of less than 2 GiB each; does not enter the ledger.
  std::vector<std::string> all_gather_text(const std::string& text) const override;

  /// Cuts this communicator up: ranks of equal colour share a new one, in their order here. Every
  /// rank calls it with the same function, which maps a rank of this communicator to its colour.
  Communicator split(std::string name, const std::function<int(int)>& colour_of) const;

 private:
  Communicator(Engine& engine, std::shared_ptr<Group> group)
      : engine_(&engine), group_(std::move(group)) {}

  /// What an operation reads and what it overwrites; either may be undefined.
  struct Tensors {
    Tensor input, output;
  };

  std::shared_ptr<Operation> make(CommKind kind, const Tensors& tensors, int64_t count,
                                  int64_t payload_bytes) const;
  /// Hands over operations that may begin together.
  Handle start(std::vector<std::shared_ptr<Operation>> operations) const;
  Handle start(std::shared_ptr<Operation> operation) const;
  std::shared_ptr<Operation> point_to_point(CommKind kind, const Tensor& tensor, int peer) const;
  void check_rank(int rank, const char* what) const;

  Engine* engine_;
  std::shared_ptr<Group> group_;
};

/// Whether all ranks run on one machine, and so read one clock. Collective over the world.
bool on_one_machine(const Communicator& world);

/// What is sent while it lives does not enter the ledger: measurements and records of the run.
class UncountedTraffic {
 public:
  UncountedTraffic();
  ~UncountedTraffic();
  UncountedTraffic(const UncountedTraffic&) = delete;
  UncountedTraffic& operator=(const UncountedTraffic&) = delete;

 private:
  Ledger before_;
};

}  // namespace usp
