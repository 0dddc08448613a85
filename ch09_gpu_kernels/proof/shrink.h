#pragma once

#include <optional>
#include <string>
#include <vector>

#include "proof/classes.h"

namespace usp {

/// A layout that behaves as a larger one does and can be run.
struct Twin {
  TrainConfig config;  ///< in f64, on the CPU
  std::string flags;   ///< that make it of the program's defaults
  std::vector<RemainderClass> classes;
};

/// What stands for a layout.
struct TwinFamily {
  std::vector<RemainderClass> real;  ///< the layout's classes
  std::vector<Twin> twins;
  std::vector<std::string> without;  ///< dimensions that the first has no room for: mostly none
  std::vector<LostClass> lost;       ///< classes that none of them has, as the first has them
};

/// Shrinks a layout to at most five twins of at most this many ranks each. Of the meshes that fit
/// it takes those that keep most classes, and finds sizes for each, group by group, smallest first.
/// What one twin loses the next one looks for; it may leave dimensions out. Every twin has several
/// ranks, and is one that the checks of all parts accept. Throws UsageError where there is none.
TwinFamily shrink(const TrainConfig& real, int64_t most_ranks);

std::vector<int64_t> divisors(int64_t n);  ///< from 1 to n

/// What these flags make of the program's defaults; nothing where a rule refuses them.
std::optional<Twin> read_twin(std::vector<std::string> flags);

/// The twin's model and batch on one rank.
TrainConfig alone(const Twin& twin);

}  // namespace usp
