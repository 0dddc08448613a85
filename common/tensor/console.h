#pragma once

#include <fmt/format.h>

#include "base/output.h"
#include "tensor/runtime.h"

namespace usp {

/// Prints to standard output, on rank 0 only.
template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  if (speaks_for_all()) write_output(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace usp
