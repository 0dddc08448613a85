#pragma once

#include "tensor/positions.h"

namespace usp {

/// What one of several ranks has of a sample.
struct ZigzagShare {
  Positions positions;  ///< of its rows, ascending
  int64_t pairs = 0;    ///< of its queries with the keys they see, wherever these are
};

}  // namespace usp
