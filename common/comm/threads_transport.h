#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/transport.h"

namespace usp {

/// What the ranks of one process share when each of them is a thread: a mailbox for every pair.
class ThreadsFabric {
 public:
  explicit ThreadsFabric(int size);
  int size() const { return size_; }

 private:
  friend class ThreadsTransport;

  struct Envelope {
    int64_t tag;
    const void* data;
    int64_t bytes;
    std::vector<char> copy;  ///< of a small message
    bool taken = false;
  };
  /// What one rank has sent to another and the other has not yet received.
  struct Mailbox {
    std::mutex mutex;
    std::deque<std::shared_ptr<Envelope>> sent;
  };
  struct Desk {
    Bell bell;
    std::mutex mutex;
    std::deque<Notice> notices;
  };

  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size_ + to]; }

  int size_;
  std::vector<Mailbox> mailboxes_;
  std::vector<Desk> desks_;  ///< by rank
};

/// The transport between threads of one process. A small message is copied when it is sent, which
/// completes the send. The receiver copies a large one straight out of the sender's memory.
class ThreadsTransport : public Transport {
 public:
  ThreadsTransport(ThreadsFabric& fabric, int rank) : fabric_(fabric), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return fabric_.size_; }
  Request send(int rank, int64_t tag, const void* data, int64_t bytes) override;
  Request receive(int rank, int64_t tag, void* data, int64_t capacity) override;
  bool test(Request& request) override;
  void announce(const Notice& notice) override;
  std::optional<Notice> next_notice() override;
  Bell& bell() override { return fabric_.desks_[rank_].bell; }
  bool rings() const override { return true; }
  std::chrono::microseconds patience() const override { return std::chrono::microseconds(50); }
  bool ranks_are_processes() const override { return false; }
  bool cancel() override;
  [[noreturn]] void abort(int code) override;

 private:
  struct Pending {
    int peer;
    std::shared_ptr<ThreadsFabric::Envelope> envelope;  ///< of a send
    int64_t tag;                                        ///< of a receive
    void* data;
    int64_t capacity;
  };

  Request add(Pending pending);
  bool is_first(uint64_t id, const Pending& receive) const;

  ThreadsFabric& fabric_;
  int rank_;
  uint64_t next_id_ = 0;
  std::map<uint64_t, Pending> pending_;
};

}  // namespace usp
