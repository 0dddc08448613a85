#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "accounting/dry_rank.h"
#include "data_parallel/zero_layout.h"

namespace usp {

/// What is done in a row for one micro-batch in a chunk of this rank's blocks.
struct ChunkPass {
  int64_t chunk = 0;
  bool forward = true, backward = true;
  bool gradients = true;  ///< of weights, where the backward pass leaves off
};

/// A unit on paper.
struct UnitShape {
  int64_t numel;                ///< as padded to a multiple of Z
  int64_t held;                 ///< as it is
  std::vector<int64_t> blocks;  ///< that read it, in order
  std::string group;            ///< over which its gradients are summed
  int64_t copies;               ///< ranks of the group
  int64_t ranks;                ///< Z of them shard one copy
  int64_t rank;                 ///< this one, in the group

  int64_t shard() const { return numel / ranks; }
  int64_t copy() const { return rank / ranks; }  ///< of which this rank has a shard
  /// What this rank of the group updates: its shard without the padding, which the last ones have.
  int64_t updated_by(int64_t which) const {
    return std::clamp<int64_t>(held - which % ranks * shard(), 0, shard());
  }
  /// Elements that a rank sends when it is gathered, or its gradients are reduced.
  int64_t sent() const { return (ranks - 1) * shard(); }
};

/// A parameter's gradient on paper.
struct GradientShape {
  std::string group;  ///< over which it is summed
  int64_t numel;
};

/// The units of a rank's model that has no memory.
struct ZeroShapes {
  ZeroShapes(const TrainConfig& config, DryRank& rank);
  int64_t all() const;      ///< elements of all units
  int64_t shards() const;   ///< of a rank's shards of them
  int64_t updated() const;  ///< of these without padding

  const DryRank& rank;
  std::vector<UnitShape> units;  ///< in the order of the parameters
  std::vector<BlockRange> chunks;
  std::vector<GradientShape> parameters;  ///< in the order of the flat tensors
  int64_t held = 0;                       ///< elements of all parameters
};

/// A step of ZeRO walked through with sizes alone: which units class Zero would gather, write and
/// reduce, in its order. Elements, of this rank.
class ZeroWalk {
 public:
  ZeroWalk(const TrainConfig& config, const ZeroShapes& shapes);

  int64_t gathered = 0, most_gathered = 0;         ///< in the step, and at a time
  int64_t reduced = 0;                             ///< in the step
  int64_t sent_to_gather = 0, sent_to_reduce = 0;  ///< by this rank, in the step
  int64_t most_written = 0;                        ///< gradients before they are reduced, at a time
  int64_t most_written_unpadded = 0;               ///< the same without what fills up units
  int64_t most_added = 0;                          ///< of a reduction that is added to the sum
  int64_t scratch = 0;                             ///< bytes, of all reductions that are under way

 private:
  /// Scratch of one group's reductions that are under way at once. They share it: only one that
  /// needs more than all before it has its own.
  struct Scratch {
    int64_t bytes = 0, largest = 0;

    void add(int64_t needed);
  };
  using Units = std::vector<size_t>;  ///< indices, in order

  void enter(const Units& units, const Units& next, const std::vector<bool>& stays);
  void gather(size_t unit);
  void run(const ChunkPass& pass);
  // [gradients]
  void add_gradients(int64_t chunk);
  void contribute(size_t unit);
  bool add_mixture(int64_t block, const Units& units);  ///< false: the block is no such layer
  // [gradients]
  void begin(size_t unit);
  void reduce(size_t unit);
  void complete();
  void count_scratch();

  const TrainConfig& config_;
  const ZeroShapes& shapes_;
  const KeptByStage kept_;
  int64_t rounds_, in_round_;   ///< reductions of a unit; micro-batches in one
  std::vector<Units> read_by_;  ///< of each block
  std::vector<bool> whole_;     ///< of each unit: its weights
  std::vector<int64_t> contributions_, rounds_done_;
  int64_t live_ = 0, written_ = 0, written_unpadded_ = 0;
  Units reducing_;
  std::map<std::string, Scratch> shards_, copies_;  ///< by group
};

}  // namespace usp
