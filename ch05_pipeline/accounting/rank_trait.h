#pragma once

#include <functional>
#include <string>

#include "comm/mesh.h"

namespace usp {

/// Something that the shapes of a rank's tensors follow from. Each technique that makes ranks
/// differ has one.
struct RankTrait {
  std::function<int64_t(const MeshPlace&)> value;
  std::function<std::string(int64_t value)> text;  ///< for people; "" where there is nothing to say
};

}  // namespace usp
