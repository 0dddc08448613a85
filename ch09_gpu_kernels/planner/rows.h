#pragma once

#include <string>
#include <vector>

#include "planner/cluster.h"
#include "planner/parts.h"
#include "planner/table.h"

namespace usp {

/// A row of a table of runs: a layout, and what was measured of it.
struct RunRow {
  TrainConfig config;
  bool by_framework = false;  ///< the cluster's profile is about it
  double step_s = 0;          ///< measured; 0: unknown
  double mem_gb = 0;          ///< likewise, of the fullest rank
  bool failed = false;        ///< it did not run
};

/// What is predicted of a row.
struct RowPrediction {
  double step_s = 0;
  double gib = 0;  ///< of the fullest rank
  bool fits = false;
};

/// The layout that a row describes: GPT's MLPs and vocabulary become a Llama's. Throws UsageError,
/// with the row, where it is none.
RunRow read_row(const TableRow& row, const TrainConfig& base, const Cluster& cluster);
/// All rows of a file, as read_row() has them.
std::vector<RunRow> read_rows(const Table& table, const TrainConfig& base, const Cluster& cluster);
/// The columns that a table of runs may have.
const std::vector<std::string>& row_columns();

/// Predicts rows; those that share a layer class share its record.
class RowPredictor {
 public:
  /// The step of a row on a cluster, which may be another one each time.
  RowPrediction predict(const RunRow& row, const Cluster& cluster);
  /// Seconds alone, from parts that part_seconds() found before.
  const LayerClass& layer_class(const RunRow& row);
  int64_t classes() const { return std::ssize(classes_); }  ///< recorded so far

 private:
  std::map<std::string, LayerClass> classes_;
};

/// GiB of the fullest rank: what this trainer needs, or a framework by its profile.
double gib_of_row(const RunRow& row, const Cluster& cluster);

/// Reads the rows of a file and writes them with what is predicted to another. Returns a summary.
std::string predict_rows(const TrainConfig& config);

}  // namespace usp
