#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/args.h"
#include "comm/mesh.h"
#include "run/run_config.h"
#include "tensor_parallel/region.h"
#include "train/pass.h"

namespace usp {

struct TrainConfig;

/// Who shares the tokens of a sample, and how a query meets the keys of the others.
struct ContextParallelConfig {
  int64_t cp_size = 1;  ///< ranks that shard the tokens of every sample
  std::string cp_layout = "zigzag";
  std::string cp_method = "ring";
  int64_t ulysses_size = 1;  ///< ranks that exchange tokens for heads, under ring_ulysses
  std::string cp_overlap = "compute";
  std::string cp_recompute = "exchange";
  bool document_mask = false;
  int64_t document_separator = 0;  ///< the token that ends a document

  /// Whether full recomputation leaves attention out: its output is kept.
  bool keeps_attention() const { return cp_recompute == "keep" && cp_size > 1; }

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where the model or its samples do not divide.
  void check(const TrainConfig& run) const;

  /// Ranks of a group that exchanges tokens for heads: neighbors.
  int64_t head_ranks() const;
  /// Ranks of a ring, each of which is such a group.
  int64_t ring_size() const { return cp_size / head_ranks(); }
  bool overlaps() const { return cp_overlap != "none"; }
  /// Whether keys travel around a ring, rather than to all at once.
  bool by_ring() const { return cp_method == "ring" || cp_method == "ring_ulysses"; }

  // [positions]
  /// Positions of a sample of S tokens that a place of the ring holds.
  Positions of_ring_place(int64_t S, int64_t place) const;
  /// Positions that a rank of cp holds: its share of those of its place in the ring.
  Positions of_rank(int64_t S, int64_t rank) const;
  // [positions]
};

/// A rank's view of those with which it shards the tokens of a sample: cp ranks, in groups of
/// u that exchange tokens for heads, the groups on rings of n = cp/u places.
class ContextGroup {
 public:
  ContextGroup() = default;  ///< of a single rank, where nothing is sent
  ContextGroup(const ContextParallelConfig& config, const Communicator& cp);

  const ContextParallelConfig& config() const { return config_; }
  int64_t size() const { return config_.cp_size; }
  int64_t rank() const { return cp_ ? cp_->rank() : 0; }
  int64_t ring_place() const { return rank() / config_.head_ranks(); }

  const Communicator& cp() const { return *cp_; }
  const Communicator& ring() const { return *ring_; }
  /// The same ranks: gradients travel beside keys, and neither waits for the other.
  const Communicator& ring_gradients() const { return *ring_gradients_; }
  const Communicator& heads() const { return *heads_; }

  /// Gives the pass this rank's rows of whole samples, and where their documents begin: at
  /// `begins`, the position for each token, or if that is empty behind the separators.
  void take_rows(std::span<const int32_t> tokens, std::span<const int32_t> targets, Pass& pass,
                 std::vector<int32_t> begins = {}) const;
  /// Positions of this rank's rows.
  Positions positions(int64_t S) const { return config_.of_rank(S, rank()); }
  /// Positions of the rows that meet in this rank's attention: its own, or its group's.
  Positions attended(int64_t S) const { return config_.of_ring_place(S, ring_place()); }

 private:
  ContextParallelConfig config_;
  std::optional<Communicator> cp_, ring_, ring_gradients_, heads_;
};

/// Numbers at the positions, of samples of S numbers each.
std::vector<int32_t> take_positions(std::span<const int32_t> samples, int64_t S,
                                    const Positions& positions);
/// Position, for every token of samples of S, at which its document begins: behind the last
/// separator before it.
std::vector<int32_t> document_begins(std::span<const int32_t> samples, int64_t S,
                                     int64_t separator);

}  // namespace usp
