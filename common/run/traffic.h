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
  /// Bytes that this rank has sent by them since the program began.
  int64_t wire_bytes() const;

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

/// The rows of a report that tell what this rank sends in training steps: nothing that validation,
/// sampling or checkpoints send between them. Where each figure comes from stands in its row alone.
class TrafficTable {
 public:
  void add(const Traffic& row);       ///< what a technique sends
  std::vector<Traffic> rows() const;  ///< as they were added
  void begin_step();                  ///< from here on counts
  void end_step();                    ///< until here; the step is over
  /// Behind `rows` a row each: bytes a step that were sent, beside the formula's. None where both
  /// are zero.
  ReportRows report(ReportRows rows = {}) const;

 private:
  struct Row {
    Traffic traffic;
    int64_t before = 0, sent = 0;
  };
  std::vector<Row> rows_;
  int64_t steps_ = 0;
};

}  // namespace usp
