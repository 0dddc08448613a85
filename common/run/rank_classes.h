#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/mesh.h"

namespace usp {

/// Something that the shapes of a rank's tensors follow from. Each technique that makes ranks
/// differ has one.
struct RankTrait {
  std::function<int64_t(const MeshPlace&)> value;
  std::function<std::string(int64_t value)> text;  ///< for people; "" where there is nothing to say
};

/// The values of all traits in a place of the mesh.
std::vector<int64_t> trait_values(const std::vector<RankTrait>& traits, const MeshPlace& at);

/// Ranks of the world whose tensors have the same shapes.
struct RankClass {
  int rank = 0;       ///< the first of them
  int64_t ranks = 0;  ///< how many they are
  std::string what;   ///< what their shapes follow from
};

/// All ranks of a run: those with the same values of these traits are in one class, in the order of
/// their first ranks.
std::vector<RankClass> classes_of_ranks(const MeshSizes& mesh,
                                        const std::vector<RankTrait>& traits);

}  // namespace usp
