#pragma once

#include <memory>
#include <vector>

#include "tensor/allocator.h"
#include "tensor/dtype.h"
#include "tensor/side_copies.h"

namespace usp {

class Tensor;
struct Operation;
struct Stage;

/// Elements side by side: those of a contiguous tensor, or of a copy in other memory.
struct Elements {
  void* data = nullptr;  ///< nullptr: there are none, or only their shape is known
  int64_t numel = 0;
  DType dtype = DType::f32;

  Elements() = default;
  Elements(void* at, int64_t count, DType type) : data(at), numel(count), dtype(type) {}
  Elements(const Tensor& tensor);  // NOLINT: wherever elements are asked for, a tensor has them

  int64_t bytes() const { return numel * bytes_of(dtype); }
  /// Address of element `index`; nullptr where there is no data.
  void* at(int64_t index) const {
    return data == nullptr ? nullptr : static_cast<char*>(data) + index * bytes_of(dtype);
  }
};

/// Copies of a device's tensors in pinned memory of the host, from where and to where messages go:
/// the part of an Operation that belongs to Staging.
struct Staged {
  SideCopies* copies = nullptr;  ///< of the device, which lives as long as the operation's tensors
  /// A tensor and its copy.
  struct Pair {
    Elements on_device, on_host;
  };
  Pair input, output;
  std::vector<std::shared_ptr<void>> memory;  ///< pinned
};

/// Takes tensors from a device to the host, where messages can be sent and sums be taken, and what
/// has arrived back to it. The host waits for the device, the device never for the host. Both ways
/// go stage by stage: while the host adds what one has brought, the next one's input comes, and
/// what the one before has left goes back.
///
/// A block of pinned memory serves the next operation as soon as wait() has returned, though it may
/// still be on its way to the device: the device goes on behind that, and the next operation begins
/// when the device has come to it. So the blocks must be used for nothing else.
class Staging {
 public:
  /// Sets the elements that messages of an operation on a device read and write. For the main
  /// thread, as is download().
  void begin(Operation& operation, Elements& input, Elements& output);
  /// Queues the way of the input, now that the operation has its stages.
  static void download(Operation& operation);
  /// Whether messages of a stage may leave. For the communication thread, as is upload().
  static bool ready(const Stage& stage);
  /// The stage is finished: queues the way of its output to the device.
  static void upload(const Operation& operation, Stage& stage);
  /// Sleeps until all messages may leave. For the main thread, as is end().
  static void await(const Operation& operation);
  /// What the device is given from here on finds the output in its place.
  static void end(const Operation& operation);

 private:
  Elements take(Staged& staged, const Elements& like);

  std::shared_ptr<Allocator> pool_;  ///< of the current device
};

}  // namespace usp
