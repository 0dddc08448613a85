#include "tensor/tensor.h"

#include <cstring>

#include "tensor/ops.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// Tells whoever records the program where the tensor's values come from.
void tell_recorder(const Tensor& tensor, Recorder::Source source, std::string_view name = {},
                   const Tensor* from = nullptr) {
  Recorder* recorder = Runtime::current().recorder();
  if (recorder != nullptr) recorder->made(tensor, source, name, from);
}

/// Fewer are converted in less time than it takes to wake other threads.
constexpr int64_t kParallelElements = 1 << 16;

/// Calls visit(offset in elements) for every element of a strided tensor in row-major order.
template <class Visit>
void for_each_offset(const Tensor& tensor, Visit&& visit) {
  const int64_t count = tensor.numel();
  std::array<int64_t, kMaxRank> index{};
  int64_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    visit(offset);
    for (int axis = tensor.rank() - 1; axis >= 0; --axis) {
      offset += tensor.stride(axis);
      if (++index[axis] < tensor.size(axis)) break;
      offset -= tensor.stride(axis) * tensor.size(axis);
      index[axis] = 0;
    }
  }
}

/// Whether whoever records the program answers for values that a tensor on meta has not.
bool has_answer_on_meta(const Tensor& tensor) {
  const Runtime& runtime = Runtime::current();
  return tensor.device() == Device::meta && runtime.host_reads_allowed() &&
         runtime.recorder() != nullptr && runtime.recorder()->host_reads(tensor);
}

void check_host_read(const Tensor& tensor) {
  USP_CHECK(tensor.device() != Device::meta, "a meta tensor {} has no values to read",
            tensor.shape().to_string());
  USP_CHECK(Runtime::current().host_reads_allowed(),
            "item() inside a training step: reading from the device would stall it");
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, std::string_view name) {
  Runtime& runtime = Runtime::current();
  Tensor tensor;
  tensor.shape_ = shape;
  tensor.dtype_ = dtype;
  int64_t stride = 1;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    tensor.strides_[axis] = stride;
    stride *= shape[axis];
  }
  const int64_t bytes = tensor.bytes();
  const std::shared_ptr<Allocator>& allocator = runtime.allocator_in_force();
  const MemoryTag tag(runtime.category(), runtime.block(), name);
  void* pointer = allocator->allocate(bytes, tag);
  const bool nowhere = allocator->device() == Device::meta && bytes > 0;
  if (nowhere && runtime.recorder() != nullptr) pointer = runtime.recorder()->place(bytes);
  tensor.storage_.reset(new Storage{allocator, pointer, bytes, tag});
  return tensor;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype) {
  Tensor tensor = empty(shape, dtype);
  tell_recorder(tensor, Recorder::Source::zeros);
  if (tensor.address() == nullptr || tensor.device() == Device::meta) return tensor;
  if (tensor.device() == Device::cpu) {
    std::memset(tensor.address(), 0, tensor.bytes());
  } else {
    tensor.storage_->allocator->accelerator()->clear(tensor.address(), tensor.bytes());
  }
  return tensor;
}

Tensor Tensor::from_host(std::span<const double> values, const Shape& shape, DType dtype) {
  Tensor tensor = empty(shape, dtype);
  tell_recorder(tensor, Recorder::Source::host);
  if (tensor.device() != Device::meta) tensor.assign(values);
  return tensor;
}

Tensor Tensor::from_host(std::span<const int32_t> values, const Shape& shape,
                         std::string_view name) {
  Tensor tensor = empty(shape, DType::i32, name);
  USP_CHECK(static_cast<int64_t>(values.size()) == shape.numel(), "{} values for shape {}",
            values.size(), shape.to_string());
  tell_recorder(tensor, Recorder::Source::host, name);
  if (tensor.device() != Device::meta) tensor.assign_bytes(std::as_bytes(values));
  return tensor;
}

Device Tensor::device() const { return storage_->allocator->device(); }

bool Tensor::contiguous() const {
  if (numel() == 0) return true;  // whatever the strides
  int64_t stride = 1;
  for (int axis = rank() - 1; axis >= 0; --axis) {
    if (shape_[axis] != 1 && strides_[axis] != stride) return false;
    stride *= shape_[axis];
  }
  return true;
}

