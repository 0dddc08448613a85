#pragma once

#include <string>
#include <vector>

#include "planner/search.h"
#include "planner/timed.h"

namespace usp {

/// A part of two steps. Seconds.
struct PartOfTwo {
  std::string name;  ///< as RankTime::parts has it
  double a = 0, b = 0;
};

/// The parts of two steps, each on its rank that ends last, in the order in which a step has them.
/// They add up to the steps, and their differences to the difference of the two.
std::vector<PartOfTwo> parts_of_two(const Timed& a, const Timed& b);

/// The two layouts of `why`, and what makes one slower than the other, part by part. Each is a
/// number of the search's list, or flags. Throws UsageError for what is neither.
SearchAnswer why(const TrainConfig& config);

/// The two sides of a text such as "1; 4" or "1; --tp_size 8". Throws UsageError where there are
/// others than two.
std::vector<std::string> sides_of_why(const std::string& text);

}  // namespace usp
