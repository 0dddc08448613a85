#pragma once

#include <string>
#include <vector>

#include "context_parallel/group.h"
#include "formula.h"
#include "layers.h"
#include "train/footprint.h"

namespace usp {

/// A core of attention that says of itself what it is told, whoever is around it.
class ToldCore : public CoreAttention {
 public:
  /// Heads and channels of a rank.
  ToldCore(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, Footprint told)
      : CoreAttention(num_heads, num_kv_heads, head_dim, Probabilities::never_whole),
        told_(std::move(told)) {}
  Footprint footprint(const PassShape&) const override { return told_; }

 private:
  Footprint told_;
};

/// How the queries of a rank meet all keys of a sample.
struct Exchange {
  Probabilities probabilities;
  std::string method;   ///< a cp_method; "none" where a rank has the whole sample
  bool copies = false;  ///< more ranks exchange heads than there are kv heads

  bool in_ring() const { return method != "none" && method != "ulysses"; }
  bool by_head() const { return method == "ulysses" || method == "ring_ulysses"; }
  /// Over n places of groups of u.
  ContextParallelConfig config(int64_t n, int64_t u) const;
};
std::vector<Exchange> exchanges();
/// "stored", "recomputed" or "never_whole".
std::string name_of(Probabilities probabilities);

/// What attention's core says of itself, as formulas of the sizes of a rank:
/// {exchanges: [{attends, method, copies}],
///  saved: [{name, through, bytes, exchanges}],   through: of what outlives a recomputation
/// Exchanges are meant by their numbers.
Json core_table();

}  // namespace usp
