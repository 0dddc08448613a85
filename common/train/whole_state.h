#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/checkpoint.h"

namespace usp {

/// Gradients, weights and optimizer states of a model after a step, whole: what they come to
/// whatever the layout. A rank that holds parts is compared element by element, because the norm
/// of a transposed weight is the right one.
class WholeState {
 public:
  /// A copy of what a rank has that holds all of the model. Reads from the device.
  explicit WholeState(const TrainState& alone);

  /// An element that is not as it should be.
  struct Difference {
    size_t order;                 ///< of its tensor: gradients come before what follows from them
    std::string parameter, what;  ///< such as "gradient"
    int64_t element;              ///< row-major, in the whole weight
    double found, expected;
  };
  /// What compare() has found.
  struct Comparison {
    double largest = 0;               ///< difference of an element, relative to its tensor's scale
    std::optional<Difference> first;  ///< of the first tensor that differs, its worst element
  };
  /// The elements that this rank updates beside the whole ones. A tensor's scale is its largest
  /// element, but at least 1e-5 of the largest of its kind: a gradient that is nothing but
  /// rounding, as that of a gate which is always 1, may be rounded otherwise. Reads from the
  /// device.
  Comparison compare(const TrainState& state, double tolerance) const;

 private:
  struct Whole {
    std::vector<double> values;
    double scale = 0;
  };
  struct Kind {
    std::string what;
    std::map<std::string, Whole> of;  ///< by parameter
  };

  std::vector<Kind> kinds_;
};

}  // namespace usp
