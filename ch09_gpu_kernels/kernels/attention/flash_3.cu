#include "pingpong.h"

/// Hopper. A group of its own brings boxes; two others have 64 queries each and take turns at the
/// tensor cores, so that these multiply for one while the other takes its softmax. Inside a group
/// the softmax of a tile lies beside the output's product of the tile before.
namespace usp::attention {

namespace {

struct Softmax : OnlineSoftmax {
  /// Outputs so far, after each tile.
  template <int registers>
  __device__ void rescale(float (&o)[registers]) const {
    USP_UNROLL
    for (int i = 0; i < registers; ++i) o[i] *= factor[i / 2 % 2];
  }
};

Cost cost(const Shape& x) { return cost_of(x, kQueries, kKeys, kWarpsThatLook); }

}  // namespace

const Rung<bf16> kFlash3{"flash_3",
                         "boxes, and warpgroups in turns",
                         90,
                         kQueries,
                         kKeys,
                         cost,
                         run_pingpong<Softmax>,
                         /*keeps_scores=*/false,
                         kWidestKeys};

}  // namespace usp::attention
