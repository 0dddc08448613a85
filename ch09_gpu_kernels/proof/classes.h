#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config.h"

namespace usp {

/// Something that a layout's behavior depends on, and how it is in this one: "layers over stages"
/// is "several, with a rest". Two layouts with the same classes take the same ways through the
/// code, whatever their sizes.
struct RemainderClass {
  std::string name;   ///< what is divided by what
  std::string label;  ///< how it comes out
  double weight;      ///< what it is worth to keep it in a smaller layout
};

/// All classes of a configuration that validate() has taken, or would take: of the axes, of the
/// groups inside groups, and of every division in a check() or where parts are cut.
std::vector<RemainderClass> classes(const TrainConfig& config);
/// Classes among these that the widths of the model and its vocabulary decide.
std::vector<RemainderClass> classes_of_widths(const TrainConfig& config);

/// A class that two layouts do not share; "-": a layout that does not have it.
struct LostClass {
  std::string name, real, twin;
  double weight;
};

/// Classes of `real` with another label in `twin`, and classes that `twin` alone has.
std::vector<LostClass> lost_classes(const std::vector<RemainderClass>& real,
                                    const std::vector<RemainderClass>& twin);

/// Elements of the parameters of one of ZeRO's units, in their order, on the first rank of tp that
/// holds it: such as an MoE layer without its experts.
struct UnitSizes {
  std::string name;
  std::vector<int64_t> sizes;
  int64_t ranks;  ///< that shard one copy
};

/// One of every kind. A formula, because a search asks it of many thousand models; a test holds it
/// against the units of the model itself.
std::vector<UnitSizes> unit_sizes(const TrainConfig& config);

}  // namespace usp
