#include "tensor/dtype.h"

namespace usp {

DType parse_dtype(std::string_view text) {
  for (const DTypeInfo& row : kDTypes) {
    if (row.name == text && row.dtype != DType::i32) return row.dtype;
  }
  usage_error("dtype={} is unknown; try f32, bf16 or f64", text);
}

}  // namespace usp
