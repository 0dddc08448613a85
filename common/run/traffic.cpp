#include "run/traffic.h"

#include <algorithm>

#include "tensor/runtime.h"

namespace usp {

Operations& Operations::add(const Communicator& group, CommKind kind) {
  operations_.insert({group.name(), kind});
  return *this;
}

int64_t Operations::wire_bytes() const {
  int64_t bytes = 0;
  for (const auto& [group, kind] : operations_) {
    bytes += Runtime::current().ledger().get(group, kind).wire_bytes;
  }
  return bytes;
}

TrafficTable::TrafficTable(const std::vector<Traffic>& rows) {
  for (const Traffic& traffic : rows) rows_.push_back({traffic});
}

void TrafficTable::begin_step() {
  for (Row& row : rows_) row.before = row.traffic.counted.wire_bytes();
}

void TrafficTable::end_step() {
  for (Row& row : rows_) row.sent += row.traffic.counted.wire_bytes() - row.before;
  ++steps_;
}

ReportRows TrafficTable::report() const {
  ReportRows report;
  for (const auto& [traffic, before, sent] : rows_) {
    if (sent == 0 && traffic.formula == 0) continue;  // an axis of one rank
    const double a_step = double(sent) / double(std::max<int64_t>(1, steps_));
    report.emplace_back(traffic.what,
                        fmt::format("{:.0f} bytes a step by rank 0{} {:.0f}{}", a_step,
                                    traffic.beside, traffic.formula, traffic.note));
  }
  return report;
}

}  // namespace usp
