#pragma once

#include <map>
#include <string>
#include <vector>

#include "accounting/memory.h"
#include "config.h"
#include "planner/cluster.h"

namespace usp {

/// A layout that a search looks at, and what it finds.
struct Candidate {
  TrainConfig config;
  double gib = 0;          ///< of the fullest rank
  int64_t fullest = 0;     ///< which
  std::string most;        ///< what it has most of: "weights", "activations", ...
  double closed_form = 0;  ///< seconds of a step, by the book's formulas
};

/// All layouts of a batch, sorted out.
struct Candidates {
  std::vector<Candidate> fit, too_large;
  int64_t of_ranks = 0;                    ///< ways to lay out the ranks
  std::map<std::string, int64_t> refused;  ///< by the rule, with what it prevents
  std::string refusal;                     ///< the first of them, in words
  int64_t uneven = 0;                      ///< the batch does not divide
};

/// The batch that a search lays out.
struct ReachedBatch {
  int64_t samples = 0;
  std::string why;  ///< why it is not the one that is asked for; empty: it is
};

/// The batch that is asked for, or the nearest that the layouts of the ranks reach. Throws
/// UsageError where that is another by more than half.
ReachedBatch reached_batch(const TrainConfig& config, const Cluster& cluster);

/// Every layout of the run's ranks that the command line leaves open: tp, cp, pp, ep and dp,
/// ZeRO's stage, the micro-batch, recomputation. The memory of layouts that are among `known`, of
/// as many ranks on nodes of the same size, is not counted again.
Candidates make_candidates(const TrainConfig& config, const Cluster& cluster,
                           const Candidates* known = nullptr);

/// The rank that predict_fullest() finds, and what it holds; not what it computes.
Prediction fullest_of(const TrainConfig& config);

/// The flags that make this layout of the base.
std::string layout_flags(const TrainConfig& config);

}  // namespace usp
