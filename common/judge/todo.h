#pragma once

#include "base/check.h"

namespace usp {

/// What a starter throws where the reader's lines are to stand.
class Unsolved : public Error {
 public:
  using Error::Error;
};

/// Throws it. A function, because a kernel may not touch the host's memory, where an exception
/// lies.
[[noreturn]] void throw_unsolved(const char* exercise);

}  // namespace usp

/// The hole of an exercise. A function without its lines compiles, and says so where it is called.
#define USP_TODO(exercise) ::usp::throw_unsolved(exercise)
