#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensor/allocator.h"
#include "tensor/dtype.h"
#include "tensor/shape.h"

namespace usp {

/// A reference to an n-dimensional array: shape, strides (in elements), dtype, and storage shared
/// with every view of it. Copying a Tensor copies the reference, never the data.
///
/// New tensors are contiguous (row-major) and live on the device of the current Runtime; their
/// bytes count under the category in force (CategoryScope) until the last view is gone.
class Tensor {
 public:
  Tensor() = default;

  /// The contents are undefined. `name`, a literal, says in the memory profile what kind of tensor
  /// it is.
  static Tensor empty(const Shape& shape, DType dtype, std::string_view name = {});
  /// Every element is 0.
  static Tensor zeros(const Shape& shape, DType dtype);
  /// A copy of host values, converted to dtype; values.size() must be shape.numel(). On meta only
  /// the shape is kept.
  static Tensor from_host(std::span<const double> values, const Shape& shape, DType dtype);
  static Tensor from_host(std::span<const int32_t> values, const Shape& shape,
                          std::string_view name = {});

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t size(int axis) const { return shape_[axis < 0 ? axis + rank() : axis]; }
  int64_t stride(int axis) const { return strides_[axis < 0 ? axis + rank() : axis]; }
  int64_t numel() const { return shape_.numel(); }
  int64_t bytes() const { return numel() * bytes_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const;    ///< where its storage lies
  bool contiguous() const;  ///< elements side by side, in row-major order

  /// The same elements under another shape. Axes may be split or merged as long as that needs no
  /// copy; throws Error otherwise.
  Tensor view(const Shape& shape) const;
  /// Elements [offset, offset + length) of one axis.
  Tensor narrow(int axis, int64_t offset, int64_t length) const;
  /// The last two axes swapped.
  Tensor transposed() const;
  /// A contiguous copy, or the tensor itself where it is contiguous already.
  Tensor to_contiguous() const;
  /// The tensor itself where the host can read it, else a contiguous copy in memory of the host,
  /// for which it waits. The same rules as for item().
  Tensor to_host() const;

  /// Pointer to the first element; T must be the dtype's C++ type. nullptr on meta. What it points
  /// to is for kernels of the tensor's device alone.
  template <class T>
  T* data() const {
    USP_CHECK(dtype_of<T> == dtype_, "tensor holds {}, asked for {}", name(dtype_),
              name(dtype_of<T>));
    return static_cast<T*>(address());
  }
  /// Pointer to the first element, whatever its dtype.
  void* address() const;

  /// The value of element `index` (row-major). Only this function, items(), to_host() and counts()
  /// read from the device to the host. Throws Error on meta, and inside a training step, which
  /// would stall while the host waits for the device.
  double item(int64_t index = 0) const;
  /// All values in row-major order; the same rules.
  std::vector<double> items() const;
  /// The values of a tensor of counts (i32). A training step may do this one read, because shapes
  /// can depend on data: on how many tokens an expert gets, for example. Throws Error on meta.
  std::vector<int64_t> counts() const;
  /// Overwrites all values from the host, in row-major order.
  void assign(std::span<const double> values);
  /// The same with elements of this dtype as they lie in memory.
  void assign_bytes(std::span<const std::byte> values);

 private:
  Tensor fetch() const;

  struct Storage {
    std::shared_ptr<Allocator> allocator;
    void* pointer;
    int64_t bytes;
    MemoryTag tag;
    ~Storage() { allocator->release(pointer, bytes, tag); }
  };

  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0;
  Shape shape_;
  std::array<int64_t, kMaxRank> strides_{};
  DType dtype_ = DType::f32;

  friend Tensor adjacent(std::span<const Tensor> parts);
};

/// One tensor over parts that lie side by side in the same storage, joined along axis 0; no copy.
/// So one matmul reads q, k and v, which are separate parameters. Throws Error where the parts are
/// not adjacent.
Tensor adjacent(std::span<const Tensor> parts);

/// Throws Error naming `what` unless the tensor has this shape.
void check_shape(const Tensor& tensor, const Shape& shape, std::string_view what);

}  // namespace usp
