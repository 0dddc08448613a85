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

void TrafficTable::add(const Traffic& row) { rows_.push_back({row}); }

std::vector<Traffic> TrafficTable::rows() const {
  std::vector<Traffic> all;
  for (const Row& row : rows_) all.push_back(row.traffic);
  return all;
}

void TrafficTable::begin_step() {
  for (Row& row : rows_) row.before = row.traffic.counted.wire_bytes();
}

void TrafficTable::end_step() {
  for (Row& row : rows_) row.sent += row.traffic.counted.wire_bytes() - row.before;
  ++steps_;
}

ReportRows TrafficTable::report(ReportRows rows) const {
  for (const auto& [traffic, before, sent] : rows_) {
    if (sent == 0 && traffic.formula == 0) continue;  // an axis of one rank
    const double a_step = double(sent) / double(std::max<int64_t>(1, steps_));
    rows.emplace_back(traffic.what, fmt::format("{:.0f} bytes a step by rank 0{} {:.0f}{}", a_step,
                                                traffic.beside, traffic.formula, traffic.note));
  }
  return rows;
}

}  // namespace usp
