#pragma once

#include <array>
#include <span>
#include <vector>

#include "tensor/backend.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"

/// What every operation does before its kernel: the span of the trace, the counts, the checks of
/// operands. For the files that define operations.
namespace usp::ops {

/// An operand that the bytes of an op leave out: small, or read once more from a cache.
struct Uncounted {
  const Tensor& tensor;
};

/// What a Recorder is told of an op besides its operands; see Recorder::op().
struct Flag {
  bool value;
};

/// The trace span of one op; counts its floating-point operations and the bytes of its operands,
/// and demands that they lie in one place, whose kernels it gives.
class OpScope {
 public:
  template <class... Operands>
  OpScope(std::string_view name, int64_t flops, const Operands&... operands)
      : OpScope(std::array<const Tensor*, sizeof...(Operands)>{&tensor_of(operands)...}, name,
                flops, (int64_t{0} + ... + bytes_of_operand(operands))) {}
  /// Scope of an op that does more, or other things, where `flag` is set.
  template <class... Operands>
  OpScope(std::string_view name, Flag flag, int64_t flops, const Operands&... operands)
      : OpScope(std::array<const Tensor*, sizeof...(Operands)>{&tensor_of(operands)...}, name,
                flops, (int64_t{0} + ... + bytes_of_operand(operands)), flag) {}
  /// Scope of an op without floating-point operations that are counted, on a list of operands,
  /// which move this many bytes.
  OpScope(std::string_view name, int64_t bytes, const std::vector<const Tensor*>& operands,
          Flag flag = {false})
      : OpScope(operands, name, 0, bytes, flag) {}

  /// This many of the op's floating-point operations repeat what forward had done.
  void repeats(int64_t flops) { runtime_.add_flops(0, flops); }

  /// The kernels of the device where the operands lie.
  Backend* operator->() { return &backend_; }

 private:
  using List = std::span<const Tensor* const>;

  OpScope(List operands, std::string_view name, int64_t flops, int64_t bytes, Flag flag = {false})
      : runtime_(Runtime::current()),
        backend_(runtime_.backend(check_devices(name, operands))),
        trace_(name, "op", flops, bytes, &backend_ == &runtime_.backend()) {
    runtime_.add_flops(flops);
    if (runtime_.recorder() == nullptr) return;
    runtime_.recorder()->op(name, flops, bytes, operands, flag.value);
  }

  static const Tensor& tensor_of(const Tensor& operand) { return operand; }
  static const Tensor& tensor_of(const Uncounted& operand) { return operand.tensor; }
  static int64_t bytes_of_operand(const Tensor& operand) {
    return operand.defined() ? operand.bytes() : 0;
  }
  static int64_t bytes_of_operand(const Uncounted&) { return 0; }

  /// The device of all operands: the runtime's or, beside an accelerator, the host.
  Device check_devices(std::string_view op, List operands) const {
    const Device here = runtime_.device();
    Device device = here;
    for (const Tensor* operand : operands) {
      if (operand->defined() && operand->device() != here) device = operand->device();
    }
    if (device == here) return here;
    USP_CHECK(device == Device::cpu && runtime_.accelerator() != nullptr,
              "{}: an operand lies on {}, and the runtime's device is {}", op, name(device),
              name(here));
    for (const Tensor* operand : operands) {
      USP_CHECK(!operand->defined() || operand->device() == device,
                "{}: its operands lie on {} and on {}", op, name(here), name(device));
    }
    return device;
  }

  Runtime& runtime_;
  Backend& backend_;
  TraceScope trace_;
};

/// `tensor` holds this dtype.
inline void check_dtype(const Tensor& tensor, DType dtype, std::string_view what) {
  USP_CHECK(tensor.dtype() == dtype, "{} holds {}, expected {}", what, name(tensor.dtype()),
            name(dtype));
}

/// `tensor` is contiguous and has this shape and dtype.
inline void check_operand(const Tensor& tensor, const Shape& shape, DType dtype,
                          std::string_view what) {
  check_shape(tensor, shape, what);
  check_dtype(tensor, dtype, what);
  USP_CHECK(tensor.contiguous(), "{} must be contiguous", what);
}

/// `tensor` holds sums of what has `dtype`: in that or wider.
inline void check_sums_dtype(const Tensor& tensor, DType dtype, std::string_view what) {
  USP_CHECK(tensor.dtype() == dtype || tensor.dtype() == accumulate_dtype(dtype),
            "{} holds {}, expected {} or {}", what, name(tensor.dtype()), name(dtype),
            name(accumulate_dtype(dtype)));
}

/// `dweight` holds gradients of weights that multiply what has `dtype`: in that or wider.
inline void check_weight_gradient(const Tensor& dweight, const Shape& shape, DType dtype,
                                  std::string_view what) {
  check_sums_dtype(dweight, dtype, what);
  check_operand(dweight, shape, dweight.dtype(), what);
}

}  // namespace usp::ops
