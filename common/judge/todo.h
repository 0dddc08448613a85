#pragma once

#include "base/check.h"

namespace usp {

/// What a starter throws where the reader's lines are to stand.
class Unsolved : public Error {
 public:
  using Error::Error;
};

}  // namespace usp

/// The hole of an exercise. A function without its lines compiles, and says so where it is called.
#define USP_TODO(exercise) throw ::usp::Unsolved(exercise)
