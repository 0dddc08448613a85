#include "ideas.h"

namespace usp::ideas {

std::span<const Ideas* const> all() {
  static constexpr const Ideas* kAll[] = {&kPrimer,     &kLayerNorm, &kCoalescing, &kBanks,
                                          &kDivergence, &kOccupancy, &kFusion,     &kReduction};
  return kAll;
}

}  // namespace usp::ideas
