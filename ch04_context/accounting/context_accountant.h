#pragma once

#include "accounting/dry_rank.h"
#include "accounting/memory.h"
#include "run/rank_classes.h"
#include "run/traffic.h"

namespace usp {

/// Bytes that all ranks together send over their groups of cp in a step, by operation.
struct ContextTraffic {
  int64_t send = 0;            ///< keys, values and their gradients around rings
  int64_t all_gather = 0;      ///< keys and values
  int64_t reduce_scatter = 0;  ///< their gradients
  int64_t all_to_all = 0;      ///< of tokens for heads, and back

  int64_t total() const { return send + all_gather + reduce_scatter + all_to_all; }
};
/// With k the bytes of keys and values of a rank's rows, k' those of their gradients in acc dtype,
/// q and o those of its qkv and its attention's output, a block makes each rank of a ring of n, and
/// of a group of u that exchanges heads, send
///
/// |            | forward         | backward                  |
/// |------------|-----------------|---------------------------|
/// | ring       | (n-1) k         | (n-1) (k + k')            |
/// | all-gather | (n-1) k         | (n-1) (k + k')            |
/// | Ulysses    | (u-1)/u (q + o) | (u-1)/u (q + o)           |
///
/// Under ring_ulysses both, where a rank's share of its group's keys travels. Where a group has
/// more ranks than there are kv heads, q counts a head as often as it is sent, and gradients go
/// back in acc dtype. Full recomputation adds forward's once more, unless attention's output is
/// kept; Ulysses sends even then.
ContextTraffic predict_context_traffic(const TrainConfig& config);

/// On a ring of contiguous shares, a place has its own keys, and receives those of places before
/// it: from the third on as many are there at a time.
RankTrait ring_trait(const TrainConfig& config);
/// Keys that a query of this rank meets below the causal mask, on average: where a ring's shares
/// are contiguous, later ranks have more.
double keys_of_a_query(const TrainConfig& config, int rank);

/// What this rank sends over cp while a step computes.
Traffic traffic_of(const ContextParallelConfig& cp, const TrainConfig& config, const DryRank& dry);

}  // namespace usp
