#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/dtype.h"

namespace usp {

class Backend;
class Marks;

/// Where a tensor lies.
enum class Device : uint8_t {
  cpu,
  cuda,  ///< a GPU, whose memory the host can neither read nor write
  meta,  ///< shapes without data: every op checks and counts, none computes
};

/// As the flag and the records have it, such as "cpu".
std::string_view name(Device device);

/// A device with memory and a queue of its own. What it is given it carries out in that order,
/// while the host goes on. The CPU is none: its memory is the host's, and its work is over when a
/// call returns.
///
/// It belongs to one rank, whose main thread alone calls it. Memory is taken and released in the
/// order of the queue, so a block can serve the next tensor as soon as the host lets go of the
/// last.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  virtual std::string description() const = 0;     ///< of device, driver and library
  virtual std::string matmul_library() const = 0;  ///< name and version
  /// Throws UsageError where it does not compute with tensors of this type.
  virtual void require(DType dtype) const = 0;
  /// Its kernels go into the queue.
  virtual std::unique_ptr<Backend> make_backend() = 0;

  /// Memory of the device, or for Device::cpu memory of the host that the device reads and writes
  /// by itself (pinned). 256-byte aligned; nullptr where there is none left.
  virtual void* take(Device where, int64_t bytes) = 0;
  /// Returns what take() gave.
  virtual void give_back(Device where, void* pointer) = 0;
  /// A block of its memory waits for the next tensor: what it holds may be anything from here on,
  /// in the order of the queue. An emulated device sees to that.
  virtual void released(void* /*pointer*/, int64_t /*bytes*/) {}
  /// Bytes of the device that nobody has taken.
  virtual int64_t available_memory() = 0;

  /// Queues a copy to the device. The host's bytes may change as soon as it returns.
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  /// Copies to the host, and waits for that.
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  /// Queues setting all bytes to 0.
  virtual void clear(void* to, int64_t bytes) = 0;
  /// Returns when all that was queued is over.
  virtual void wait() = 0;
  /// How often the host has waited for the device so far, but for reading marks.
  int64_t waits() const { return waits_; }

  /// What the host queues until end_range() is called `name` in the vendor's profiler; may nest.
  virtual void begin_range(const char* name) = 0;
  /// Ends the range that was begun last.
  virtual void end_range() = 0;

  /// What a report should say of how it has computed, a sentence each, such as operations that went
  /// a slower way.
  virtual std::vector<std::string> remarks() const { return {}; }

  /// They tell when the device did what it was given: those of the trace.
  virtual Marks& marks() = 0;
  /// Others in its own queue, for who measures whatever is traced. The device must outlive them.
  virtual std::unique_ptr<Marks> make_marks() = 0;

 protected:
  void count_wait() { ++waits_; }

 private:
  int64_t waits_ = 0;
};

/// The GPU of the rank of this number on its machine. What is linked decides which this is: CUDA's,
/// an emulated one, or none. Throws UsageError where there is no GPU that this program can use.
std::shared_ptr<Accelerator> make_cuda_device(int rank);

}  // namespace usp
