#include "planner/table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/json_reader.h"

namespace usp {

namespace {

/// Texts between commas; no value here needs quotes.
std::vector<std::string> split_line(std::string line) {
  if (line.ends_with('\r')) line.pop_back();
  std::vector<std::string> values;
  for (size_t at = 0; at <= line.size();) {
    const size_t end = std::min(line.find(',', at), line.size());
    values.push_back(line.substr(at, end - at));
    at = end + 1;
  }
  return values;
}

}  // namespace

void Table::add(const std::string& column, std::vector<std::string> values) {
  columns.push_back(column);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].push_back(std::move(values[i]));
}

std::string Table::text() const {
  std::string text = fmt::format("{}\n", fmt::join(columns, ","));
  for (const auto& row : rows) text += fmt::format("{}\n", fmt::join(row, ","));
  return text;
}

Table read_table(const std::string& file, const std::vector<std::string>& known) {
  std::ifstream stream(file);
  std::string line;
  if (!stream || !std::getline(stream, line)) {
    usage_error("{}: there is no such file, or it is empty; try a file whose first line is {}",
                file, "hidden,heads,layers,seq_len,tp,dp,pp,micro_batch,global_batch");
  }
  if (line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);  // as spreadsheets write it
  Table table{std::filesystem::path(file).filename(), split_line(line), {}};
  for (const std::string& column : table.columns) {
    if (std::ranges::find(known, column) != known.end()) continue;
    usage_error("{}: there is no column {}; try one of: {}", table.file, in_quotes(column),
                fmt::join(known, ", "));
  }
  for (const std::string& column : table.columns) {
    if (std::ranges::count(table.columns, column) == 1) continue;
    usage_error("{}: the column {} is there twice; leave out one of the two", table.file, column);
  }
  for (size_t number = 2; std::getline(stream, line); ++number) {
    if (line.empty()) continue;
    table.rows.push_back(split_line(line));
    if (table.rows.back().size() == table.columns.size()) continue;
    usage_error("{}, line {}: {} values for {} columns; try as many as the first line names",
                table.file, number, table.rows.back().size(), table.columns.size());
  }
  if (table.rows.empty()) {
    usage_error("{}: there is no row; try a line with {} values for each layout", table.file,
                table.columns.size());
  }
  return table;
}

std::string TableRow::where() const { return fmt::format("{}, row {}", table_.file, row_ + 1); }

std::string TableRow::text(const std::string& column) const {
  const auto found = std::ranges::find(table_.columns, column);
  if (found == table_.columns.end()) return "";
  return table_.rows[row_][found - table_.columns.begin()];
}

int64_t TableRow::whole(const std::string& column) const {
  if (!has(column)) usage_error("{}: {} is missing; try {}=1", where(), column, column);
  return whole(column, 1);
}

int64_t TableRow::whole(const std::string& column, int64_t missing, int64_t minimum) const {
  const std::string value = text(column);
  if (value.empty()) return missing;
  int64_t number = minimum - 1;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < minimum ||
      number > int64_t{1} << 24) {
    usage_error("{}: {}={} must be a whole number from {} to {}; try {}", where(), column,
                in_quotes(value), minimum, int64_t{1} << 24, std::max<int64_t>(minimum, 1));
  }
  return number;
}

double TableRow::number(const std::string& column) const {
  const std::string value = text(column);
  if (value.empty()) return 0;
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() ||
      !(number > 0 && number < HUGE_VAL)) {
    usage_error("{}: {}={} must be a number above 0; try 1.5, or leave it empty", where(), column,
                in_quotes(value));
  }
  return number;
}

}  // namespace usp
