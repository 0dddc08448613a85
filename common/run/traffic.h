#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "run/trainer_base.h"

namespace usp {

/// Operations of communicators, which the ledger knows by name. There is always one: a figure
/// without a source cannot be declared.
class Operations {
 public:
  Operations(const Communicator& group, CommKind kind) { add(group, kind); }
  /// Counts these as well; the same ones twice count once.
  Operations& add(const Communicator& group, CommKind kind);
  /// Bytes that a rank has sent by them, by its ledger, since the earlier one.
  int64_t wire_bytes(const Ledger& ledger, const Ledger& since = {}) const;

 private:
  std::set<std::pair<std::string, CommKind>> operations_;
};

/// What a technique sends in a step: what is counted, and beside it what its formula says.
struct Traffic {
  std::string what;                     ///< "gradients sent"
  Operations counted;                   ///< in the ledger
  double formula = 0;                   ///< bytes that this rank sends in a step
  std::string beside = ", by formula";  ///< between both figures, and behind them, in the report
  std::string note = {};
};

/// Counts what this rank sends in training steps, and nothing that validation, sampling or
/// checkpoints send between them.
class TrafficCounter {
 public:
  void begin_step();  ///< from here on counts
  void end_step();    ///< until here; the step is over
  /// Adds a row for each technique: bytes a step that were sent, beside the formula's. None where
  /// both are zero.
  void add_rows(ReportRows& rows, const std::vector<Traffic>& techniques) const;

 private:
  Ledger before_, sent_;
  int64_t steps_ = 0;
};

}  // namespace usp