Tensor Tensor::view(const Shape& shape) const {
  USP_CHECK(shape.numel() == numel(), "cannot view {} as {}", shape_.to_string(),
            shape.to_string());
  Tensor result = *this;
  result.shape_ = shape;
  // From the right, gather old axes into chunks that advance by one stride throughout, and give
  // each chunk's elements to new axes. A new axis that would reach into two chunks needs a copy.
  int axis = shape.rank() - 1;
  int64_t chunk = 1, covered = 1;
  int64_t base = 1;
  for (int old_axis = rank() - 1; old_axis >= 0; --old_axis) {
    if (chunk == 1) base = strides_[old_axis];
    chunk *= shape_[old_axis];
    const bool continues = old_axis > 0 && (shape_[old_axis - 1] == 1 || chunk == 1 ||
                                            strides_[old_axis - 1] == chunk * base);
    if (continues) continue;
    for (; axis >= 0 && (covered < chunk || shape[axis] == 1); --axis) {
      result.strides_[axis] = covered * base;
      covered *= shape[axis];
    }
    USP_CHECK(covered == chunk || numel() == 0, "view of a strided {} as {} needs a copy",
              shape_.to_string(), shape.to_string());
    chunk = covered = 1;
  }
  for (; axis >= 0; --axis) result.strides_[axis] = covered * base;  // sizes of 1
  return result;
}

Tensor Tensor::narrow(int axis, int64_t offset, int64_t length) const {
  if (axis < 0) axis += rank();
  USP_CHECK(
      axis >= 0 && axis < rank() && offset >= 0 && length >= 0 && offset + length <= shape_[axis],
      "narrow(axis {}, offset {}, length {}) of shape {}", axis, offset, length,
      shape_.to_string());
  Tensor result = *this;
  result.shape_[axis] = length;
  result.offset_ += offset * strides_[axis];
  return result;
}

Tensor Tensor::transposed() const {
  USP_CHECK(rank() >= 2, "transposed() of shape {}", shape_.to_string());
  Tensor result = *this;
  std::swap(result.shape_[rank() - 2], result.shape_[rank() - 1]);
  std::swap(result.strides_[rank() - 2], result.strides_[rank() - 1]);
  return result;
}

Tensor Tensor::to_contiguous() const {
  if (contiguous()) return *this;
  const HostScope beside_it(device() == Device::cpu);
  Tensor copy = empty(shape_, dtype_);
  tell_recorder(copy, Recorder::Source::copy, {}, this);
  if (address() == nullptr || device() == Device::meta) return copy;
  if (device() != Device::cpu) {
    ops::copy(copy, *this);
    return copy;
  }
  if (numel() == 0) return copy;
  Tensor runs = *this;  // the first elements of what lies side by side
  int64_t bytes = bytes_of(dtype_);
  for (int axis = rank() - 1; axis >= 0 && stride(axis) * bytes_of(dtype_) == bytes; --axis) {
    bytes *= size(axis);
    runs = runs.narrow(axis, 0, 1);
  }
  const char* source = static_cast<const char*>(address());
  char* target = static_cast<char*>(copy.address());
  for_each_offset(runs, [&](int64_t offset) {
    std::memcpy(target, source + offset * bytes_of(dtype_), bytes);
    target += bytes;
  });
  return copy;
}

Tensor Tensor::to_host() const {
  check_host_read(*this);
  return fetch();
}

/// to_host() at any time.
Tensor Tensor::fetch() const {
  if (device() == Device::cpu) return *this;
  const CategoryScope scope(Category::workspace);
  const Tensor dense = to_contiguous();
  const HostScope on_host;
  const Tensor copy = empty(shape_, dtype_);
  if (numel() > 0) {
    storage_->allocator->accelerator()->download(copy.address(), dense.address(), bytes());
  }
  return copy;
}

void* Tensor::address() const {
  if (storage_ == nullptr || storage_->pointer == nullptr) return nullptr;
  return static_cast<char*>(storage_->pointer) + offset_ * bytes_of(dtype_);
}

double Tensor::item(int64_t index) const {
  USP_CHECK(index >= 0 && index < numel(), "item({}) of shape {}", index, shape_.to_string());
  Tensor element = *this;
  for (int axis = rank() - 1; axis >= 0; --axis) {
    element = element.narrow(axis, index % shape_[axis], 1);
    index /= shape_[axis];
  }
  return element.items()[0];
}

