#include "tensor/ledger.h"

#include <fmt/format.h>

#include <array>

namespace usp {

std::string_view name(CommKind kind) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "all_reduce", "reduce_scatter", "all_gather", "broadcast",
      "all_to_all", "send",           "recv",       "barrier"};
  return kNames[static_cast<int>(kind)];
}

Ledger::Entry& Ledger::Entry::operator+=(const Entry& other) {
  calls += other.calls;
  payload_bytes += other.payload_bytes;
  wire_bytes += other.wire_bytes;
  net_bytes += other.net_bytes;
  header_bytes += other.header_bytes;
  seconds += other.seconds;
  wait_seconds += other.wait_seconds;
  return *this;
}

Ledger::Entry Ledger::Entry::operator-(const Entry& earlier) const {
  return {calls - earlier.calls,
          payload_bytes - earlier.payload_bytes,
          wire_bytes - earlier.wire_bytes,
          net_bytes - earlier.net_bytes,
          header_bytes - earlier.header_bytes,
          seconds - earlier.seconds,
          wait_seconds - earlier.wait_seconds};
}

void Ledger::add(const std::string& communicator, CommKind kind, const Entry& entry) {
  entries_[{communicator, kind}] += entry;
}

Ledger::Entry Ledger::get(const std::string& communicator, CommKind kind) const {
  const auto found = entries_.find({communicator, kind});
  return found == entries_.end() ? Entry() : found->second;
}

Ledger::Entry Ledger::total() const {
  Entry total;
  for (const auto& [key, entry] : entries_) total += entry;
  return total;
}

std::string Ledger::payload_json(const Ledger& earlier) const {
  std::string text;
  for (const auto& [key, entry] : entries_) {
    const Entry delta = entry - earlier.get(key.first, key.second);
    if (delta.calls == 0) continue;
    text += fmt::format("{}\"{}.{}\": {}", text.empty() ? "" : ", ", key.first, name(key.second),
                        delta.payload_bytes);
  }
  return "{" + text + "}";
}

std::string Ledger::to_json() const {
  std::string text;
  for (const auto& [key, entry] : entries_) {
    text += fmt::format(
        "{}  \"{}.{}\": {{\"calls\": {}, \"payload_bytes\": {}, \"wire_bytes\": {}, "
        "\"net_bytes\": {}, \"header_bytes\": {}, \"seconds\": {:.6f}, "
        "\"wait_seconds\": {:.6f}}}",
        text.empty() ? "" : ",\n", key.first, name(key.second), entry.calls, entry.payload_bytes,
        entry.wire_bytes, entry.net_bytes, entry.header_bytes, entry.seconds, entry.wait_seconds);
  }
  return "{\n" + text + "\n}\n";
}

}  // namespace usp
