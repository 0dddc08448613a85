#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/operation.h"

namespace usp {

/// A rank's flight record: what it communicates, kept in a memory-mapped file, so that it can be
/// read after the rank has died, whatever killed it. `./book why RUN_DIR` reads it.
///
/// The file RUN_DIR/flight/rank_0000.txt consists of lines of 256 bytes, each a JSON object padded
/// with blanks: who the rank is; its state; its last sign of life; what its main thread does; then
/// the last kEntries operations in a ring.
class Flight {
 public:
  static constexpr int kEntries = 60;

  Flight(int rank, int size);
  ~Flight();
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  /// From here on the record lies in this file. Throws Error if it cannot be made.
  void open(const std::string& path);
  /// Registers a function that open() calls with the path.
  void on_open(std::function<void(const std::string& path)> callback) {
    on_open_ = std::move(callback);
  }

  /// The step that the operations from here on belong to.
  void set_step(int64_t step);
  void queued(Operation& operation);            ///< gives it its entry
  void started(const Operation& operation);     ///< the communication thread carries it out
  void finished(const Operation& operation);    ///< it is done
  void main_waits(const Operation& operation);  ///< the main thread is in wait()
  /// It is in a call that may wait for other ranks, such as "joining the communicator of dp".
  void main_calls(const std::string& what);
  void main_computes();                     ///< it has left wait(), or that call
  void sign_of_life();                      ///< by the communication thread, at least every 20 ms
  void failed(const std::string& message);  ///< this rank, and why
  void left();                              ///< the orderly end

  /// What the rank is doing, one sentence a line: "rank 3 waits in all_reduce #2 of dp (f32, 10
  /// elements) for 2.0 s".
  std::string status() const;

  /// The call in which the main thread is, and since how many seconds; "" where it is in none.
  std::pair<std::string, double> main_call() const;

 private:
  struct Entry {
    int64_t id = -1;
    std::string text;  ///< Operation::to_string()
    double queued = 0, started = 0, done = 0;
    std::string json_head;
  };

  void write_line(int line, const std::string& json);
  void write_alive(double time);
  void write_entry(const Entry& entry);
  void write_main();
  void write_state(const char* state, const std::string& message);

  mutable std::mutex mutex_;
  int rank_, size_;
  double started_;
  std::vector<Entry> ring_;
  int64_t next_id_ = 0;
  int64_t step_ = -1;
  int64_t main_waits_for_ = -1;
  std::string main_call_;
  double main_since_ = 0;
  double alive_ = 0;
  std::function<void(const std::string&)> on_open_;
  std::vector<char> memory_;  ///< until open()
  char* lines_;
  void* mapping_ = nullptr;
};

}  // namespace usp
