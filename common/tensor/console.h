#pragma once

#include <fmt/format.h>

#include <cstdio>

#include "tensor/runtime.h"

namespace usp {

/// Prints to standard output, on rank 0 only.
template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  if (speaks_for_all()) fmt::print(format, std::forward<Args>(args)...);
}

}  // namespace usp
