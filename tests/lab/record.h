#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "emulator/emulator.h"

/// What a program of a lab prints of a rung: an object, of whose keys ./book lab makes columns.
/// "predicted_x" stands beside "x", which was counted.
namespace usp::lab {

/// Record of the bytes that blocks ask of global memory, predicted and counted.
inline nlohmann::ordered_json record_of(const char* name, const char* type, int64_t predicted_bytes,
                                        const emulator::Counters& counted) {
  return {{"name", name},
          {"type", type},
          {"predicted_bytes", predicted_bytes},
          {"bytes", counted.sector_bytes() + counted.box_bytes}};
}

/// And of operations: those of scalar instructions nobody counts.
inline void add_flops(nlohmann::ordered_json& record, int64_t predicted,
                      const emulator::Counters& counted) {
  record["predicted_flops"] = predicted;
  record["flops"] = nullptr;
  if (counted.product_flops > 0) record["flops"] = counted.product_flops;
}

/// And of how a warp's accesses go.
inline void add_accesses(nlohmann::ordered_json& record, const emulator::Counters& counted) {
  record["sectors_per_load"] = nullptr;  // of a kernel that copies boxes alone
  if (counted.load_requests > 0) record["sectors_per_load"] = counted.sectors_per_load();
  record["bank_conflicts"] = counted.bank_conflicts;
  record["barriers"] = counted.barriers;
}

}  // namespace usp::lab
