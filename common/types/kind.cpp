#include "types/kind.h"

#include <algorithm>
#include <numeric>

namespace usp::types {

using enum Kind;

char letter(Kind kind) { return "-0RPMQTFOIEDL?"[static_cast<int>(kind)]; }

std::string_view words(Kind kind) {
  static constexpr std::array<std::string_view, kKinds> kWords = {
      "unwritten",
      "zero",
      "the same on every rank",
      "a term of a sum",
      "a term of a maximum",
      "a sum that refers to each rank's own maximum",
      "other rows on each rank",
      "other columns on each rank",
      "other outputs of the weight on each rank",
      "other inputs of the weight on each rank",
      "other experts on each rank",
      "rows sent to each rank's experts",
      "other layers on each rank",
      "unknown"};
  return kWords[static_cast<int>(kind)];
}

std::vector<Factor> factors_of(const MeshSizes& mesh, const Cuts& cuts) {
  std::vector<Factor> factors;
  for (MeshAxis axis : {MeshAxis::tp, MeshAxis::cp, MeshAxis::dp}) {
    std::vector<int64_t> at = {1, mesh.size(axis)};
    for (const auto& [of, size] : cuts) {
      if (of == axis) at.push_back(size);
    }
    std::ranges::sort(at);
    for (size_t i = 1; i < at.size(); ++i) {
      int64_t stride = at[i - 1], left = at[i] / at[i - 1];
      if (at[i] % at[i - 1] != 0) {
        usage_error(
            "types need groups that take factors of an axis, and groups of {} and of {} "
            "ranks are cut out of {}; try sizes of which one divides the other",
            at[i - 1], at[i], kMeshAxes[size_t(axis)]);
      }
      for (int64_t prime = 2; left > 1; ++prime) {
        for (; left % prime == 0; left /= prime, stride *= prime) {
          factors.push_back({axis, stride, prime});
        }
      }
    }
  }
  if (mesh.pp > 1) factors.push_back({MeshAxis::pp, 1, mesh.pp});
  USP_CHECK(factors.size() <= kFactors, "a mesh of more than {} factors", kFactors);
  return factors;
}

Cuts cuts_of(const MeshSizes& mesh, const std::vector<MeshAxis>& fastest_first, int64_t ranks) {
  Cuts cuts;
  int64_t left = ranks;
  for (MeshAxis axis : fastest_first) {
    const int64_t size = mesh.size(axis), taken = std::gcd(left, size);
    if (taken < std::min(left, size)) {
      usage_error(
          "types need groups that take factors of an axis, and a group of {} ranks takes "
          "neither all of the {} ranks of {} nor a factor of them; try sizes of which one "
          "divides the other",
          ranks, size, kMeshAxes[size_t(axis)]);
    }
    cuts.emplace_back(axis, taken);
    left /= taken;
  }
  return cuts;
}

Kind beside(Kind x, Kind y) {
  const bool of_heads = std::minmax(x, y) == std::minmax(replicated, columns);
  return of_heads ? columns : same(x, y);
}

namespace {

// [product]
/// x times a weight. If the weight's kind is `own`, each rank makes columns of its own; if it is
/// `summed`, each rank makes a term of a sum.
Kind product(Kind x, Kind weight, Kind own, Kind summed) {
  if (x == unknown || weight == unknown) return unknown;
  if (x == maximum || x == own_sums) return kRefused;
  if (weight == layers) return layers;
  if (weight == replicated || weight == zero) return x == columns ? kRefused : x;
  if (weight == experts && (x == dispatched || x == zero)) return dispatched;
  if (weight == own && (x == replicated || x == zero)) return columns;
  if (weight == summed && (x == columns || x == zero)) return partial;
  return kRefused;
}
// [product]

}  // namespace

// [schemas]
Kind same(Kind x, Kind y) {
  if (x == unknown || y == unknown) return unknown;
  if (x == y || is_neutral(y)) return x;
  if (is_neutral(x)) return y;
  const bool of_stages = std::minmax(x, y) == std::minmax(layers, partial);  // copies on several
  return of_stages ? partial : kRefused;
}

Kind nonlinear(Kind x) { return x == partial || x == maximum || x == own_sums ? kRefused : x; }

Kind linear_in(Kind dy, Kind x) {
  if (nonlinear(x) == kRefused) return kRefused;
  if (dy == partial && (x == replicated || is_neutral(x))) return partial;
  return same(dy, x);
}

Kind times(Kind x, Kind weight) { return product(x, weight, outputs, inputs); }

Kind times_transposed(Kind dy, Kind weight) { return product(dy, weight, inputs, outputs); }
// [schemas]

// [over_rows]
Kind over_rows(Kind dy, Kind x) {
  if (dy == unknown || x == unknown) return unknown;
  if (dy == zero || (dy == layers && x == layers)) return dy;
  if (dy == rows && (x == rows || x == zero)) return partial;
  if (dy == dispatched && x == dispatched) return experts;
  if (dy == replicated && x == replicated) return replicated;
  if (dy == partial && x == replicated) return partial;
  if (dy == columns && x == replicated) return outputs;
  if (dy == replicated && x == columns) return inputs;
  return kRefused;
}
// [over_rows]

// [term]
Kind term(Kind x, bool is_first) {
  if (nonlinear(x) == kRefused) return kRefused;
  if (x == unknown || x == zero) return x;
  return x == replicated && !is_first ? replicated : partial;
}
// [term]

}  // namespace usp::types
