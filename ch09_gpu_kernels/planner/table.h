#pragma once

#include <map>
#include <string>
#include <vector>

namespace usp {

/// A file of comma-separated values, whose first line names the columns.
struct Table {
  std::string file;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;

  /// Adds a column, one text a row.
  void add(const std::string& column, std::vector<std::string> values);
  /// The file's text.
  std::string text() const;
};

/// Reads such a file. Throws UsageError with the line that has other values than columns, or with
/// the first column that is not among the known.
Table read_table(const std::string& file, const std::vector<std::string>& known);

/// A row of a table, asked by a column's name.
class TableRow {
 public:
  TableRow(const Table& table, size_t row) : table_(table), row_(row) {}

  /// "" where there is no such column or no value.
  std::string text(const std::string& column) const;
  bool has(const std::string& column) const { return !text(column).empty(); }
  /// A whole number of at least 1. Throws UsageError with the file's line.
  int64_t whole(const std::string& column) const;
  /// The same, or `missing` where there is none.
  int64_t whole(const std::string& column, int64_t missing, int64_t minimum = 1) const;
  double number(const std::string& column) const;  ///< 0 where there is none
  std::string where() const;                       ///< "FILE, line 3"

 private:
  const Table& table_;
  size_t row_;
};

}  // namespace usp