std::vector<double> Tensor::items() const {
  if (has_answer_on_meta(*this)) return std::vector<double>(numel());
  const Tensor host = to_host();
  std::vector<double> values;
  values.reserve(numel());
  if (dtype_ == DType::i32) {
    const int32_t* source = host.data<int32_t>();
    for_each_offset(host, [&](int64_t offset) { values.push_back(source[offset]); });
    return values;
  }
  dispatch(dtype_, [&]<class T>(T) {
    const T* source = host.data<T>();
    for_each_offset(host, [&](int64_t o) { values.push_back(static_cast<double>(source[o])); });
  });
  return values;
}

std::vector<int64_t> Tensor::counts() const {
  USP_CHECK(device() != Device::meta && dtype_ == DType::i32, "counts() of a {} tensor on {}",
            name(dtype_), name(device()));
  const TraceScope trace("read counts", "op");
  const Tensor host = fetch();
  std::vector<int64_t> values;
  for_each_offset(host, [&](int64_t offset) { values.push_back(host.data<int32_t>()[offset]); });
  return values;
}

void Tensor::assign(std::span<const double> values) {
  USP_CHECK(device() != Device::meta, "a meta tensor holds no values");
  USP_CHECK(static_cast<int64_t>(values.size()) == numel(), "{} values for shape {}", values.size(),
            shape_.to_string());
  dispatch(dtype_, [&]<class T>(T) {
    const double* source = values.data();
    const auto convert = [&](T* to) {
      const int64_t count = std::ssize(values);
#pragma omp parallel for if (count >= kParallelElements)
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(source[i]);
    };
    if (device() != Device::cpu) {
      std::vector<T> converted(values.size());
      convert(converted.data());
      return assign_bytes(std::as_bytes(std::span(converted)));
    }
    T* target = data<T>();
    if (contiguous()) return convert(target);
    for_each_offset(*this, [&](int64_t offset) { target[offset] = static_cast<T>(*source++); });
  });
}

void Tensor::assign_bytes(std::span<const std::byte> values) {
  USP_CHECK(device() != Device::meta, "a meta tensor holds no values");
  USP_CHECK(std::ssize(values) == bytes(), "{} bytes for {} of {}", values.size(),
            shape_.to_string(), name(dtype_));
  if (values.empty()) return;
  if (device() == Device::cpu && contiguous()) {
    std::memcpy(address(), values.data(), values.size());
  } else if (device() == Device::cpu) {
    const int64_t width = bytes_of(dtype_);
    const std::byte* source = values.data();
    for_each_offset(*this, [&](int64_t offset) {
      std::memcpy(static_cast<char*>(address()) + offset * width, source, width);
      source += width;
    });
  } else if (contiguous()) {
    storage_->allocator->accelerator()->upload(address(), values.data(), bytes());
  } else {
    const CategoryScope scope(Category::workspace);
    Tensor dense = empty(shape_, dtype_);
    dense.assign_bytes(values);
    ops::copy(*this, dense);
  }
}

Tensor adjacent(std::span<const Tensor> parts) {
  USP_CHECK(!parts.empty(), "adjacent() of no tensors");
  Tensor result = parts[0];
  for (const Tensor& part : parts.subspan(1)) {
    USP_CHECK(part.storage_ == result.storage_ && part.dtype_ == result.dtype_ &&
                  part.contiguous() && result.contiguous() && part.rank() == result.rank() &&
                  part.offset_ == result.offset_ + result.numel(),
              "tensors {} and {} do not lie side by side in one storage", result.shape_.to_string(),
              part.shape_.to_string());
    for (int axis = 1; axis < part.rank(); ++axis) {
      USP_CHECK(part.size(axis) == result.size(axis), "adjacent {} and {} differ beyond axis 0",
                result.shape_.to_string(), part.shape_.to_string());
    }
    result.shape_[0] += part.size(0);
  }
  return result;
}

void check_shape(const Tensor& tensor, const Shape& shape, std::string_view what) {
  USP_CHECK(tensor.defined(), "{} is undefined, expected shape {}", what, shape.to_string());
  USP_CHECK(tensor.shape() == shape, "{} has shape {}, expected {}", what,
            tensor.shape().to_string(), shape.to_string());
}

}  // namespace usp
