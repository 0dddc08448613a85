#include "pingpong.h"
#include "polynomial.h"

/// What is left beside the products is made less. Outputs are rescaled only where a row's maximum
/// has grown so far that its weights might become too large: until then they are relative to an
/// older one, which changes no result. And some powers of two come from a polynomial, since the
/// units that multiply are many and those for special functions few.
namespace usp::attention {

namespace {

/// Weights stay below 2^kSlack.
constexpr float kSlack = 8;
/// A polynomial computes one of every kEvery powers.
constexpr int kEvery = 4;

/// 2^x = 2^n 2^f, n whole and f from -1/2 to 1/2: n is added to the exponent of the polynomial's
/// 2^f.
__device__ inline float polynomial_exp2(float x) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: what is added to it loses its fraction
  x = fmaxf(x, -126);
  const float shifted = x + kRound, f = x - (shifted - kRound);
  const float y = exp2_of_fraction<kExp2Degree>(f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

struct MixedExp2 {
  __device__ float operator()(float x, int i) const {
    return i % kEvery == 0 ? polynomial_exp2(x) : cuda::fast_exp2(x);
  }
};

struct Softmax : OnlineSoftmax {
  bool moved = false;

  /// Moves the bases of a warp's rows if one of them has to move.
  template <int registers>
  __device__ void take(float (&s)[registers], float scale) {
    float largest[2] = {base[0], base[1]};
    USP_UNROLL
    for (int i = 0; i < registers; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
    largest[0] = row_max(largest[0]);
    largest[1] = row_max(largest[1]);
    const float growth =
        fmaxf(largest[0] - shift_of(base[0]), largest[1] - shift_of(base[1])) * scale;
    moved = __any_sync(cuda::kAllLanes,
                       growth > kSlack || base[0] == -INFINITY || base[1] == -INFINITY);
    if (moved) {
      move(0, largest[0], scale);
      move(1, largest[1], scale);
    }
    sum_weights(s, scale, MixedExp2{});
  }

  template <int registers>
  __device__ void rescale(float (&o)[registers]) const {
    if (!moved) return;
    USP_UNROLL
    for (int i = 0; i < registers; ++i) o[i] *= factor[i / 2 % 2];
  }
};

Cost cost(const Shape& x) { return cost_of(x, kQueries, kKeys, kWarpsThatLook); }

}  // namespace

const Rung<bf16> kFlash4{"flash_4",
                         "fewer rescalings, some powers by FMA",
                         90,
                         kQueries,
                         kKeys,
                         cost,
                         run_pingpong<Softmax>,
                         /*keeps_scores=*/false,
                         kWidestKeys};

}  // namespace usp::attention
