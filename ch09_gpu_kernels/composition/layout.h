#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/parameter.h"

namespace usp {

struct TrainConfig;

/// A part of a weight, and every rank that holds it, as the Parameters of these ranks say.
struct PlacedPart {
  std::string name;           ///< of the weight
  Shape global_shape;         ///< of the whole weight
  std::vector<Slice> slices;  ///< which part of it
  std::vector<int> ranks;     ///< of the world, that hold it, in their order

  std::vector<std::string> sharded_over;  ///< groups whose ranks hold other parts, or other weights
  std::vector<std::string> copied_over;   ///< groups whose ranks all hold this one
  std::vector<std::string> summed_over;   ///< groups over which its gradient is summed

  /// Elements [begin, end) of the part, flattened, that a rank updates.
  struct Owner {
    int rank;
    int64_t begin, end;
    bool saves;  ///< whether it writes them to checkpoints, too
  };
  std::vector<Owner> owners;  ///< in the order of the ranks
};

/// All of them, in the order of the first rank that holds each. Every rank's trainer is built once,
/// on paper. Throws UsageError where there are more than 4096 ranks.
std::vector<PlacedPart> place_parameters(const TrainConfig& config);

/// Whether two ranks update the same elements, so that --check_copies has something to compare.
bool has_copies(const std::vector<PlacedPart>& parts);

/// A kind of groups of several ranks, all of one size.
struct PlacedGroups {
  std::string name;
  std::vector<std::vector<int>> groups;  ///< the ranks of each
  int64_t most_nodes = 1;                ///< on which the ranks of one of them lie
};

/// The kinds that this layout has: groups of the mesh, of ZeRO's shards, of ranks that exchange
/// tokens for heads, and of stages that hold copies of the same weights.
std::vector<PlacedGroups> place_groups(const TrainConfig& config);

/// What --mesh_show prints: coordinates of the ranks, groups, and who holds what; or the flags, as
/// Session::flags() has them, with the ranks and the layers of each stage that they come to.
std::string show_layout(const TrainConfig& config, const std::string& flags);

}  // namespace usp
