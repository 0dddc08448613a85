#include "run/traffic.h"

#include <algorithm>

#include "tensor/runtime.h"

namespace usp {

Operations& Operations::add(const Communicator& group, CommKind kind) {
  operations_.insert({group.name(), kind});
  return *this;
}

int64_t Operations::wire_bytes(const Ledger& ledger, const Ledger& since) const {
  int64_t bytes = 0;
  for (const auto& [group, kind] : operations_) {
    bytes += ledger.get(group, kind).wire_bytes - since.get(group, kind).wire_bytes;
  }
  return bytes;
}

void TrafficCounter::begin_step() { before_ = Runtime::current().ledger(); }

void TrafficCounter::end_step() {
  for (const auto& [operation, entry] : Runtime::current().ledger().entries()) {
    const auto& [group, kind] = operation;
    sent_.add(group, kind, entry - before_.get(group, kind));
  }
  ++steps_;
}

void TrafficCounter::add_rows(ReportRows& rows, const std::vector<Traffic>& techniques) const {
  for (const Traffic& traffic : techniques) {
    const auto sent = double(traffic.counted.wire_bytes(sent_));
    if (sent == 0 && traffic.formula == 0) continue;  // an axis of one rank
    const double a_step = sent / double(std::max<int64_t>(1, steps_));
    rows.emplace_back(traffic.what, fmt::format("{:.0f} bytes a step by rank 0{} {:.0f}{}", a_step,
                                                traffic.beside, traffic.formula, traffic.note));
  }
}

}  // namespace usp
