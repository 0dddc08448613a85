#pragma once

#include <string>

#include "lab/attention_case.h"

/// What a row's softmax takes on the emulated GPU.
namespace usp::lab {

/// Exponentials and rescalings of a row.
struct Exponentials {
  double by_unit;        ///< weights by the unit for special functions
  double by_polynomial;  ///< weights by FMAs
  double rescalings;     ///< of what was summed: each has a factor, which takes another exponential
};

/// Exponentials of each row, where queries see all keys, in whole tiles. Options::counters has to
/// be set. A factor is computed by each of the four threads that have the row.
inline Exponentials exponentials_of(const Rung<bf16>& rung, const Shape& shape) {
  constexpr int kThreadsOfRow = 4;
  const Attended<bf16> x(rung, shape);
  rung.run(nullptr, x.problem);
  const emulator::Report report = emulator::take_report();
  const double rows = 1.0 * shape.samples * shape.heads * shape.queries, weights = shape.keys;
  double mixed = 0;  // of a rung that has powers of its own
  for (const auto& [line, counted] : report.lines) {
    if (line.starts_with(rung.name + std::string(".cu:"))) mixed += counted.exponentials / rows;
  }
  const double all = report.total.exponentials / rows, by_unit = mixed > 0 ? mixed : weights;
  return {by_unit, weights - by_unit, (all - by_unit) / kThreadsOfRow};
}

}  // namespace usp::lab
