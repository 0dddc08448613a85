#include "ladder.h"

#include <algorithm>

#include "base/check.h"

namespace usp::ladder {

std::span<const Rung<float>* const> f32_rungs() {
  static constexpr const Rung<float>* kRungs[] = {
      &kNaive, &kCoalesced, &kTiled, &kCoarsened1d, &kCoarsened2d, &kVectorised, &kCpAsync};
  return kRungs;
}

std::span<const Rung<bf16>* const> bf16_rungs() {
  static constexpr const Rung<bf16>* kRungs[] = {&kMma, &kTmaWgmma, &kRing, &kPersistent};
  return kRungs;
}

template <class T>
void check(const Rung<T>& rung, const Product<T>& x) {
  const auto check_one = [&](const char* name, const void* address, int pitch, int least) {
    const auto bytes = static_cast<int>(rung.unit * sizeof(T));
    const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(address) % bytes);
    if (beyond != 0) {
      usage_error(
          "{}: the address of {} must be a multiple of {} bytes, and is {} beyond one; try "
          "to begin {} elements later",
          rung.name, name, bytes, beyond, (bytes - beyond) / sizeof(T));
    }
    if (pitch < least || pitch % rung.unit != 0) {
      const int tried = (std::max(pitch, least) + rung.unit - 1) / rung.unit * rung.unit;
      usage_error("{}: {}_pitch={} must be at least {} and a multiple of {}; try {}", rung.name,
                  name, pitch, least, rung.unit, tried);
    }
  };
  check_one("a", x.a, x.a_pitch, x.k);
  check_one("b", x.b, x.b_pitch, sizeof(T) == sizeof(float) ? x.n : x.k);
  check_one("c", x.c, x.c_pitch, x.n);
}

template void check(const Rung<float>&, const Product<float>&);
template void check(const Rung<bf16>&, const Product<bf16>&);

}  // namespace usp::ladder
