#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <tuple>
#include <vector>

#include "base/peers.h"
#include "comm/device_exchange.h"
#include "comm/flight.h"
#include "comm/operation.h"
#include "comm/transport.h"

namespace usp {

class EmulatedLinks;
class Transfer;
struct Links;

/// Where an engine has what it sends and sums, which decides what a rank's device keeps for that.
enum class EngineKind : uint8_t {
  host,    ///< in the tensors themselves, which lie in memory of the host
  staged,  ///< in copies there, of tensors that lie on a device
  nccl,    ///< in the tensors, which lie on devices that exchange them by a library of their own
};

/// Bytes of a rank's device in which the other ranks' contributions to a reduction wait to be
/// added, on this rank of this many: none where they wait in memory of the host. Of ranks whose
/// slices differ, the first has the longest.
int64_t device_scratch(EngineKind kind, int64_t ranks, int64_t rank, int64_t numel, DType dtype);

/// Carries out operations. A Communicator belongs to one; so do all its children.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual int rank() const = 0;  ///< in the world
  virtual int size() const = 0;  ///< ranks of the world
  /// Decides how the operation is carried out: its stages, and the memory that it needs besides its
  /// tensors. The main thread calls it, before submit().
  virtual void prepare(Operation& operation) = 0;
  /// What this rank sends for an operation that has been prepared.
  virtual Sends sends(const Operation& operation) const;
  /// Takes operations that may begin together, and returns at once.
  virtual void submit(std::span<const std::shared_ptr<Operation>> operations) = 0;
  /// Makes what a device's own library needs for the group's collectives; and for its messages from
  /// one rank to another, of which there will be no others. Every rank of the group calls it.
  virtual void connect(const std::shared_ptr<Group>&) {}
  virtual void connect_pairs(const std::shared_ptr<Group>&, const Pairs&) {}
  /// Returns when the operation is done; throws Error if it failed.
  virtual void wait(Operation& operation) = 0;
  /// Waits for an operation without throwing, and releases its tensors. For the operations that are
  /// left when another one has failed.
  void abandon(Operation& operation);
  /// Whether this engine never sends a message: the dry one does not.
  virtual bool dry() const = 0;
  virtual Flight& flight() = 0;  ///< the record of this rank
  /// An operation under way for longer than this is reported, and the run ended.
  virtual void set_timeout(std::chrono::duration<double> timeout) = 0;

  /// Messages from here on travel by these links. Call it on all ranks, between two operations.
  virtual void emulate(const Links& links) = 0;

  /// Bytes in which contributions to a reduction wait to be added, at most. Larger reductions go
  /// piece by piece. Every rank sets the same, between two operations.
  int64_t scratch_limit() const { return scratch_limit_; }
  void limit_scratch(int64_t bytes) { scratch_limit_ = bytes; }
  static constexpr int64_t kScratchLimit = 8 << 20;

  /// Bytes of a message that are handed to the transport at a time, at most: MPI counts them in an
  /// int. Every rank sets the same, between two operations.
  int64_t piece_limit() const { return piece_limit_; }
  void limit_pieces(int64_t bytes) { piece_limit_ = bytes; }
  static constexpr int64_t kPieceLimit = 1 << 30;

  /// What carries out operations on tensors of a device: copies on the host (staged), or the device
  /// (nccl). Every rank sets the same, between two operations.
  EngineKind device_kind() const { return device_kind_; }
  void set_device_kind(EngineKind kind) { device_kind_ = kind; }

  /// Ranks of the world in a node of the machine, in a row; 0: all of them. The ledger tells what
  /// crosses nodes by it. Every rank sets the same, between two operations.
  int64_t node_size() const { return node_size_; }
  void set_node_size(int64_t ranks) { node_size_ = ranks; }

  /// The smallest communicator number that this rank has not used yet.
  int64_t next_group_id() const { return next_group_id_; }
  /// Marks this number, all smaller ones and the next two as used: those of
  /// Communicator::beside().
  void take_group_id(int64_t id) { next_group_id_ = id + 3; }

  /// Bytes of the header that travels before every message.
  static constexpr int64_t kHeaderBytes = 56;
  /// Format of all that ranks send each other: with every change a number that no other has had.
  static constexpr int kMessageFormat = 1;

 protected:
  /// Stages that send these elements, instead of the operation's tensors.
  void plan(Operation& operation, const Elements& input, const Elements& output,
            bool with_scratch) const;
  /// Memory for the other ranks' contributions, where the operation is a reduction.
  Elements provide_scratch(Operation& operation, const Elements& input) const;

 private:
  int64_t scratch_limit_ = kScratchLimit, piece_limit_ = kPieceLimit;
  int64_t node_size_ = 0;
  int64_t next_group_id_ = 1;
  EngineKind device_kind_ = EngineKind::staged;
};

