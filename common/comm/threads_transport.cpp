#include "comm/threads_transport.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace usp {

namespace {

/// More than a header and what travels with it: what a rank has said of an operation reaches the
/// other even if the operation is given up.
constexpr int64_t kSmallBytes = 32 << 10;

}  // namespace

ThreadsFabric::ThreadsFabric(int size) : size_(size), mailboxes_(size * size), desks_(size) {}

Request ThreadsTransport::add(Pending pending) {
  const Request request{next_id_++, 0, false};
  pending_.emplace(request.id, std::move(pending));
  return request;
}

Request ThreadsTransport::send(int rank, int64_t tag, const void* data, int64_t bytes) {
  auto envelope = std::make_shared<ThreadsFabric::Envelope>();
  envelope->tag = tag;
  envelope->data = data;
  envelope->bytes = bytes;
  const bool small = bytes <= kSmallBytes;
  if (small) {
    const char* begin = static_cast<const char*>(data);
    envelope->copy.assign(begin, begin + bytes);
    envelope->data = envelope->copy.data();
  }
  {
    ThreadsFabric::Mailbox& mailbox = fabric_.mailbox(rank_, rank);
    const std::lock_guard lock(mailbox.mutex);
    mailbox.sent.push_back(envelope);
  }
  fabric_.desks_[rank].bell.ring();
  if (small) return {0, bytes, true};
  return add({rank, std::move(envelope), 0, nullptr, 0});
}

Request ThreadsTransport::receive(int rank, int64_t tag, void* data, int64_t capacity) {
  return add({rank, nullptr, tag, data, capacity});
}

/// Whether no receive that was begun before this one waits for the same message.
bool ThreadsTransport::is_first(uint64_t id, const Pending& receive) const {
  for (const auto& [other, pending] : pending_) {
    if (other == id) break;
    const bool receives = pending.envelope == nullptr;
    if (receives && pending.peer == receive.peer && pending.tag == receive.tag) return false;
  }
  return true;
}

bool ThreadsTransport::test(Request& request) {
  if (request.done) return true;
  const Pending& pending = pending_.at(request.id);
  const bool sending = pending.envelope != nullptr;
  if (!sending && !is_first(request.id, pending)) return false;
  ThreadsFabric::Mailbox& mailbox =
      sending ? fabric_.mailbox(rank_, pending.peer) : fabric_.mailbox(pending.peer, rank_);
  {
    const std::lock_guard lock(mailbox.mutex);
    if (sending) {
      if (!pending.envelope->taken) return false;
    } else {
      const auto found =
          std::find_if(mailbox.sent.begin(), mailbox.sent.end(),
                       [&](const auto& envelope) { return envelope->tag == pending.tag; });
      if (found == mailbox.sent.end()) return false;
      ThreadsFabric::Envelope& envelope = **found;
      if (envelope.bytes > pending.capacity) {
        fail("{} bytes came from rank {} where {} fit", envelope.bytes, pending.peer,
             pending.capacity);
      }
      // Under the lock: a sender that gives up takes its memory away only between two copies.
      if (envelope.bytes > 0) std::memcpy(pending.data, envelope.data, envelope.bytes);
      envelope.taken = true;
      request.bytes = envelope.bytes;
      mailbox.sent.erase(found);
    }
  }
  if (!sending) fabric_.desks_[pending.peer].bell.ring();
  request.done = true;
  pending_.erase(request.id);
  return true;
}

void ThreadsTransport::announce(const Notice& notice) {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    ThreadsFabric::Desk& desk = fabric_.desks_[rank];
    {
      const std::lock_guard lock(desk.mutex);
      desk.notices.push_back(notice);
    }
    desk.bell.ring();
  }
}

std::optional<Notice> ThreadsTransport::next_notice() {
  ThreadsFabric::Desk& desk = fabric_.desks_[rank_];
  const std::lock_guard lock(desk.mutex);
  if (desk.notices.empty()) return std::nullopt;
  const Notice notice = desk.notices.front();
  desk.notices.pop_front();
  return notice;
}

bool ThreadsTransport::cancel() {
  for (int rank = 0; rank < size(); ++rank) {
    ThreadsFabric::Mailbox& mailbox = fabric_.mailbox(rank_, rank);
    const std::lock_guard lock(mailbox.mutex);
    std::erase_if(mailbox.sent, [](const auto& envelope) { return envelope->copy.empty(); });
  }
  pending_.clear();
  return true;
}

void ThreadsTransport::abort(int code) {
  std::fprintf(stderr, "error: a rank's thread does not end after the run has failed\n");
  std::_Exit(code);
}

}  // namespace usp
