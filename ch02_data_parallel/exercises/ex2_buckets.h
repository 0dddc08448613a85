#pragma once

#include <cstdint>

namespace usp {

/// A stretch [begin, end) of the flat gradients that travels as one message.
struct GradientBucket {
  int64_t begin, end;
  int64_t parameters;  ///< that lie in it, wholly or in part: it leaves when all of them are ready
};

}  // namespace usp