/// The engine of a rank that exchanges messages: one communication thread advances all its
/// operations.
///
/// The engine carries out a communicator's collectives one after the other. The same holds for the
/// sends to each peer, and for the receives from it. Everything else may overtake. Two
/// communicators whose ranks enqueue in crossing order therefore do not deadlock, nor does a
/// pipeline whose neighbors send to each other at the same time.
///
/// Every message carries a header that says which operation it belongs to. Ranks that disagree
/// find out from the first message, on both sides.
///
/// Messages leave from memory of the host, where this rank's sums are taken, too. Tensors on a
/// device come there and go back by Staging; or the device carries out their operations itself, by
/// DeviceExchange, and the communication thread watches how long they take.
class QueueEngine : public Engine {
 public:
  /// `transport` must outlive the engine.
  explicit QueueEngine(Transport& transport);
  ~QueueEngine() override;

  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  void prepare(Operation& operation) override;
  void submit(std::span<const std::shared_ptr<Operation>> operations) override;
  void connect(const std::shared_ptr<Group>& group) override;
  void connect_pairs(const std::shared_ptr<Group>& group, const Pairs& pairs) override;
  void wait(Operation& operation) override;
  bool dry() const override { return false; }
  Flight& flight() override { return flight_; }
  void set_timeout(std::chrono::duration<double> timeout) override;
  void emulate(const Links& links) override;

  /// Tells the others that this rank has failed, and fails whatever it has under way.
  void fail_run(const std::string& message);
  /// The orderly end: tells the others and waits until all of them have come here too. Returns
  /// false if one has not within `patience`.
  bool leave(std::chrono::duration<double> patience);
  /// Leaves the communicators of the device's own library. For ranks of which all have come to
  /// leave(): where one has failed they are not left, which would wait for it.
  void leave_devices() { exchange_.leave(); }
  /// Ends every process of the run with this exit code after `grace`, in which other ranks can
  /// report what they know.
  void abort_after(std::chrono::milliseconds grace, int code);

 private:
  struct Active;
  using Clock = std::chrono::steady_clock;
  /// What the ranks are doing, gathered when an operation takes too long.
  struct Report {
    std::string cause;
    std::vector<std::string> answers;  ///< by world rank
    Clock::time_point end;
  };
  /// Group, peer (-1: collectives), direction.
  using ChannelKey = std::tuple<int64_t, int, CommKind>;

  void run();
  bool poll();
  /// Fails what this rank's device has under way: nobody comes any more.
  void give_up_on_device();
  void begin(Active& active);
  void begin_stage(Active& active);
  bool may_leave(const Stage& stage);
  void post_early(Active& active);
  std::vector<Transfer> post(const Active& active, int stage);
  bool advance(Active& active);
  void finish(Active& active);
  void read_notices();
  void check_time(const Active& active);
  void check_main();
  void report_late(const std::string& what, std::chrono::duration<double> elapsed);
  void check_departed(const Active& active);
  void break_down(const std::string& message, bool peer_failed);
  void fail_operation(Operation& operation) const;
  void abort_devices();
  void rest(Clock::time_point last_progress, int64_t rung);
  /// When the first of the messages that only wait for their time is due; nothing if there is none.
  std::optional<Clock::time_point> next_due() const;

  Transport& transport_;
  Flight flight_;
  Staging staging_;  ///< of the main thread
  DeviceExchange exchange_{*this};

  std::mutex mutex_;  ///< guards what follows, up to the blank line
  std::vector<std::shared_ptr<Operation>> submitted_;
  std::vector<Notice> announcements_;
  std::string broken_;  ///< why nothing works any more; empty while it does
  bool broken_by_peer_ = false;
  std::chrono::duration<double> timeout_{300};
  bool stopping_ = false;
  Clock::time_point abort_at_ = Clock::time_point::max();
  int abort_code_ = 1;
  bool main_knows_ = false;     ///< that the run is to end
  std::vector<char> departed_;  ///< by world rank
  std::condition_variable departed_changed_;
  std::shared_ptr<EmulatedLinks> links_to_be_;  ///< nullptr: as they are

  // Of the communication thread.
  std::shared_ptr<EmulatedLinks> links_;
  std::map<ChannelKey, std::deque<std::unique_ptr<Active>>> channels_;
  std::vector<Clock::time_point> departed_at_;  ///< by world rank; the epoch: still here
  std::optional<Report> report_;                ///< being gathered
  bool asked_ = false;                          ///< for a report, ever
  Clock::duration asking_device_{};             ///< what this poll has spent on that
  std::vector<std::vector<char>> spare_buffers_;
  std::vector<Operation::Memory> lost_;  ///< memory that messages given up may still touch

  std::thread thread_;
};

/// The engine of a single process that plays one rank of a world of any size: operations complete
/// at once, nothing is sent, and the ledger counts what would have been. It plans no messages:
/// their bytes follow from the sizes, so a large world costs no more than a small one.
class DryEngine : public Engine {
 public:
  /// `plays`: the engine whose memory it takes.
  DryEngine(int rank, int size, EngineKind plays = EngineKind::host)
      : rank_(rank), size_(size), plays_(plays), flight_(rank, size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void prepare(Operation& operation) override;
  Sends sends(const Operation& operation) const override;
  void submit(std::span<const std::shared_ptr<Operation>> operations) override;
  void wait(Operation&) override {}
  bool dry() const override { return true; }
  Flight& flight() override { return flight_; }
  void set_timeout(std::chrono::duration<double>) override {}
  void emulate(const Links&) override {}

 private:
  int rank_, size_;
  EngineKind plays_;
  Flight flight_;
};

}  // namespace usp
