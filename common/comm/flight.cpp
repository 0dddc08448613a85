#include "comm/flight.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

namespace usp {

namespace {

constexpr int64_t kLineBytes = 256;
constexpr int kIdentity = 0, kState = 1, kAlive = 2, kMain = 3, kFirstEntry = 4;
constexpr int64_t kFileBytes = (kFirstEntry + Flight::kEntries) * kLineBytes;
/// Between two signs of life that are written down.
constexpr double kAliveInterval = 0.001;

/// Unix time in seconds, which ranks of one machine agree on.
double now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

std::string group_json(const Group& group) {
  if (group.size() <= 8) return fmt::format("[{}]", fmt::join(group.members, ", "));
  return fmt::format("\"{}..{} ({})\"", group.members.front(), group.members.back(), group.size());
}

}  // namespace

std::string Operation::to_string() const {
  std::string text = fmt::format("{} #{} of {}", name(kind), number, group->name);
  if (kind == CommKind::send) text += fmt::format(" to rank {}", peer);
  if (kind == CommKind::recv) text += fmt::format(" from rank {}", peer);
  if (root >= 0) text += fmt::format(", root {}", root);
  if (kind == CommKind::barrier) return text;
  return text + fmt::format(" ({}, {} elements)", usp::name(dtype), count);
}

Flight::Flight(int rank, int size)
    : rank_(rank),
      size_(size),
      started_(now()),
      ring_(kEntries),
      memory_(kFileBytes, ' '),
      lines_(memory_.data()) {
  for (int line = 0; line < kFirstEntry + kEntries; ++line) write_line(line, "");
  char host[64] = {};
  gethostname(host, sizeof(host) - 1);
  write_line(
      kIdentity,
      fmt::format(R"({{"rank": {}, "size": {}, "pid": {}, "host": "{}", "started": {:.6f}}})",
                  rank_, size_, getpid(), host, started_));
  write_state("running", "");
  main_since_ = started_;
  write_main();
}

Flight::~Flight() {
  if (mapping_ != nullptr) munmap(mapping_, kFileBytes);
}

void Flight::open(const std::string& path) {
  const std::lock_guard lock(mutex_);
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail("cannot write the flight record {}: {}", path, std::strerror(errno));
  // Written before it is mapped: a full disk must be an error here, not a SIGBUS later.
  const bool written = ::write(file, lines_, kFileBytes) == kFileBytes;
  if (written) {
    mapping_ = mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (!written || mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    fail("cannot write the flight record {}: {}", path, std::strerror(errno));
  }
  lines_ = static_cast<char*>(mapping_);
  if (on_open_) on_open_(path);
}

void Flight::set_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  write_alive(now());
}

void Flight::queued(Operation& operation) {
  const std::lock_guard lock(mutex_);
  operation.flight_entry = next_id_++;
  Entry& entry = ring_[operation.flight_entry % kEntries];
  entry.id = operation.flight_entry;
  entry.text = operation.to_string();
  entry.queued = now();
  entry.started = entry.done = 0;
  entry.json_head = fmt::format(
      R"({{"entry": {}, "op": "{}", "on": "{}", "group": {}, "number": {}, "peer": {}, )"
      R"("dtype": "{}", "count": {}, )",
      entry.id, name(operation.kind), operation.group->name, group_json(*operation.group),
      operation.number, operation.peer, usp::name(operation.dtype), operation.count);
  write_entry(entry);
}

void Flight::started(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[operation.flight_entry % kEntries];
  if (entry.id != operation.flight_entry) return;  // overwritten by sixty later ones
  entry.started = now();
  write_entry(entry);
}

void Flight::finished(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[operation.flight_entry % kEntries];
  if (entry.id != operation.flight_entry) return;
  entry.done = now();
  write_entry(entry);
}

void Flight::main_waits(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  main_waits_for_ = operation.flight_entry;
  main_since_ = now();
  write_main();
}

void Flight::main_calls(const std::string& what) {
  const std::lock_guard lock(mutex_);
  main_call_ = what;
  main_since_ = now();
  write_main();
}

std::pair<std::string, double> Flight::main_call() const {
  const std::lock_guard lock(mutex_);
  return {main_call_, now() - main_since_};
}

void Flight::main_computes() {
  const std::lock_guard lock(mutex_);
  main_waits_for_ = -1;
  main_call_.clear();
  main_since_ = now();
  write_main();
}

void Flight::sign_of_life() {
  const double time = now();
  const std::lock_guard lock(mutex_);
  if (time - alive_ >= kAliveInterval) write_alive(time);
}

void Flight::failed(const std::string& message) {
  const std::lock_guard lock(mutex_);
  write_state("failed", message);
}

void Flight::left() {
  const std::lock_guard lock(mutex_);
  write_state("finished", "");
}

std::string Flight::status() const {
  const std::lock_guard lock(mutex_);
  const double time = now();
  std::string text;
  const auto line = [&](const std::string& what) {
    text += fmt::format("{}rank {} {}", text.empty() ? "" : "\n", rank_, what);
  };
  if (!main_call_.empty())
    line(fmt::format("is in {} for {:.1f} s", main_call_, time - main_since_));
  for (const Entry& entry : ring_) {
    if (entry.id < 0 || entry.started == 0 || entry.done != 0) continue;
    line(fmt::format("{} {} for {:.1f} s", entry.id == main_waits_for_ ? "waits in" : "is in",
                     entry.text, time - entry.started));
  }
  if (text.empty()) {
    const auto last = std::max_element(
        ring_.begin(), ring_.end(), [](const Entry& a, const Entry& b) { return a.done < b.done; });
    line(fmt::format("is outside communication for {:.1f} s; last finished: {}",
                     time - std::max(main_since_, last->done),
                     last->done > 0 ? last->text : "nothing"));
  }
  return text;
}

void Flight::write_line(int line, const std::string& json) {
  char* at = lines_ + line * kLineBytes;
  const auto length = std::min<int64_t>(std::ssize(json), kLineBytes - 1);
  std::memcpy(at, json.data(), length);
  std::memset(at + length, ' ', kLineBytes - 1 - length);
  at[kLineBytes - 1] = '\n';
}

void Flight::write_alive(double time) {
  alive_ = time;
  write_line(kAlive, fmt::format(R"({{"alive": {:.6f}, "step": {}}})", time, step_));
}

void Flight::write_entry(const Entry& entry) {
  write_line(
      kFirstEntry + static_cast<int>(entry.id % kEntries),
      entry.json_head + fmt::format(R"("queued": {:.6f}, "started": {:.6f}, "done": {:.6f}}})",
                                    entry.queued, entry.started, entry.done));
}

void Flight::write_main() {
  write_line(kMain, fmt::format(R"({{"main": "{}", "since": {:.6f}, "entry": {}}})",
                                !main_call_.empty()   ? "is in " + main_call_
                                : main_waits_for_ < 0 ? "computes"
                                                      : "waits",
                                main_since_, main_waits_for_));
}

void Flight::write_state(const char* state, const std::string& message) {
  // Cut so that the line holds a whole JSON object: escapes may double a character's length.
  for (size_t keep = 150;; keep -= 10) {
    const nlohmann::ordered_json json = {
        {"state", state}, {"time", now()}, {"message", message.substr(0, keep)}};
    const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (std::ssize(text) < kLineBytes) return write_line(kState, text);
  }
}

}  // namespace usp
