#include "comm/transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "comm/engine.h"
#include "comm/links.h"

namespace usp {

namespace {

/// What precedes every message.
struct Header {
  int64_t number, count, bytes;
  int64_t due_ns;  ///< steady clock of the machine; 0: at once
  int32_t kind, stage, dtype, reduce, root, sender;
};
constexpr int64_t kHeaderBytes = Engine::kHeaderBytes;
static_assert(sizeof(Header) == kHeaderBytes);

/// Messages up to this size travel in one piece with their header.
constexpr int64_t kInlineBytes = 16 << 10;

/// Four tags for each group: collectives and point to point, header and payload.
int64_t tag_of(const Operation& operation, bool payload) {
  return 4 * operation.group->id + 2 * Transfer::is_point_to_point(operation.kind) + payload;
}

Header header_of(const Operation& operation, int stage, int64_t bytes) {
  // A receive expects the header of the send that it meets.
  const CommKind kind = operation.kind == CommKind::recv ? CommKind::send : operation.kind;
  return {operation.number,
          operation.count,
          bytes,
          /*due_ns=*/0,
          static_cast<int32_t>(kind),
          stage,
          static_cast<int32_t>(operation.dtype),
          static_cast<int32_t>(operation.reduce),
          operation.root,
          operation.group->rank};
}

std::string describe(const Header& header) {
  std::string text = fmt::format("{} #{}", name(static_cast<CommKind>(header.kind)), header.number);
  if (header.root >= 0) text += fmt::format(", root {}", header.root);
  return text + fmt::format(" ({}, {} elements{})", name(static_cast<DType>(header.dtype)),
                            header.count,
                            static_cast<ReduceOp>(header.reduce) == ReduceOp::max ? ", max" : "");
}

}  // namespace

Transfer::Transfer(Transport& transport, EmulatedLinks* links, Clock::time_point time,
                   Operation& operation, int stage, const Message& message, bool sending,
                   std::vector<char> buffer)
    : message_(message), sending_(sending), stage_(stage), buffer_(std::move(buffer)) {
  const int rank = operation.group->members[message.peer];
  const int64_t tag = tag_of(operation, /*payload=*/false);
  // What a device carries out itself has a header here and nothing else, which is not counted.
  const int64_t payload = operation.by_device ? 0 : message.bytes;
  const bool inlined = payload <= kInlineBytes;
  buffer_.resize(kHeaderBytes + kInlineBytes);
  if (sending) {
    Header header = header_of(operation, stage, message.bytes);
    if (links != nullptr) {
      const EmulatedLinks::Times times = links->transmit(rank, payload, time);
      header.due_ns = std::chrono::nanoseconds(times.arrives.time_since_epoch()).count();
      due_ = times.sent;
    }
    const int64_t along = inlined ? payload : 0;
    std::memcpy(buffer_.data(), &header, kHeaderBytes);
    if (along > 0) std::memcpy(buffer_.data() + kHeaderBytes, message.data, along);
    header_ = transport.send(rank, tag, buffer_.data(), kHeaderBytes + along);
    if (!operation.by_device) {
      operation.header_bytes += kHeaderBytes;
      operation.wire_bytes += message.bytes;
    }
  } else {
    header_ = transport.receive(rank, tag, buffer_.data(), std::ssize(buffer_));
  }
  const int64_t payload_tag = tag_of(operation, /*payload=*/true);
  for (int64_t at = 0; !inlined && at < payload; at += operation.piece_bytes) {
    char* data = static_cast<char*>(message.data) + at;
    const int64_t bytes = std::min(operation.piece_bytes, payload - at);
    pieces_.push_back(sending ? transport.send(rank, payload_tag, data, bytes)
                              : transport.receive(rank, payload_tag, data, bytes));
  }
}

bool Transfer::advance(Transport& transport, const Operation& operation) {
  if (!header_done_) {
    if (!transport.test(header_)) return false;
    header_done_ = true;
    if (!sending_) {
      check_header(operation);
      if (pieces_.empty() && message_.bytes > 0 && !operation.by_device) {
        std::memcpy(message_.data, buffer_.data() + kHeaderBytes, message_.bytes);
      }
    }
  }
  for (Request& piece : pieces_) {
    if (!piece.done && !transport.test(piece)) return false;
  }
  delayed_ = due_ != Clock::time_point() && Clock::now() < due_;
  done_ = !delayed_;
  return done_;
}

void Transfer::check_header(const Operation& operation) {
  const Header expected = header_of(operation, stage_, message_.bytes);
  Header came;
  std::memcpy(&came, buffer_.data(), kHeaderBytes);
  const bool same = came.number == expected.number && came.kind == expected.kind &&
                    came.stage == expected.stage && came.dtype == expected.dtype &&
                    came.count == expected.count && came.reduce == expected.reduce &&
                    came.root == expected.root && came.bytes == expected.bytes;
  due_ = Clock::time_point(std::chrono::nanoseconds(came.due_ns));
  if (same) return;
  const std::string own = operation.kind == CommKind::recv
                              ? fmt::format("recv #{} of {} elements of {}", operation.number,
                                            operation.count, name(operation.dtype))
                              : describe(expected);
  std::string what =
      fmt::format("ranks of {} disagree: rank {} is in {}, rank {} in {}", operation.group->name,
                  came.sender, describe(came), operation.group->rank, own);
  if (describe(came) == describe(expected)) {
    what += fmt::format("; {} bytes came, {} were expected", came.bytes, expected.bytes);
  }
  throw Error(what);
}

}  // namespace usp
