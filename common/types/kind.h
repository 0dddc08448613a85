#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mesh.h"

/// A type for every tensor: how its values on different ranks are related.
namespace usp::types {

/// How the values of a tensor are related along one factor of the mesh.
enum class Kind : uint8_t {
  unwritten,   ///< nothing has been written yet, or what was there is out of date
  zero,        ///< 0 on every rank: fits each of the others
  replicated,  ///< the same on every rank
  partial,     ///< terms of a sum: the value is the sum over the ranks
  maximum,     ///< the value is the maximum over the ranks
  own_sums,    ///< sums of exp(x - own maximum): no sum can be taken before they are rescaled
  rows,        ///< other rows on each rank: tokens, or elements of a flat shard
  columns,     ///< other columns on each rank: features, heads, words of the vocabulary
  outputs,     ///< of a weight: other rows
  inputs,      ///< of a weight: other columns
  experts,     ///< of weights: other experts
  dispatched,  ///< the rows that were sent to each rank's experts
  layers,      ///< of another stage of the pipeline
  unknown,     ///< integers that the host makes; nothing is said of them
};
/// How many kinds there are.
inline constexpr int kKinds = static_cast<int>(Kind::unknown) + 1;

char letter(Kind kind);             ///< as tables have it
std::string_view words(Kind kind);  ///< as errors have it

/// Ranks that differ in one digit: every `stride`-th along an axis of the mesh, `size` of them.
/// Each axis is a product of such factors, and so is each group of ranks; ep takes some of dp's and
/// cp's.
struct Factor {
  MeshAxis axis = MeshAxis::dp;
  int64_t stride = 1, size = 1;

  std::string_view name() const { return kMeshAxes[size_t(axis)]; }  ///< of the axis
  /// The digit of a rank of the world.
  int64_t place(const MeshSizes& mesh, int64_t rank) const {
    return mesh.coordinates(rank)[size_t(axis)] / stride % size;
  }
};

/// One axis's digits are cut at these sizes, which may come from groups that take some of its
/// ranks.
using Cuts = std::vector<std::pair<MeshAxis, int64_t>>;

/// The factors of a mesh: each axis cut where groups are, and then into primes; pp is one factor.
/// Throws UsageError where of two cuts of an axis neither divides the other.
std::vector<Factor> factors_of(const MeshSizes& mesh, const Cuts& cuts);

/// A group of so many ranks that takes them from these axes, the first axis's first, as ep does:
/// where it cuts them. Throws UsageError where it takes neither all nor a factor of an axis.
Cuts cuts_of(const MeshSizes& mesh, const std::vector<MeshAxis>& fastest_first, int64_t ranks);

/// A mesh has at most so many.
inline constexpr int kFactors = 24;
/// A kind for every factor of the mesh.
using Type = std::array<Kind, kFactors>;

/// The type that is of this kind along every factor.
inline Type all_of(Kind kind) {
  Type type;
  type.fill(kind);
  return type;
}

/// Whether it fits each other kind.
inline bool is_neutral(Kind kind) {
  return kind == Kind::zero || kind == Kind::unwritten || kind == Kind::unknown;
}

/// What a schema gives where it has no answer.
inline constexpr auto kRefused = static_cast<Kind>(255);

// The schemas, along one factor. What comes of the kinds of operands; kRefused: these do not fit.

/// Result of operands that are added, compared, or must agree for another reason.
Kind same(Kind x, Kind y);
/// Kind of parts that lie side by side in a tensor. They must agree, but for q's heads beside k's
/// and v's, of which ranks have copies.
Kind beside(Kind x, Kind y);
/// Result of a function that is not linear: it needs the whole value.
Kind nonlinear(Kind x);
/// Linear in dy, beside x, which was read in forward.
Kind linear_in(Kind dy, Kind x);
/// x [T, I] times a weight [O, I], summed over I.
Kind times(Kind x, Kind weight);
/// dy [T, O] times a weight [O, I], summed over O.
Kind times_transposed(Kind dy, Kind weight);
/// dy [T, O] times x [T, I], summed over the rows T: a weight's gradient.
Kind over_rows(Kind dy, Kind x);
/// A number that x enters, and that is summed over all ranks: what is the same on all enters it on
/// the first alone.
Kind term(Kind x, bool is_first);

}  // namespace usp::types
